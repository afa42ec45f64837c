"""What changes in tensors on their way into a new file, and the threads that change them."""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import BinaryIO, Self

from kvarn_cli.checkpoint.buffers import huge_buffer
from kvarn_cli.checkpoint.file_copy import read_at
from kvarn_cli.checkpoint.hashing import Hash
from kvarn_cli.checkpoint.safetensors_header import DTYPE_BITS, TensorInfo
from kvarn_cli.checkpoint.tensor_blocks import BLOCK_BYTES, row_blocks, rows_at_once

ChangeRows = Callable[[bytearray, TensorInfo], bytes | bytearray | memoryview]
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


@dataclass
class TensorChange:
    """A patch at work on its tensor.

    Attributes:
        name: of the tensor.
        info: of the whole tensor in the source.
        patch: what changes it.
        digest: of the new bytes so far.
    """

    name: str
    info: TensorInfo
    patch: Patch
    digest: Hash = field(default_factory=hashlib.sha256)

    @property
    def block_bytes(self) -> int:
        """Most new bytes of one block."""
        return max((self._new_bytes(block) for block in islice(self.blocks(), 1)), default=0)

    def blocks(self) -> Iterator[TensorInfo]:
        """What is changed at once."""
        return row_blocks(self.info, rows_at_once(self.info, self.patch.row_step))

    def change(self, source: BinaryIO, block: TensorInfo) -> memoryview:
        """The new bytes of a block."""
        data = self.patch.change(read_at(source, block.start, block.end), block)
        data = memoryview(data).cast("B")
        if len(data) != self._new_bytes(block):
            raise ValueError(f"the patch changes the size of tensor {self.name}")
        return data

    def _new_bytes(self, block: TensorInfo) -> int:
        bits = DTYPE_BITS[self.patch.dtype or block.dtype]
        return block.size_bytes * bits // DTYPE_BITS[block.dtype]


@dataclass(frozen=True)
class Workers:
    """Who changes blocks ahead of the writing.

    Attributes:
        threads: shared by all shards at work, where the shard begun first goes first: else shards
            that are laid out alike would all wait for V and O at the same time. Each thread keeps
            some MB of buffers for its products, so it is their number that counts.
        ahead_bytes: of new bytes that may wait in one shard, or one block where that is more.
    """

    threads: Executor
    ahead_bytes: int


class ChangedAhead:
    """Has blocks changed by other threads, some MB before they are written.

    So the disk has work while they are changed, and the changing goes on while the disk is busy
    with what is only copied.

    Args:
        source: the source's shard; open until the context has ended.
        changes: in the order in which their blocks will be wanted.
        workers: who does it.
    """

    def __init__(
        self, source: BinaryIO, changes: Collection[TensorChange], workers: Workers
    ) -> None:
        size = max([BLOCK_BYTES, *(each.block_bytes for each in changes)])
        room = huge_buffer(max(workers.ahead_bytes // size, 1) * size)
        self._slots = [room[start : start + size] for start in range(0, len(room), size)]
        self._free = cycle(self._slots)
        self._source = source
        self._blocks = ((each, block) for each in changes for block in each.blocks())
        self._threads = workers.threads
        self._pending: deque[Future[memoryview]] = deque()
        self._latest: Future[memoryview] | None = None
        self._fill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        started = [job for job in self._pending if not job.cancel()]
        wait(started)

    def next(self) -> memoryview:
        """The next block's new bytes. They are overwritten at the next call."""
        self._fill()
        return self._pending.popleft().result()

    def _fill(self) -> None:
        while len(self._pending) < len(self._slots) and (block := next(self._blocks, None)):
            slot, previous = next(self._free), self._latest
            self._latest = self._threads.submit(self._put, slot, previous, *block)
            self._pending.append(self._latest)

    def _put(
        self,
        slot: memoryview,
        previous: Future[memoryview] | None,
        change: TensorChange,
        block: TensorInfo,
    ) -> memoryview:
        data = change.change(self._source, block)
        slot[: len(data)] = data
        if previous is not None:
            previous.result()  # so that the digest takes one block after the other
        if change.patch.recorded:
            change.digest.update(data)
        return slot[: len(data)]
