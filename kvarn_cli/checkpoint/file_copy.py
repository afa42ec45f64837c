"""Copies of file contents, made by the kernel where it can."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kvarn_cli.errors import CheckpointError

_KERNEL_CHUNK_BYTES = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def append_rest(
    source: BinaryIO, target: BinaryIO, start: int, end: int, advance: Callable[[int], None]
) -> None:
    """Append the source's bytes from `start` to `end` to the target.

    Args:
        source: open for reading.
        target: open for writing, at its end.
        start: first byte of the source to copy.
        end: the source's size.
        advance: told the count of bytes after each step.

    Raises:
        CheckpointError: the source ends before `end`.
        OSError: reading or writing failed.
    """
    target.flush()
    while start < end and (copied := _copy_in_kernel(source, target, start, end)):
        start += copied
        advance(copied)
    source.seek(start)
    target.seek(0, os.SEEK_END)
    while start < end:
        chunk = source.read(min(_CHUNK_BYTES, end - start))
        if not chunk:
            raise CheckpointError(f"{source.name} was cut short while it was copied")
        target.write(chunk)
        start += len(chunk)
        advance(len(chunk))


def _copy_in_kernel(source: BinaryIO, target: BinaryIO, start: int, end: int) -> int:
    """Copied bytes; 0 where this pair of files cannot be copied so."""
    if not hasattr(os, "copy_file_range"):
        return 0
    count = min(_KERNEL_CHUNK_BYTES, end - start)
    try:
        return os.copy_file_range(source.fileno(), target.fileno(), count, offset_src=start)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return 0
        raise


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
