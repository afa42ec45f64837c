import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvarn_cli.quantization.levels import optimal_levels, to_nearest


def test_two_bits_of_the_normal_distribution_are_those_of_the_literature():
    """Max (1960), table I."""
    probabilities = (torch.arange(1 << 15, dtype=torch.float64) + 0.5) / (1 << 15)
    levels = optimal_levels(torch.special.ndtri(probabilities), 4)
    assert levels.tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=2e-3)


def test_few_distinct_values_are_met_exactly():
    samples = torch.tensor([5.0, -1.0, 5.0, 2.0, -1.0])
    assert optimal_levels(samples, 3).tolist() == [-1.0, 2.0, 5.0]


@example([0.0] * 5 + [10.706] * 3)
@given(st.lists(st.floats(-100, 100), min_size=8, max_size=60))
def test_levels_are_ascending_means_of_what_is_nearest(samples):
    values = torch.tensor(samples, dtype=torch.float64)
    levels = optimal_levels(values, 4)
    assert (levels.diff() >= 0).all()
    distance = (values[:, None] - levels).abs()
    nearest = to_nearest(values, levels)
    assert torch.allclose((values - nearest).abs(), distance.min(1).values)
