import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from kvarn_cli.checkpoint.file_copy import clone, read_at, sync_folder, will_read, write_at
from kvarn_cli.errors import CheckpointError

CONTENT = os.urandom(10_001)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def fail_with(number: int) -> Any:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_blocks_are_shared_where_the_file_system_can(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def share(target: int, request: int, reader: int) -> int:
        asked.append(request)
        os.pwrite(target, CONTENT, 0)
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


def test_a_write_goes_on_where_the_system_stopped(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:999], at))
    with source.open("rb+", buffering=0) as file:
        write_at(file, CONTENT[::-1], 1)
    assert source.read_bytes() == CONTENT[:1] + CONTENT[::-1]


def test_a_source_cut_short_is_noticed(source: Path) -> None:
    with (
        source.open("rb", buffering=0) as reader,
        pytest.raises(CheckpointError, match="cut short while it was read"),
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


def test_only_what_is_not_in_memory_is_asked_for(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, count, advice: asked.append((start, count))
    )
    with source.open("rb", buffering=0) as file:
        file.read()
        will_read(file, 4096, 100)
        assert asked == []
        monkeypatch.setattr(os, "preadv", fail_with(errno.EAGAIN))
        will_read(file, 4096, 100)
        assert asked == [(4096, 100)]
        monkeypatch.delattr(os, "RWF_NOWAIT")
        will_read(file, 4096, 100)
        assert asked == [(4096, 100)]


def test_a_system_that_takes_no_advice_is_no_error(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", fail_with(errno.EOPNOTSUPP))
    monkeypatch.setattr(os, "posix_fadvise", fail_with(errno.EINVAL))
    with source.open("rb", buffering=0) as file:
        will_read(file, 0, 100)
