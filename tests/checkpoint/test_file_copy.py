import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from kvarn_cli.checkpoint.file_copy import clone, copy_range, read_at, sync_folder, write_at
from kvarn_cli.errors import CheckpointError

CONTENT = os.urandom(40_000_001)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def copy_to(position: int, source: Path, start: int, end: int) -> tuple[bytes, bytes]:
    """What the target holds behind `position`, and what was shown on the way."""
    shown = bytearray()
    target = source.with_name("target")
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        write_at(writer, b"h" * position, 0)
        copy_range(reader, writer, start, end, position=position, consume=shown.extend)
    return target.read_bytes()[position:], bytes(shown)


def fail_with(number: int) -> Any:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("position", "start"), [(0, 0), (6, 5), (1, 39_999_999)])
def test_copies_a_range_and_shows_it(position: int, start: int, source: Path) -> None:
    expected = CONTENT[start:-1]
    assert copy_to(position, source, start, len(CONTENT) - 1) == (expected, expected)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_copies_by_hand_where_the_kernel_cannot(
    number: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", fail_with(number))
    assert copy_to(3, source, 7, len(CONTENT)) == (CONTENT[7:], CONTENT[7:])


def test_goes_on_by_hand_where_the_kernel_stops(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_copy = os.copy_file_range
    answers = iter([1000, 0])

    def stop_early(reader: int, writer: int, count: int, *offsets: int) -> int:
        return kernel_copy(reader, writer, next(answers), *offsets)

    monkeypatch.setattr(os, "copy_file_range", stop_early)
    assert copy_to(0, source, 0, len(CONTENT)) == (CONTENT, CONTENT)


def test_copies_by_hand_where_there_is_no_such_call(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    monkeypatch.delattr(os, "posix_fadvise")
    assert copy_to(2, source, 0, len(CONTENT)) == (CONTENT, CONTENT)


def test_a_cloned_file_is_only_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", fail_with(errno.EIO))
    monkeypatch.setattr(os, "copy_file_range", fail_with(errno.EIO))
    shown = bytearray()
    with source.open("rb", buffering=0) as reader, source.with_name("clone").open("wb") as writer:
        copy_range(reader, writer, 1, 9, position=1, consume=shown.extend, cloned=True)
    assert shown == CONTENT[1:9]


def test_blocks_are_shared_where_the_file_system_can(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def share(target: int, request: int, reader: int) -> int:
        asked.append(request)
        os.copy_file_range(reader, target, len(CONTENT), 0, 0)
        return 0

    with source.open("rb") as reader, source.with_name("clone").open("wb+") as writer:
        monkeypatch.setattr(fcntl, "ioctl", share)
        assert clone(reader, writer)
        assert asked == [0x40049409]
        assert writer.read() == CONTENT
        for number in (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY):
            monkeypatch.setattr(fcntl, "ioctl", fail_with(number))
            assert not clone(reader, writer)
        monkeypatch.setattr(fcntl, "ioctl", fail_with(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            clone(reader, writer)


def test_a_full_disk_is_an_error_not_a_reason_to_copy_by_hand(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        copy_to(0, source, 0, len(CONTENT))


def test_a_source_cut_short_is_noticed(source: Path) -> None:
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        copy_to(0, source, 0, len(CONTENT) + 1)
    with (
        source.open("rb", buffering=0) as reader,
        pytest.raises(CheckpointError, match="cut short"),
    ):
        read_at(reader, 5, len(CONTENT) + 1)


def test_a_folder_is_synced_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EINVAL))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
