"""Blocks that are changed ahead of the writing: in order, and no more than there is room for."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from kvarn_cli.checkpoint.ranked_threads import ranked
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.tensor_blocks import BLOCK_BYTES
from kvarn_cli.checkpoint.tensor_changes import ChangedAhead, Patch, TensorChange, Workers

ROWS = 40
ROW_BYTES = BLOCK_BYTES // 2
SIZE = ROWS * ROW_BYTES


@pytest.fixture
def source(tmp_path: Path) -> BinaryIO:
    path = tmp_path / "weights"
    path.write_bytes(b"".join(bytes([row]) * ROW_BYTES for row in range(2 * ROWS)))
    return path.open("rb", buffering=0)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with ThreadPoolExecutor(request.param) as threads:
        yield ranked(threads, 2)[1]


def changes(patch: Patch) -> list[TensorChange]:
    infos = [TensorInfo("I8", (ROWS, ROW_BYTES), at, at + SIZE) for at in (0, SIZE)]
    return [TensorChange(name, info, patch) for name, info in zip("ab", infos, strict=True)]


def inverted(data: bytearray, info: TensorInfo) -> bytes:
    return bytes(data).translate(bytes(255 - value for value in range(256)))


@pytest.mark.parametrize("most_bytes", [0, 3 * BLOCK_BYTES, 100 * BLOCK_BYTES])
def test_blocks_come_in_order(source: BinaryIO, threads: Executor, most_bytes: int) -> None:
    both = changes(Patch(inverted))
    with source, ChangedAhead(source, both, Workers(threads, most_bytes)) as changed:
        result = b"".join(bytes(changed.next()) for _ in range(ROWS))
    expected = [bytes([255 - row]) * ROW_BYTES for row in range(2 * ROWS)]
    assert result == b"".join(expected)
    for change, part in zip(both, (expected[:ROWS], expected[ROWS:]), strict=True):
        assert change.digest.hexdigest() == hashlib.sha256(b"".join(part)).hexdigest()


def test_no_more_are_changed_than_there_is_room_for(source: BinaryIO, threads: Executor) -> None:
    seen: list[int] = []

    def look(data: bytearray, info: TensorInfo) -> bytearray:
        seen.append(info.start)
        return data

    with (
        source,
        ChangedAhead(source, changes(Patch(look)), Workers(threads, 4 * BLOCK_BYTES)) as changed,
    ):
        for taken in range(1, 11):
            changed.next()
            assert len(seen) <= taken + 3
    assert sorted(seen) == [block * BLOCK_BYTES for block in range(len(seen))]


def test_a_failure_comes_with_the_block_that_failed(source: BinaryIO, threads: Executor) -> None:
    def refuse_the_third(data: bytearray, info: TensorInfo) -> bytearray:
        if info.start == 2 * BLOCK_BYTES:
            raise ArithmeticError(f"at {info.start}")
        return data

    with (
        source,
        ChangedAhead(
            source, changes(Patch(refuse_the_third)), Workers(threads, 8 * BLOCK_BYTES)
        ) as changed,
    ):
        changed.next()
        changed.next()
        with pytest.raises(ArithmeticError, match=f"at {2 * BLOCK_BYTES}"):
            changed.next()


def test_new_bytes_of_another_size_are_refused(source: BinaryIO, threads: Executor) -> None:
    shorten = Patch(lambda data, info: data[1:])
    with (
        source,
        ChangedAhead(source, changes(shorten), Workers(threads, 0)) as changed,
        pytest.raises(ValueError, match="changes the size of tensor a"),
    ):
        changed.next()


def test_leaving_does_not_wait_for_those_who_go_first(source: BinaryIO) -> None:
    done = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        first, second = ranked(threads, 2)
        busy = first.submit(done.wait, 20)
        with source, ChangedAhead(source, changes(Patch(inverted)), Workers(second, SIZE)):
            pass
        still_busy = not busy.done()
        done.set()
    assert still_busy
