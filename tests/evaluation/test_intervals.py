import pytest

from kvarn_cli.evaluation.intervals import mean_interval


def test_the_interval_of_a_known_sample():
    """Mean 5, standard deviation 2.138, t(7) = 2.365."""
    low, high = mean_interval([2, 4, 4, 4, 5, 5, 7, 9])
    assert (low, high) == (pytest.approx(3.2124, abs=2e-3), pytest.approx(6.7876, abs=2e-3))


def test_many_values_approach_the_normal_distribution():
    low, high = mean_interval([0.0, 2.0] * 5000)
    assert high - low == pytest.approx(2 * 1.96 / 100, rel=1e-3)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_one_window_says_nothing_about_spread(values):
    assert mean_interval(values) is None
