"""A disk that can be filled: a tmpfs where one can be mounted."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """Mount a file system of that size at a new folder.

    Yields:
        Whether that was possible; it takes root and Linux. If not, the folder is on an ordinary
        disk.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "kvarn-test", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def fill(file: Path) -> None:
    """Write until the disk takes no more."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        while ballast.write(b"\0" * 4096):
            pass
