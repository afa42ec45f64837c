"""Confidence intervals of a mean over few windows."""

from collections.abc import Sequence
from statistics import mean, median, stdev

__all__ = ["mean_interval", "median"]

# Student's t, 97.5th percentile, for 1, 2, … degrees of freedom.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % confidence interval of the mean of independent values, by Student's t.

    Returns:
        Lower and upper end; None for fewer than 2 values, which say nothing about their spread.
    """
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    t = _T_975[degrees - 1] if degrees <= len(_T_975) else 1.96 + 2.4 / degrees
    half = t * stdev(values) / len(values) ** 0.5
    return mean(values) - half, mean(values) + half
