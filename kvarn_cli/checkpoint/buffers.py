"""Memory that the disk takes in few, large requests."""

import contextlib
import ctypes
import mmap

_HUGE_PAGE_BYTES = 2 << 20


def huge_buffer(size: int) -> memoryview:
    """Zeroed bytes of this process, in huge pages where the system gives them.

    What lies in pages of 4 KiB reaches the disk in requests of as many pages as a request can
    name, which is a fraction of a MB.

    Args:
        size: bytes; whole pages take a multiple of 2 MiB.
    """
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=anonymous)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + size]
