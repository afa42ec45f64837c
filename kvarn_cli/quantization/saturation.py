"""Notice numbers that are larger than their format in a record holds.

Such a scale is clamped, and all that it scales decodes too small; so is the RoPE key beside a
latent, which is stored as it is. It takes values near 65,504 in fp16 and near 10⁵ in FP8, so it is
rare; but a model that has one should say so.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SaturatedScales:
    """Stored numbers at the limit of their format, of the tiles encoded so far."""

    _counts: list[Tensor] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(int(count) for count in self._counts)

    def add(self, stored: Tensor) -> None:
        """Count those of more stored numbers, in the dtype that they are stored in."""
        largest = torch.finfo(stored.dtype).max
        self._counts.append((stored.float().abs() >= largest).sum())


_watching: ContextVar[SaturatedScales | None] = ContextVar("watching", default=None)


@contextmanager
def watch_saturation() -> Iterator[SaturatedScales]:
    """Count the saturated numbers of every tile that is encoded inside the `with` block."""
    found = SaturatedScales()
    token = _watching.set(found)
    try:
        yield found
    finally:
        _watching.reset(token)


def saturation_sentence(by_layer: Mapping[int, int]) -> str:
    """Say how many numbers of which layers were clamped.

    Args:
        by_layer: counts above 0 by layer, at least one.
    """
    layers = ", ".join(f"{count:,} of layer {layer}" for layer, count in by_layer.items())
    return f"numbers larger than the record holds were clamped: {layers}"


def note_saturation(*stored: Tensor) -> None:
    """Tell whoever watches about scales, zero points or RoPE keys just made for records."""
    watcher = _watching.get()
    if watcher is not None:
        for each in stored:
            watcher.add(each)
