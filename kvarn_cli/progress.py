"""How long work tells that it goes on, without knowing who listens."""

from collections.abc import Callable

Report = Callable[[str, int, int], None]
"""Called with the stage's name, the units done, and the units in all."""


def silent(stage: str, done: int, total: int) -> None:
    """A report that nobody reads."""
