import pytest
import torch

from kvarn_cli.evaluation.vector_errors import VectorErrors
from kvarn_cli.evaluation.vector_sums import QUANTILES, VectorSums


def _errors(magnitude: torch.Tensor, direction: torch.Tensor) -> VectorErrors:
    return VectorErrors(magnitude, direction, torch.full_like(magnitude, 4.0))


@pytest.fixture
def two_heads() -> VectorErrors:
    """40 tokens a head; tokens 7 and 8 of the second head are far off."""
    magnitude, direction = torch.full((1, 2, 40), 0.04), torch.full((1, 2, 40), 0.12)
    magnitude[0, 1, 7:9], direction[0, 1, 7:9] = 9.0, 3.0
    return _errors(magnitude, direction)


def test_the_worst_tokens_are_found_per_head(two_heads: VectorErrors) -> None:
    """5 % of 40 tokens are 2: of one head the outliers, of the other any two."""
    sums = VectorSums()
    sums.add({0: two_heads, 5: two_heads})
    summary = sums.summary()
    assert summary is not None
    assert summary.magnitude == pytest.approx((0.01 + (38 * 0.01 + 2 * 2.25) / 40) / 2)
    assert summary.direction == pytest.approx((0.03 + (38 * 0.03 + 2 * 0.75) / 40) / 2)
    assert summary.magnitude_share == pytest.approx((0.25 + (38 * 0.25 + 2 * 0.75) / 40) / 2)
    one, five, ten = summary.worst
    assert (one.share, five.share, ten.share) == (0.01, 0.05, 0.1)
    total = 24 + 38 * 0.16
    assert five.total_share == pytest.approx((0.05 + 24 / total) / 2)
    assert five.magnitude_share == pytest.approx((0.25 + 0.75) / 2)
    assert one.total_share == pytest.approx((1 / 40 + 12 / total) / 2)
    assert ten.total_share == pytest.approx((0.1 + (24 + 2 * 0.16) / total) / 2)
    assert ten.magnitude_share == pytest.approx((0.25 + 0.5) / 2)


def test_quantiles_and_samples_are_relative_to_the_squared_norm() -> None:
    magnitude = torch.linspace(0, 4, 1001)[None]
    sums = VectorSums()
    for part in magnitude.split(300, dim=1):
        sums.add({0: _errors(part, 2 * part)})
    summary = sums.summary()
    assert summary is not None
    assert summary.distribution.magnitude == pytest.approx(QUANTILES)
    assert summary.distribution.direction == pytest.approx([2 * q for q in QUANTILES])
    assert 300 < len(summary.sample) <= 400
    assert all(d == pytest.approx(2 * m) for m, d in summary.sample)


def test_no_error_has_no_worst_tokens() -> None:
    sums = VectorSums()
    sums.add({0: _errors(torch.zeros(2, 40), torch.zeros(2, 40))})
    summary = sums.summary()
    assert summary is not None
    assert summary.magnitude == summary.direction == summary.magnitude_share == 0
    assert {(w.total_share, w.magnitude_share) for w in summary.worst} == {(0, 0)}


def test_nothing_packed_is_nothing_to_sum() -> None:
    sums = VectorSums()
    sums.add({0: _errors(torch.zeros(2, 0), torch.zeros(2, 0))})
    assert sums.summary() is None
