import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarn_cli.checkpoint import new_file
from kvarn_cli.checkpoint.new_file import NewFile
from kvarn_cli.errors import CheckpointError

CONTENT = os.urandom(20_000_001)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def fill(source: Path, *, head: bytes = b"", start: int = 0, end: int = len(CONTENT)) -> bytes:
    """Write `head` and a part of the source, and check hash, size and progress."""
    digest, steps = hashlib.sha256(), list[int]()
    target = source.with_name("target")
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        with NewFile(writer, digest) as file:
            file.write(head)
            file.copy(reader, start, end, steps.append)
        assert file.size_bytes == len(head) + end - start
    assert sum(steps) == end - start
    content = target.read_bytes()
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()
    return content


def count_direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each write, whether it went past the page cache."""
    pwrite, seen = os.pwrite, list[bool]()

    def watch(handle: int, data: memoryview, position: int) -> int:
        seen.append(bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT))
        return pwrite(handle, data, position)

    monkeypatch.setattr(os, "pwrite", watch)
    return seen


def fails_with(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("head", "start", "end"),
    [(b"", 0, len(CONTENT)), (b"h" * 4097, 3, 20_000_000), (b"h", 0, 5), (b"", 7, 7)],
)
def test_fills_a_file_from_pieces(head: bytes, start: int, end: int, source: Path) -> None:
    assert fill(source, head=head, start=start, end=end) == head + CONTENT[start:end]


def test_one_piece_may_be_larger_than_the_buffers(source: Path) -> None:
    assert fill(source, head=CONTENT, end=3) == CONTENT + CONTENT[:3]


def test_only_the_last_piece_goes_through_the_page_cache(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directly = count_direct(monkeypatch)
    assert fill(source) == CONTENT
    assert directly[-1] is False
    if any(directly):
        assert directly == [True] * (len(CONTENT) // new_file._BUFFER_BYTES) + [False]


@pytest.mark.parametrize("refused", [os.O_DIRECT, 0])
def test_a_file_system_without_direct_writing(
    refused: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so when the flag is set, or only when something is written."""
    set_flag, pwrite = fcntl.fcntl, os.pwrite

    def refuse_flag(handle: Any, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flag(handle, command, flags)

    def refuse_write(handle: int, data: memoryview, position: int) -> int:
        if set_flag(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(handle, data, position)

    monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    monkeypatch.setattr(os, "pwrite", refuse_write)
    assert fill(source) == CONTENT


def test_a_system_without_direct_writing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    assert fill(source) == CONTENT


def test_of_shared_blocks_only_the_changed_ones_are_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces lie across the ends of both buffers."""
    monkeypatch.setattr(new_file, "_BUFFER_BYTES", 64)
    digest, target = hashlib.sha256(), source.with_name("shared")
    target.write_bytes(CONTENT[:300])
    pwrite, written = os.pwrite, list[tuple[int, int]]()

    def watch(handle: int, data: memoryview, position: int) -> int:
        written.append((position, len(data)))
        return pwrite(handle, data, position)

    monkeypatch.setattr(os, "pwrite", watch)
    with (
        source.open("rb", buffering=0) as reader,
        target.open("rb+", buffering=0) as writer,
        NewFile(writer, digest, shared=True) as file,
    ):
        file.copy(reader, 0, 50, lambda count: None)
        file.write(b"a" * 10)
        file.write(b"b" * 90)
        file.copy(reader, 150, 300, lambda count: None)
    expected = CONTENT[:50] + b"a" * 10 + b"b" * 90 + CONTENT[150:300]
    assert target.read_bytes() == expected
    assert digest.hexdigest() == hashlib.sha256(expected).hexdigest()
    assert written == [(50, 14), (64, 64), (128, 22)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_the_writing_thread_meets_is_raised(
    number: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", fails_with(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        fill(source)
    with pytest.raises(OSError, match=os.strerror(number)):
        fill(source, end=5)


def test_a_source_cut_short_is_noticed(source: Path) -> None:
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        fill(source, end=len(CONTENT) + 1)
