"""Copies of file contents, made by the kernel where it can, and hashed on the way."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kvarn_cli.errors import CheckpointError

Consume = Callable[[memoryview], None]

_STEP_BYTES = 32 << 20
_CHUNK_BYTES = 1 << 20
_FICLONE = 0x4004_9409
_UNSUPPORTED = {
    *(errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY)
}


def clone(source: BinaryIO, target: BinaryIO) -> bool:
    """Let an empty target share all of the source's blocks, where their file system can do that.

    Raises:
        OSError: the file system can do it, but failed.
    """
    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def copy_range(
    source: BinaryIO,
    target: BinaryIO,
    start: int,
    end: int,
    *,
    position: int,
    consume: Consume,
    cloned: bool = False,
) -> None:
    """Copy the source's bytes from `start` to `end`, and show them to `consume` piece by piece.

    The kernel copies from page cache to page cache; the bytes are read besides, for the hash.

    Args:
        source: open for reading.
        target: open for writing, without a buffer.
        start: first byte of the source to copy.
        end: offset behind the last one.
        position: where in the target the bytes go.
        consume: given each piece; the memory is used again after it returns.
        cloned: the target holds these bytes already, at the same place.

    Raises:
        CheckpointError: the source ends before `end`.
        OSError: reading or writing failed.
    """
    by_kernel = not cloned and hasattr(os, "copy_file_range")
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, end - start)))
    shift = position - start
    while start < end:
        step_end = min(start + _STEP_BYTES, end)
        if by_kernel:
            copied = _copy_in_kernel(source, target, start, step_end - start, start + shift)
            by_kernel = copied > 0
            step_end = start + copied if copied else step_end
        while start < step_end:
            piece = buffer[: _read_some(source, buffer[: step_end - start], start)]
            if not (by_kernel or cloned):
                write_at(target, piece, start + shift)
            consume(piece)
            start += len(piece)
        start_writing_back(target, step_end + shift)


def write_at(target: BinaryIO, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all bytes at a place of the target.

    Raises:
        OSError: writing failed.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(target.fileno(), rest, position)
        rest, position = rest[written:], position + written


def start_writing_back(target: BinaryIO, end: int) -> None:
    """Let the disk begin with the last bytes before `end`, so that a later fsync finds it done."""
    if hasattr(os, "posix_fadvise"):
        start = max(end - 2 * _STEP_BYTES, 0)
        os.posix_fadvise(target.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def read_at(source: BinaryIO, start: int, end: int) -> bytearray:
    """The source's bytes from `start` to `end`.

    Raises:
        CheckpointError: the source ends before `end`.
        OSError: reading failed.
    """
    data = bytearray(end - start)
    view, filled = memoryview(data), 0
    while filled < len(data):
        filled += _read_some(source, view[filled:], start + filled)
    return data


def sync_folder(folder: Path) -> None:
    """Put a folder's names on the disk, where its file system can do that to a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def _copy_in_kernel(
    source: BinaryIO, target: BinaryIO, start: int, count: int, position: int
) -> int:
    """Copied bytes; 0 where this pair of files cannot be copied so."""
    try:
        return os.copy_file_range(source.fileno(), target.fileno(), count, start, position)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return 0
        raise


def _read_some(source: BinaryIO, buffer: memoryview, position: int) -> int:
    count = os.preadv(source.fileno(), [buffer], position)
    if not count:
        raise CheckpointError(f"{source.name} was cut short while it was read")
    return count
