"""A file filled from its first byte to its last: hashed, and written behind the caller's back."""

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO, Self

from kvarn_cli.checkpoint.buffers import huge_buffer
from kvarn_cli.checkpoint.file_copy import read_into, will_read, write_at
from kvarn_cli.checkpoint.hashing import Hash

_BUFFER_BYTES = 2 << 20
_READ_AHEAD_BYTES = 8 << 20
_ALIGNMENT = 4096


class NewFile:
    """Fills an empty file. It is complete when the context ends without an error.

    While the caller fills one buffer, a thread writes the other. Where the file system
    allows it the bytes go past the page cache (`O_DIRECT`): that saves the system half of its
    work, leaves the fsync nothing to wait for, and does not push out of memory what the user's
    other programs need.

    Args:
        target: open for writing, without a buffer.
        digest: given every byte, in order.
        shared: the file shares all blocks of its source, so only what is not copied is written.
    """

    def __init__(self, target: BinaryIO, digest: Hash, *, shared: bool = False) -> None:
        self._target = target
        self._digest = digest
        self._shared = shared
        self._flags = fcntl.fcntl(target, fcntl.F_GETFL)
        self._direct = not shared and _go_direct(target, self._flags)
        self._buffer, self._other = (huge_buffer(_BUFFER_BYTES) for _ in range(2))
        self._filled = 0
        self._changed: list[slice] = []
        self._position = 0
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._thread:
            if error is None:
                self._flush()
                self._wait()

    @property
    def size_bytes(self) -> int:
        """What was put into it so far."""
        return self._position + self._filled

    def copy(self, source: BinaryIO, start: int, end: int, advance: Callable[[int], None]) -> None:
        """Append the source's bytes from `start` to `end`.

        Args:
            source: open for reading.
            start: first byte to copy; of a file that shares blocks, the place of the next byte.
            end: offset behind the last one.
            advance: told the count of bytes after each step.

        Raises:
            CheckpointError: the source ends before `end`.
            OSError: reading or writing failed.
        """
        while start < end:
            will_read(source, start + _READ_AHEAD_BYTES, _BUFFER_BYTES)
            count = read_into(source, self._buffer[self._filled :][: end - start], start)
            start += count
            self._add(count, write=not self._shared)
            advance(count)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: writing failed.
        """
        rest = memoryview(data)
        while rest:
            count = min(len(rest), _BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = rest[:count]
            self._add(count, write=True)
            rest = rest[count:]

    def _add(self, count: int, *, write: bool) -> None:
        if write:
            start = self._filled
            if self._changed and self._changed[-1].stop == start:
                start = self._changed.pop().start
            self._changed.append(slice(start, self._filled + count))
        self._filled += count
        if self._filled == _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        full = self._buffer[: self._filled]
        self._digest.update(full)
        self._wait()
        self._pending = self._thread.submit(self._put, full, self._changed, self._position)
        self._position += self._filled
        self._filled, self._changed = 0, []
        self._buffer, self._other = self._other, self._buffer

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _put(self, data: memoryview, changed: list[slice], position: int) -> None:
        for part in changed:
            self._write(data[part], position + part.start)

    def _write(self, data: memoryview, position: int) -> None:
        if len(data) % _ALIGNMENT:
            self._leave_direct()
        try:
            write_at(self._target, data, position)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            self._leave_direct()
            write_at(self._target, data, position)

    def _leave_direct(self) -> None:
        if self._direct:
            fcntl.fcntl(self._target, fcntl.F_SETFL, self._flags)
            self._direct = False


def _go_direct(target: BinaryIO, flags: int) -> bool:
    """Whether writes pass by the page cache from now on."""
    try:
        fcntl.fcntl(target, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return hasattr(os, "O_DIRECT")
