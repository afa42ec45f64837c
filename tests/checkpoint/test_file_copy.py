import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvarn_cli.checkpoint.file_copy import append_rest, sync_folder
from kvarn_cli.errors import CheckpointError

CONTENT = os.urandom(9_000_001)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def copy_behind(prefix: bytes, source: Path, start: int, end: int) -> tuple[bytes, int]:
    """What the target holds, and how many bytes were reported."""
    steps: list[int] = []
    target = source.with_name("target")
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(prefix)
        append_rest(reader, writer, start, end, steps.append)
        writer.seek(1)
        writer.write(b"!")
    return target.read_bytes(), sum(steps)


def fail_with(number: int) -> Any:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("prefix", [b"", b"header"])
def test_appends_the_rest_and_stays_writable(prefix: bytes, source: Path) -> None:
    expected = bytearray(prefix + CONTENT[5:])
    expected[1:2] = b"!"
    assert copy_behind(prefix, source, 5, len(CONTENT)) == (bytes(expected), len(CONTENT) - 5)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_copies_by_hand_where_the_kernel_cannot(
    number: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", fail_with(number))
    expected = b"h!" + CONTENT[7:]
    assert copy_behind(b"h", source, 6, len(CONTENT)) == (expected, len(CONTENT) - 6)


def test_goes_on_by_hand_where_the_kernel_stops(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_copy = os.copy_file_range
    answers = iter([1000, 0])

    def stop_early(reader: int, writer: int, count: int, **offsets: int) -> int:
        return kernel_copy(reader, writer, next(answers), **offsets)

    monkeypatch.setattr(os, "copy_file_range", stop_early)
    expected = b"h!" + CONTENT[1:]
    assert copy_behind(b"h", source, 0, len(CONTENT)) == (expected, len(CONTENT))


def test_copies_by_hand_where_there_is_no_such_call(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    assert copy_behind(b"hi", source, 0, len(CONTENT)) == (b"h!" + CONTENT, len(CONTENT))


def test_a_full_disk_is_an_error_not_a_reason_to_copy_by_hand(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        copy_behind(b"", source, 0, len(CONTENT))


def test_a_source_cut_short_is_noticed(source: Path) -> None:
    with pytest.raises(CheckpointError, match="cut short while it was copied"):
        copy_behind(b"", source, 0, len(CONTENT) + 1)


def test_a_folder_is_synced_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EINVAL))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
