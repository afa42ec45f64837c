"""Hashes of whole files: XXH3 for weights, as fast as memory, and SHA-256 for the rest."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import xxhash

from kvarn_cli.metadata import FileRecord, HashName

_CHUNK_BYTES = 1 << 20


class Hash(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take further bytes."""

    def hexdigest(self) -> str:
        """The hash of all bytes so far, in hexadecimal."""


def new_hash(name: HashName) -> Hash:
    """An empty hash."""
    return hashlib.sha256() if name == "sha256" else xxhash.xxh3_128()


def hash_file(
    path: Path,
    names: Iterable[HashName],
    advance: Callable[[int], None] = lambda count: None,
) -> dict[HashName, str]:
    """Read a file once and hash it.

    Args:
        path: of the file.
        names: which hashes.
        advance: told the count of bytes after each step.

    Raises:
        OSError: the file cannot be read.
    """
    hashes = {name: new_hash(name) for name in names}
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            for one in hashes.values():
                one.update(chunk[:count])
            advance(count)
    return {name: one.hexdigest() for name, one in hashes.items()}


def matches(path: Path, record: FileRecord) -> bool:
    """Whether a regular file, no link, has the recorded size and hash."""
    return (
        path.is_file()
        and not path.is_symlink()
        and path.stat().st_size == record.size_bytes
        and hash_file(path, [record.algorithm])[record.algorithm] == record.digest
    )
