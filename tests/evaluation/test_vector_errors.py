import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvarn_cli.evaluation.vector_errors import vector_errors


@given(
    seed=st.integers(0, 2**32 - 1),
    noise=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 10.0]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_magnitude_and_direction_add_up_to_the_squared_error(
    seed: int, noise: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact, error = (torch.randn(2, 5, 64, generator=generator).double() for _ in range(2))
    exact = exact * scale
    approximate = exact + error * noise * scale
    errors = vector_errors(exact, approximate)
    expected = (exact - approximate).square().sum(-1).float()
    torch.testing.assert_close(errors.total, expected, rtol=1e-5, atol=0)
    assert errors.magnitude.shape == errors.direction.shape == (2, 5)
    torch.testing.assert_close(errors.squared_norm, exact.square().sum(-1).float())


@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0])
def test_float32_parts_equal_their_definitions_in_float64(noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    exact, error = torch.randn(2, 200, 64, generator=generator)
    approximate = exact * 1.01 + noise * error
    x, y = exact.double(), approximate.double()
    x_norm, y_norm = x.norm(dim=-1), y.norm(dim=-1)
    errors, total = vector_errors(exact, approximate), (x - y).square().sum(-1)
    cosine = (x * y).sum(-1) / (x_norm * y_norm)
    for own, expected in (
        (errors.magnitude, (x_norm - y_norm).square()),
        (errors.direction, 2 * x_norm * y_norm * (1 - cosine)),
        (errors.total, total),
    ):
        assert ((own - expected).abs() / total).max() < 1e-5


def test_a_longer_vector_has_magnitude_error_only() -> None:
    exact = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    errors = vector_errors(exact, 1.25 * exact)
    torch.testing.assert_close(errors.magnitude, 0.0625 * exact.square().sum(-1))
    assert errors.direction.max() < 1e-6 * errors.magnitude.min()


def test_a_turned_vector_has_direction_error_only() -> None:
    angle = torch.tensor(1e-5, dtype=torch.float64)
    exact = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    turned = 3 * torch.stack((angle.cos(), angle.sin()))[None]
    errors = vector_errors(exact, turned)
    assert errors.direction.item() == pytest.approx(9 * 1e-10, rel=1e-6)
    assert errors.magnitude.item() < 1e-20


def test_a_zero_vector_has_no_direction() -> None:
    errors = vector_errors(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.zeros(2, 2))
    assert errors.magnitude.tolist() == [0, 25]
    assert errors.direction.tolist() == [0, 0]
