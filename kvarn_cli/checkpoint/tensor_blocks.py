"""The bytes of a tensor some rows at a time, so that its size does not matter."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvarn_cli.checkpoint.file_copy import read_at
from kvarn_cli.checkpoint.safetensors_header import TensorInfo

BLOCK_BYTES = 256 << 10
"""What a patch is given at once, unless one step of its rows is larger.

Small on purpose: larger temporaries are mapped and zeroed by the system each time, which takes
longer than the rotation itself.
"""


def rows_at_once(info: TensorInfo, row_step: int = 1) -> int:
    """Rows of a block of at most `BLOCK_BYTES`, or one step of rows where that is larger."""
    row_bytes = info.size_bytes // (info.shape[0] if info.shape else 1) if info.size_bytes else 1
    return max(BLOCK_BYTES // max(row_bytes, 1) // row_step, 1) * row_step


def row_blocks(info: TensorInfo, step: int) -> Iterator[TensorInfo]:
    """Descriptions of `step` consecutive rows each; none of a tensor without elements."""
    if not info.size_bytes:
        return
    rows = info.shape[0] if info.shape else 1
    row_bytes = info.size_bytes // rows
    for first in range(0, rows, step):
        count = min(step, rows - first)
        start = info.start + first * row_bytes
        shape = (count, *info.shape[1:]) if info.shape else ()
        yield replace(info, shape=shape, start=start, end=start + count * row_bytes)


def read_blocks(path: Path, info: TensorInfo, rows: int) -> Iterator[bytearray]:
    """The bytes of a tensor, some rows at a time.

    Raises:
        CheckpointError: the file was cut short.
        OSError: reading failed.
    """
    with path.open("rb", buffering=0) as file:
        for block in row_blocks(info, rows):
            yield read_at(file, block.start, block.end)
