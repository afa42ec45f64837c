"""Reading, writing and sharing the bytes of files, whole or with an error."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from kvarn_cli.errors import CheckpointError

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


def write_at(target: BinaryIO, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all bytes at a place of the target.

    Raises:
        OSError: writing failed.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(target.fileno(), rest, position)
        rest, position = rest[written:], position + written


def read_at(source: BinaryIO, start: int, end: int) -> bytearray:
    """The source's bytes from `start` to `end`.

    Raises:
        CheckpointError: the source ends before `end`.
        OSError: reading failed.
    """
    data = bytearray(end - start)
    view, filled = memoryview(data), 0
    while filled < len(data):
        filled += read_into(source, view[filled:], start + filled)
    return data


def read_into(source: BinaryIO, buffer: memoryview, position: int) -> int:
    """Read at a place of the source as much as the system gives at once, and tell how much.

    Raises:
        CheckpointError: the source ends there.
        OSError: reading failed.
    """
    count = os.preadv(source.fileno(), [buffer], position)
    if not count:
        raise CheckpointError(f"{source.name} was cut short while it was read")
    return count


def will_read(source: BinaryIO, start: int, count: int) -> None:
    """Ask the system to fetch what will be read soon, unless it lies in memory already."""
    if not hasattr(os, "RWF_NOWAIT"):  # Linux, which has posix_fadvise too
        return
    with contextlib.suppress(OSError):
        try:
            os.preadv(source.fileno(), [bytearray(1)], start, os.RWF_NOWAIT)
        except OSError:
            os.posix_fadvise(source.fileno(), start, count, os.POSIX_FADV_WILLNEED)


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
