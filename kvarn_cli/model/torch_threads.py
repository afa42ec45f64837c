"""How many threads torch works with where the work comes in small blocks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Let torch use one thread for an operation; threads that are started inside do so too.

    For work on blocks of some 100 KB, with several blocks in work at once. The threads of one
    operation wait for each other by spinning. On a machine of two cores, one of them taken by
    another program, that made the check of a 4 GB checkpoint take 300 s instead of 2.5.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
