import hashlib
from pathlib import Path

import xxhash

from kvarn_cli.checkpoint.hashing import hash_file, matches
from kvarn_cli.metadata import FileRecord

CONTENT = bytes(range(256)) * 20_000


def test_reads_once_for_several_hashes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    steps: list[int] = []
    assert hash_file(path, {"sha256", "xxh3_128"}, steps.append) == {
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "xxh3_128": xxhash.xxh3_128(CONTENT).hexdigest(),
    }
    assert sum(steps) == len(CONTENT)


def test_a_record_matches_its_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    record = FileRecord(size_bytes=len(CONTENT), xxh3_128=xxhash.xxh3_128(CONTENT).hexdigest())
    assert matches(path, record)
    (tmp_path / "link").symlink_to(path)
    assert not matches(tmp_path / "link", record)
    assert not matches(tmp_path / "missing", record)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert not matches(path, record)
    path.write_bytes(CONTENT + b"!")
    assert not matches(path, record)
