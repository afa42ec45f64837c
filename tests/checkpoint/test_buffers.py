"""Buffers: where they lie, and that they are plain memory where huge pages are not to be had."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from kvarn_cli.checkpoint.buffers import huge_buffer

HUGE_PAGE_BYTES = 2 << 20


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def flags_at(place: int) -> list[str]:
    """What the system notes of the mapping around an address."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())[1:]:
        first, last = (int(bound, 16) for bound in mapping.split()[0].split("-"))
        if first <= place < last:
            return re.findall(r"VmFlags: (.*)", mapping)[0].split()
    raise AssertionError("no mapping there")


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_a_buffer_is_zeroed_writable_and_starts_a_huge_page(size: int) -> None:
    buffer = huge_buffer(size)
    assert len(buffer) == size
    assert not any(buffer)
    buffer[-1] = 7
    assert buffer[-1] == 7
    assert address(buffer) % HUGE_PAGE_BYTES == 0


def test_the_system_is_asked_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages to ask for")
    buffer = huge_buffer(HUGE_PAGE_BYTES)
    assert "hg" in flags_at(address(buffer))


@pytest.mark.parametrize("advice", [None, 9999])
def test_without_huge_pages_a_buffer_is_plain_memory(
    monkeypatch: pytest.MonkeyPatch, advice: int | None
) -> None:
    """Neither a system that does not know the advice nor one that refuses it is an error."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    if advice is not None:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice, raising=False)
    buffer = huge_buffer(4096)
    buffer[:] = b"x" * 4096
    assert bytes(buffer) == b"x" * 4096
