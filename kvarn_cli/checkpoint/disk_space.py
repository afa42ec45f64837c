"""How much room a disk has, and what to say when it is not enough."""

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

import xxhash

from kvarn_cli.checkpoint.file_copy import clone
from kvarn_cli.checkpoint.new_file import NewFile
from kvarn_cli.errors import DiskFullError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What the system answers when a disk, a quota or a limit on file sizes takes no more."""

_SPEED_BYTES = 64 << 20


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to start what cannot be finished.

    Args:
        folder: exists, on the disk to write to.
        needed_bytes: what will be written.

    Raises:
        DiskFullError: fewer bytes are free; the message says how many are missing.
    """
    enough = shutil.disk_usage(folder).free >= needed_bytes
    if not enough and _settled_free_bytes(folder) < needed_bytes:
        raise disk_full(folder, needed_bytes, "not enough space")


def disk_full(folder: Path, needed_bytes: int, reason: str) -> DiskFullError:
    """The error for a disk that took no more with `needed_bytes` still to be written."""
    free = _settled_free_bytes(folder)
    missing = max(needed_bytes - free, 0)
    return DiskFullError(
        f"cannot write to {folder}: {reason}; {_gigabytes(needed_bytes)} are still to be written, "
        f"{_gigabytes(free)} are free, {_gigabytes(missing)} are missing",
        hint="make room and run the same command again, it continues; "
        "or name an --output on another disk",
        details={"needed_bytes": needed_bytes, "free_bytes": free, "missing_bytes": missing},
    )


def can_clone(source: Path, folder: Path) -> bool:
    """Whether copies of `source` in `folder` can share its blocks and so take no space."""
    with source.open("rb") as original, tempfile.TemporaryFile(dir=folder) as probe:
        return clone(original, probe)


def measure_write_speed(folder: Path) -> float | None:
    """Bytes that the folder's disk takes in a second, written as shards are and fsync included.

    None where it takes none.
    """
    chunk = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            start = time.perf_counter()
            with NewFile(probe, xxhash.xxh3_128()) as file:
                for _ in range(_SPEED_BYTES // len(chunk)):
                    file.write(chunk)
            os.fsync(probe.fileno())
            return _SPEED_BYTES / (time.perf_counter() - start)
    except OSError:
        return None


def _settled_free_bytes(folder: Path) -> int:
    """Free bytes, with those of files deleted just now, which btrfs counts after a sync only."""
    os.sync()
    return shutil.disk_usage(folder).free


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes:,} bytes ({size_bytes / 1e9:.1f} GB)"
