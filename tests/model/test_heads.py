from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from kvarn_cli.model.heads import put_heads, rotate_heads, take_heads
from kvarn_cli.model.layout import HeadSlices
from kvarn_cli.quantization.hadamard import fused_rotation, fused_rotation_factors

HEAD_DIM, KV_HEADS, HIDDEN = 32, 3, 48


@pytest.fixture
def normal():
    return partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def heads(num_heads, axis=0):
    starts = tuple(range(0, num_heads * HEAD_DIM, HEAD_DIM))
    return HeadSlices("some.weight", axis, starts, HEAD_DIM)


def test_the_cached_v_is_v_times_the_rotation(normal):
    weight, bias = normal(KV_HEADS * HEAD_DIM, HIDDEN), normal(KV_HEADS * HEAD_DIM)
    hidden_states = normal(5, HIDDEN)
    rotation = fused_rotation(HEAD_DIM, dtype=torch.float64)
    plain = linear(hidden_states, weight, bias).unflatten(-1, (KV_HEADS, HEAD_DIM))
    fused_weight, fused_bias = (
        rotate_heads(it, heads(KV_HEADS), [rotation]) for it in (weight, bias)
    )
    fused = linear(hidden_states, fused_weight, fused_bias).unflatten(-1, (KV_HEADS, HEAD_DIM))
    for head in range(KV_HEADS):
        torch.testing.assert_close(fused[:, head], plain[:, head] @ rotation)


def test_o_takes_the_rotation_back(normal):
    weight = normal(HIDDEN, 2 * HEAD_DIM)
    rotation = fused_rotation(HEAD_DIM, dtype=torch.float64)
    attention_output = normal(5, 2, HEAD_DIM)
    fused_weight = rotate_heads(weight, heads(2, axis=1), [rotation])
    torch.testing.assert_close(
        linear((attention_output @ rotation).flatten(1), fused_weight),
        linear(attention_output.flatten(1), weight),
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows_at_once", [HEAD_DIM, 2 * HEAD_DIM, 5 * HEAD_DIM])
def test_rows_in_blocks_equal_the_whole(normal, axis, rows_at_once):
    """Heads 1 and 3 of four; the others, as Q and K beside V, keep every bit."""
    weight = normal(4 * HEAD_DIM, 4 * HEAD_DIM)
    some = HeadSlices("some.weight", axis, (HEAD_DIM, 3 * HEAD_DIM), HEAD_DIM)
    rotation = fused_rotation(HEAD_DIM, dtype=torch.float64)
    whole = rotate_heads(weight, some, [rotation])
    blocks = [
        rotate_heads(rows, some, [rotation], first_row=index * rows_at_once)
        for index, rows in enumerate(weight.split(rows_at_once))
    ]
    assert torch.equal(torch.cat(blocks), whole)
    by_head, originals = (it.unflatten(axis, (4, HEAD_DIM)) for it in (whole, weight))
    for head in range(4):
        unchanged = torch.equal(by_head.select(axis, head), originals.select(axis, head))
        assert unchanged is (head in (0, 2))


@pytest.mark.parametrize("head_dim", [4, 64, 128, 256])
@pytest.mark.parametrize("shape", ["value", "bias", "output"])
def test_factors_make_what_their_product_makes(normal, head_dim, shape):
    """Also of more entries than are widened at once, and of heads that do not lie side by side."""
    channels = 5 * head_dim
    weight = {
        "value": lambda: normal(channels, 700),
        "bias": lambda: normal(channels),
        "output": lambda: normal(700, channels),
    }[shape]()
    starts = (0, head_dim, 3 * head_dim)
    some = HeadSlices("some.weight", int(shape == "output"), starts, head_dim)
    factors = fused_rotation_factors(head_dim)
    expected = rotate_heads(weight, some, [torch.kron(*factors)])
    torch.testing.assert_close(rotate_heads(weight, some, factors), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_heads_that_are_taken_out_can_be_put_back(normal, axis):
    weight = normal(3 * HEAD_DIM, 3 * HEAD_DIM)
    some = HeadSlices("some.weight", axis, (2 * HEAD_DIM,), HEAD_DIM)
    vectors = take_heads(weight, some)
    assert vectors.shape == (1, 3 * HEAD_DIM, HEAD_DIM)
    emptied = put_heads(weight.clone(), some, torch.zeros_like(vectors))
    assert not take_heads(emptied, some).any()
    assert torch.equal(put_heads(emptied, some, vectors), weight)
    assert torch.equal(put_heads(weight.clone(), some, take_heads(weight, some)), weight)
