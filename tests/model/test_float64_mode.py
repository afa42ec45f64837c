import pytest
import torch
from torch.nn.functional import softmax

from kvarn_cli.model.float64_mode import Float64Mode


@pytest.fixture
def x():
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.type_as(torch.zeros(1)),
        lambda x: softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float16),
        lambda x: torch.empty_like(x, dtype=torch.float32).copy_(x),
    ],
)
def test_answers_smaller_dtypes_with_float64(x, cast):
    with torch.no_grad(), Float64Mode() as mode:
        assert cast(x).dtype == torch.float64
    assert not mode.narrowed


def test_complex_numbers_stay_wide(x):
    with torch.no_grad(), Float64Mode() as mode:
        assert torch.view_as_complex(x.float().unflatten(-1, (-1, 2))).dtype == torch.complex128
    assert not mode.narrowed


def test_sees_writing_into_a_smaller_buffer(x):
    buffer = torch.zeros(8, 8)
    with torch.no_grad(), Float64Mode() as mode:
        buffer.copy_(x)
    assert mode.narrowed


def test_integers_pass(x):
    with torch.no_grad(), Float64Mode() as mode:
        assert x.argmax(-1).dtype == torch.int64
    assert not mode.narrowed
