"""Who goes first in threads that are shared."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from kvarn_cli.checkpoint.ranked_threads import ranked


def test_a_lower_rank_goes_first_and_then_what_came_first() -> None:
    order: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        busy = threading.Event()
        threads.submit(busy.wait, 10)
        first, second, third = ranked(threads, 3)
        jobs = [
            rank.submit(order.append, name)
            for name, rank in [("c", third), ("b1", second), ("a1", first), ("b2", second)]
        ]
        jobs.append(first.submit(order.append, "a2"))
        busy.set()
        wait(jobs)
    assert order == ["a1", "a2", "b1", "b2", "c"]


def test_a_job_gives_its_result_or_its_error() -> None:
    def fail() -> None:
        raise ArithmeticError("here")

    with ThreadPoolExecutor(2) as threads:
        rank = ranked(threads, 1)[0]
        assert rank.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ArithmeticError, match="here"):
            rank.submit(fail).result()
        assert rank.submit(sorted, [1, 2], reverse=True).result() == [2, 1]


def test_a_cancelled_job_is_not_run() -> None:
    with ThreadPoolExecutor(1) as threads:
        busy = threading.Event()
        threads.submit(busy.wait, 10)
        ran: list[int] = []
        rank = ranked(threads, 1)[0]
        cancelled, kept = rank.submit(ran.append, 1), rank.submit(ran.append, 2)
        stopped = cancelled.cancel()
        busy.set()
        assert stopped
        kept.result()
        wait([cancelled])
    assert ran == [2]


def test_nothing_holds_a_job_that_failed() -> None:
    class Argument:
        pass

    def fail(argument: Argument) -> None:
        raise ArithmeticError

    argument = Argument()
    alive = weakref.ref(argument)
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as threads:
            future = ranked(threads, 1)[0].submit(fail, argument)
            wait([future])
        del argument, future
        assert alive() is None
    finally:
        gc.enable()
