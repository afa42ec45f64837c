"""Write one shard anew in a single pass: most bytes copied, some tensors changed block by block.

Never more than a few blocks are in memory, whatever the size of a tensor.
"""

import hashlib
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from kvarn_cli.checkpoint.file_copy import clone, read_at
from kvarn_cli.checkpoint.new_file import NewFile
from kvarn_cli.checkpoint.safetensors_header import (
    DTYPE_BITS,
    Header,
    TensorInfo,
    encode_header,
)
from kvarn_cli.metadata import FileRecord

BLOCK_BYTES = 256 << 10
"""What a patch is given at once, unless one step of its rows is larger.

Small on purpose: larger temporaries are mapped and zeroed by the system each time, which takes
longer than the rotation itself.
"""

_AHEAD_BYTES = 16 << 20

Buffer = bytes | bytearray | memoryview

ChangeRows = Callable[[bytearray, TensorInfo], Buffer]
"""From the bytes of some rows, and a description of them, to new bytes of the same shape."""


@dataclass(frozen=True)
class Patch:
    """How the bytes of a tensor change.

    Attributes:
        change: called with one block of rows after another.
        row_step: rows in a block are a multiple of this.
        dtype: of the new bytes, by the format's own name; None keeps the tensor's.
        recorded: whether the SHA-256 of the new bytes is wanted.
    """

    change: ChangeRows
    row_step: int = 1
    dtype: str | None = None
    recorded: bool = True


@dataclass(frozen=True)
class ShardPlan:
    """What a shard will consist of.

    Attributes:
        header: length and header text, where they change; None where they are copied too.
        tensors: of the source, by name, in the order in which their bytes will lie.
        source: the source's header.
        size_bytes: of the new file.
    """

    header: bytes | None
    tensors: Mapping[str, TensorInfo]
    source: Header
    size_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors alone."""
        header_bytes = self.source.data_start if self.header is None else len(self.header)
        return self.size_bytes - header_bytes


@dataclass(frozen=True)
class WrittenShard:
    """Hashes of a written shard: of the whole file, and SHA-256 of the recorded tensors."""

    record: FileRecord
    tensors: dict[str, str]


def plan_shard(header: Header, patches: Mapping[str, Patch]) -> ShardPlan:
    """Lay out a shard after its patches.

    The header keeps its bytes when dtypes do. When they change, wide elements come first, as
    readers want them aligned.
    """
    by_place = dict(sorted(header.tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    dtypes = {
        name: patches[name].dtype or info.dtype if name in patches else info.dtype
        for name, info in by_place.items()
    }
    if all(dtypes[name] == info.dtype for name, info in by_place.items()):
        if "format" in header.metadata:
            return ShardPlan(None, by_place, header, header.file_bytes)
    else:
        by_place = dict(sorted(by_place.items(), key=lambda item: -DTYPE_BITS[dtypes[item[0]]]))
    moved, position = {}, 0
    for name, info in by_place.items():
        size = info.size_bytes * DTYPE_BITS[dtypes[name]] // DTYPE_BITS[info.dtype]
        moved[name] = TensorInfo(dtypes[name], info.shape, position, position + size)
        position += size
    in_old_order = {name: moved[name] for name in header.tensors}
    text = encode_header(
        {"format": "pt", **header.metadata}, Header(header.metadata, in_old_order, 0, position)
    )
    return ShardPlan(text, by_place, header, len(text) + position)


def write_shard(
    source: BinaryIO,
    target: BinaryIO,
    plan: ShardPlan,
    patches: Mapping[str, Patch],
    advance: Callable[[int], None],
) -> WrittenShard:
    """Fill an empty file as planned.

    Args:
        source: the source's shard, open for reading.
        target: open for writing, without a buffer.
        plan: from `plan_shard`, for the same patches.
        patches: by tensor name; names that are not in this shard are left alone.
        advance: told the source's bytes that are done, after each step.

    Raises:
        CheckpointError: the source was cut short.
        ValueError: a patch made more or fewer bytes than planned.
        OSError: reading or writing failed.
    """
    whole = xxhash.xxh3_128()
    blocks = {
        name: list(_blocks(info, rows_at_once(info, patches[name].row_step)))
        for name, info in plan.tensors.items()
        if name in patches
    }
    hashes = {name: hashlib.sha256() for name in blocks if patches[name].recorded}

    def new_bytes(name: str, block: TensorInfo) -> int:
        return block.size_bytes * DTYPE_BITS[patches[name].dtype or block.dtype] // DTYPE_BITS[block.dtype]

    def change(name: str, block: TensorInfo) -> Buffer:
        patch = patches[name]
        data = patch.change(read_at(source, block.start, block.end), block)
        if memoryview(data).nbytes != new_bytes(name, block):
            raise ValueError(f"the patch changes the size of tensor {name}")
        if patch.recorded:
            hashes[name].update(data)
        return data

    most = max((new_bytes(name, block) for name in blocks for block in blocks[name]), default=1)
    shared = plan.header is None and clone(source, target)
    with NewFile(target, whole, shared=shared) as file, _Ahead(change, blocks, most) as changed:
        if plan.header is not None:
            file.write(plan.header)
            advance(plan.source.data_start)
        for start, end, name in _segments(plan, patches):
            if name is None:
                file.copy(source, start, end, advance)
                continue
            for block in blocks[name]:
                file.write(changed.next())
                advance(block.size_bytes)
    return WrittenShard(
        FileRecord(size_bytes=file.size_bytes, xxh3_128=whole.hexdigest()),
        {name: tensor.hexdigest() for name, tensor in hashes.items()},
    )


class _Ahead:
    """Changes blocks in a thread, one after the other, some MB before they are written.

    So the disk has work while they are changed, and the changing goes on while the disk is busy
    with what is only copied.

    Args:
        change: gives the new bytes of a block of the named tensor.
        blocks: of each tensor, in the order in which they will be wanted.
        most_bytes: of the new bytes of a block.
    """

    def __init__(
        self,
        change: Callable[[str, TensorInfo], Buffer],
        blocks: Mapping[str, Sequence[TensorInfo]],
        most_bytes: int,
    ) -> None:
        self._change = change
        self._upcoming = ((name, block) for name in blocks for block in blocks[name])
        count = max(_AHEAD_BYTES // most_bytes, 2)
        self._slots = cycle(memoryview(mmap.mmap(-1, most_bytes)) for _ in range(count))
        self._count = count
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[memoryview]] = deque()
        self._fill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> memoryview:
        """The next block's new bytes. They are overwritten at the next call."""
        self._fill()
        return self._pending.popleft().result()

    def _fill(self) -> None:
        while len(self._pending) < self._count and (upcoming := next(self._upcoming, None)):
            job = self._thread.submit(self._put, next(self._slots), *upcoming)
            self._pending.append(job)

    def _put(self, slot: memoryview, name: str, block: TensorInfo) -> memoryview:
        data = memoryview(self._change(name, block)).cast("B")
        slot[: data.nbytes] = data
        return slot[: data.nbytes]


def rows_at_once(info: TensorInfo, row_step: int = 1) -> int:
    """Rows of a block of at most `BLOCK_BYTES`, or one step of rows where that is larger."""
    row_bytes = info.size_bytes // (info.shape[0] if info.shape else 1) if info.size_bytes else 1
    return max(BLOCK_BYTES // max(row_bytes, 1) // row_step, 1) * row_step


def read_blocks(path: Path, info: TensorInfo, rows: int) -> Iterator[bytearray]:
    """The bytes of a tensor, some rows at a time.

    Raises:
        CheckpointError: the file was cut short.
        OSError: reading failed.
    """
    with path.open("rb", buffering=0) as file:
        for block in _blocks(info, rows):
            yield read_at(file, block.start, block.end)


def _segments(
    plan: ShardPlan, patches: Mapping[str, Patch]
) -> Iterator[tuple[int, int, str | None]]:
    """Byte ranges of the source in the new order: joined ones to copy, and tensors to change."""
    start = end = 0 if plan.header is None else plan.source.data_start
    if plan.header is None:
        end = plan.source.data_start
    for name, info in plan.tensors.items():
        if name not in patches and info.start == end:
            end = info.end
            continue
        if start < end:
            yield start, end, None
        start, end = (info.end, info.end) if name in patches else (info.start, info.end)
        if name in patches:
            yield info.start, info.end, name
    if start < end:
        yield start, end, None


def _blocks(info: TensorInfo, step: int) -> Iterator[TensorInfo]:
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
