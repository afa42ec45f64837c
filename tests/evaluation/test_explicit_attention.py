import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvarn_cli.evaluation.explicit_attention import explicit_attention

TOKENS = 600


def states(heads: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(1, heads, tokens, 8, dtype=torch.float64, generator=generator)


@pytest.fixture
def mask() -> Tensor:
    return torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()


def test_without_caps_and_sinks_it_is_attention(mask: Tensor) -> None:
    query, key, value = states(4), states(2), states(2) * 2
    expected = scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    result = explicit_attention(query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(result, expected.transpose(1, 2))
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)
    torch.testing.assert_close(explicit_attention(query, key, value, added, scaling=0.3), result)


def test_a_sink_is_a_key_that_gives_nothing(mask: Tensor) -> None:
    query, key, value = states(2), states(2), states(2) * 2
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    weights = (query @ key.mT * 8**-0.5).masked_fill(~mask, -torch.inf).exp()
    expected = weights @ value / (weights.sum(-1, keepdim=True) + sinks.exp().view(1, 2, 1, 1))
    result = explicit_attention(query, key, value, mask, s_aux=sinks)
    torch.testing.assert_close(result, expected.transpose(1, 2))


def test_a_cap_bounds_the_scores_before_the_mask(mask: Tensor) -> None:
    query, key, value = 100 * states(2), states(2), states(2) * 2
    capped = torch.tanh(query @ key.mT * 8**-0.5 / 2) * 2
    weights = capped.masked_fill(~mask, -torch.inf).softmax(-1)
    result = explicit_attention(query, key, value, mask, softcap=2.0)
    torch.testing.assert_close(result, (weights @ value).transpose(1, 2))
