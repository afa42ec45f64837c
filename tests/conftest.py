"""Fixtures for every room."""

from fake_hub import hub
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

__all__ = ["hub"]
