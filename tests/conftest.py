"""Fixtures for every room, and the order of tests."""

import signal

import pytest
from fake_hub import hub
from hypothesis import settings

# A job in a shell's background ignores SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

__all__ = ["hub"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that no process waits for them at the end."""
    slow = ("real_model/", "test_hostile_input.py", "cli/")
    items.sort(key=lambda item: not any(part in item.nodeid for part in slow))
