"""Fixtures for every room."""

from fake_hub import hub

__all__ = ["hub"]
