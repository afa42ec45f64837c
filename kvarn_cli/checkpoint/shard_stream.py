"""Write one shard anew in a single pass: most bytes copied, some tensors changed block by block.

Never more than some MB are in memory, or a few rows where these are longer, whatever the size of a
tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from kvarn_cli.checkpoint.file_copy import clone
from kvarn_cli.checkpoint.new_file import NewFile
from kvarn_cli.checkpoint.safetensors_header import (
    DTYPE_BITS,
    Header,
    TensorInfo,
    encode_header,
)
from kvarn_cli.checkpoint.tensor_changes import ChangedAhead, Patch, TensorChange, Workers
from kvarn_cli.metadata import FileRecord


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
    workers: Workers,
) -> WrittenShard:
    """Fill an empty file as planned.

    Args:
        source: the source's shard, open for reading.
        target: open for writing, without a buffer.
        plan: from `plan_shard`, for the same patches.
        patches: by tensor name; names that are not in this shard are left alone.
        advance: told the source's bytes that are done, after each step.
        workers: change the blocks of tensors.

    Raises:
        CheckpointError: the source was cut short.
        ValueError: a patch made more or fewer bytes than planned.
        OSError: reading or writing failed.
    """
    whole = xxhash.xxh3_128()
    changes = {
        name: TensorChange(name, info, patches[name])
        for name, info in plan.tensors.items()
        if name in patches
    }
    shared = plan.header is None and clone(source, target)
    with (
        NewFile(target, whole, shared=shared) as file,
        ChangedAhead(source, changes.values(), workers) as changed,
    ):
        if plan.header is not None:
            file.write(plan.header)
            advance(plan.source.data_start)
        for start, end, name in _segments(plan, patches):
            if name is None:
                file.copy(source, start, end, advance)
                continue
            for block in changes[name].blocks():
                file.write(changed.next())
                advance(block.size_bytes)
    return WrittenShard(
        FileRecord(size_bytes=file.size_bytes, xxh3_128=whole.hexdigest()),
        {name: each.digest.hexdigest() for name, each in changes.items() if each.patch.recorded},
    )


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
