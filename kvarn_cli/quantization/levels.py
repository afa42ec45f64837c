"""Non-uniform quantization levels, and rounding to them."""

import torch
from torch import Tensor

_MOST_PASSES = 300


def optimal_levels(samples: Tensor, count: int) -> Tensor:
    """Levels of least mean squared error for scalar samples (Lloyd-Max; k-means in one dimension).

    Args:
        samples: [n], any order; at least `count`.
        count: of levels.

    Returns:
        [count], ascending, float64.

    Source: Lloyd (1957), Max (1960).
    """
    ordered = samples.double().sort().values
    sums = torch.cat((ordered.new_zeros(1), ordered.cumsum(0)))
    positions = (torch.arange(count, dtype=torch.float64) + 0.5) / count * len(ordered)
    levels = ordered[positions.long()]
    for _ in range(_MOST_PASSES):
        inner = torch.searchsorted(ordered, _midpoints(levels))
        cuts = torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), len(ordered))))
        counts = cuts.diff()
        means = (sums[cuts[1:]] - sums[cuts[:-1]]) / counts.clamp(min=1)
        # differences of running sums are off by a rounding, and equal means may swap
        updated = torch.where(counts > 0, means, levels).cummax(0).values
        if torch.equal(updated, levels):
            break
        levels = updated
    return levels


def to_nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Replace each value by the nearest of ascending levels; dtype and shape of x."""
    levels = levels.to(device=x.device, dtype=x.dtype)
    return levels[torch.bucketize(x.contiguous(), _midpoints(levels))]


def _midpoints(levels: Tensor) -> Tensor:
    middle: Tensor = (levels[1:] + levels[:-1]) / 2
    return middle
