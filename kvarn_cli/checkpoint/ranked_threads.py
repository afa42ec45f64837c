"""Threads shared by several users, some of whom go first."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any

_Waiting = PriorityQueue[tuple[int, int, Future[Any], Callable[[], Any]]]


def ranked(threads: Executor, ranks: int) -> list[Executor]:
    """An executor for each rank, all of them at work in the same threads.

    A free thread takes the job of the lowest rank, and of one rank that which came first.

    Args:
        threads: do the work. They are the caller's to shut down.
        ranks: how many there are.
    """
    waiting: _Waiting = PriorityQueue()
    arrival = count()
    return [_Rank(threads, waiting, arrival, rank) for rank in range(ranks)]


class _Rank(Executor):
    def __init__(
        self, threads: Executor, waiting: _Waiting, arrival: "count[int]", rank: int
    ) -> None:
        self._threads = threads
        self._waiting = waiting
        self._arrival = arrival
        self._rank = rank

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        job = partial(fn, *args, **kwargs)
        self._threads.submit(self._run_first)
        self._waiting.put((self._rank, next(self._arrival), future, job))
        return future

    def _run_first(self) -> None:
        _, _, future, job = self._waiting.get()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future, job  # an error's traceback leads here, and must not lead back to it
