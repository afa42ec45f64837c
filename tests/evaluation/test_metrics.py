import json
import math
import weakref

import pytest
import torch

from kvarn_cli.errors import CheckpointError
from kvarn_cli.evaluation.error_report import MethodResult
from kvarn_cli.evaluation.logit_errors import LogitErrors
from kvarn_cli.evaluation.metrics import MethodSums, summarize
from kvarn_cli.evaluation.pseudo_decode import WindowErrors
from kvarn_cli.evaluation.vector_errors import VectorErrors
from kvarn_cli.quantization.methods import Method, parse_method

NUM_TOKENS = 80
METHOD = parse_method("kvarn:k2v2_g32,sink_tokens=0")


def _vector_errors(magnitude: torch.Tensor, direction: torch.Tensor) -> VectorErrors:
    return VectorErrors(magnitude, direction, torch.full_like(magnitude, 4.0))


def _window(
    kl: torch.Tensor,
    *,
    first_affected: int = 32,
    method: Method = METHOD,
    packed: int = 40,
    attention: float = 1,
) -> WindowErrors:
    """Attention errors of 0, then `attention` times 1 and 2 (layer 0) or 3 and 4 (layer 2)."""
    affected = attention * (torch.arange(NUM_TOKENS) >= first_affected).float()
    magnitude, direction = torch.full((1, 2, packed), 0.04), torch.full((1, 2, packed), 0.12)
    if packed:
        magnitude[0, 1, 7:9] = 9.0
        direction[0, 1, 7:9] = 3.0
    errors = _vector_errors(magnitude, direction)
    return WindowErrors(
        method=method,
        num_tokens=NUM_TOKENS,
        first_affected=first_affected,
        logits=LogitErrors(kl, kl < 0.5, torch.full_like(kl, 2.0), 2.0 + kl),
        attention={
            0: torch.stack((affected, 2 * affected)),
            2: torch.stack((3 * affected, 4 * affected)),
        },
        keys={0: errors, 2: errors},
        values={0: _vector_errors(direction, magnitude)},
        key_drift={0: 0.5 * affected, 2: 1.5 * affected},
        saturated_scales={2: 3},
        num_kv_heads=2,
        head_dim=32,
        elapsed_seconds=0.25,
    )


@pytest.fixture
def windows() -> list[WindowErrors]:
    kl = torch.arange(NUM_TOKENS - 1) / 100
    return [_window(kl), _window(kl.flip(0) + 1)]


def test_logit_metrics_are_over_all_predictions_of_all_windows(windows: list[WindowErrors]) -> None:
    errors = summarize(windows)
    assert errors.num_windows == 2
    assert errors.logits.kl.mean == pytest.approx(0.89)
    assert errors.logits.kl.median == pytest.approx(0.78)
    assert errors.logits.kl.p999 == pytest.approx(1.78, abs=0.01)
    assert errors.logits.top1 == pytest.approx(50 / 158)
    assert (errors.logits.loss_exact, errors.logits.loss) == (2.0, pytest.approx(2.89))
    assert errors.logits.perplexity == pytest.approx(math.exp(2.89))
    assert errors.elapsed_seconds == 0.25


def test_predictions_before_the_first_position_do_not_count(windows: list[WindowErrors]) -> None:
    logits = summarize(windows, first_position=40).logits
    assert logits.first_position == 40
    counted = torch.cat([window.logits.kl[40:] for window in windows])
    assert logits.kl.mean == pytest.approx(counted.mean().item())
    assert logits.loss == pytest.approx(2 + counted.mean().item())
    assert logits.top1 == pytest.approx((counted < 0.5).float().mean().item())


def test_intervals_are_over_windows(windows: list[WindowErrors]) -> None:
    low, high = summarize(windows).logits.kl.interval
    half = 12.706 * (1 / 2**0.5) / 2**0.5
    assert (low, high) == (pytest.approx(0.89 - half), pytest.approx(0.89 + half))
    assert summarize(windows[:1]).logits.kl.interval is None
    assert summarize(windows).logits.kl.by_window == tuple(
        summarize([window]).logits.kl.mean for window in windows
    )


def test_attention_error_of_layers_and_heads_is_over_affected_tokens(
    windows: list[WindowErrors],
) -> None:
    errors = summarize(windows).attention.accumulated
    assert errors.mae == 2.5
    assert errors.layers == (0, 2)
    assert errors.by_layer == (1.5, 3.5)
    assert errors.by_head == ((1, 2), (3, 4))
    assert errors.by_layer_context == ((0, 1.5, 1.5), (0, 3.5, 3.5))


def test_layers_may_have_different_numbers_of_heads(windows: list[WindowErrors]) -> None:
    window = windows[0]
    window.attention[2] = window.attention[2][:1]
    errors = summarize([window]).attention.accumulated
    assert errors.by_head == ((1, 2), (3,))
    assert errors.by_layer == (1.5, 3)


def test_attention_error_by_context_is_over_all_tokens_of_a_block() -> None:
    kl = torch.zeros(NUM_TOKENS - 1)
    windows = [_window(kl, first_affected=48, attention=factor) for factor in (1, 3)]
    blocks = summarize(windows).attention.accumulated.by_context
    assert [(block.start, block.end, block.mae) for block in blocks] == [
        (0, 32, 0.0),
        (32, 64, 2.5),
        (64, 80, 5.0),
    ]
    assert blocks[0].interval == (0, 0)
    assert blocks[2].interval == (pytest.approx(5 - 12.706 * 2.5), pytest.approx(5 + 12.706 * 2.5))


def test_the_gap_is_how_much_accumulation_adds_to_the_static_error() -> None:
    window = _window(torch.zeros(NUM_TOKENS - 1))
    sums = MethodSums()
    sums.add(window, {layer: errors[:, ::4] / 2 for layer, errors in window.attention.items()})
    attention = sums.summary().attention
    assert attention.static is not None
    assert (attention.static.mae, attention.gap) == (1.25, 1.0)
    ends = [(block.start, block.end) for block in attention.static.by_context]
    assert ends == [(0, 32), (32, 64), (64, 80)]
    assert summarize([window]).attention.gap is None


def test_drift_is_over_layers_and_affected_tokens(windows: list[WindowErrors]) -> None:
    tokens = summarize(windows).tokens
    assert tokens is not None
    assert (tokens.key_drift.mean, tokens.key_drift.by_layer) == (1.0, (0.5, 1.5))


def test_clamped_scales_are_summed_over_windows(windows: list[WindowErrors]) -> None:
    assert summarize(windows).saturated_scales == {2: 3 * len(windows)}


def test_memory_counts_covered_layers_heads_and_both_of_k_and_v(
    windows: list[WindowErrors],
) -> None:
    memory = summarize(windows).memory[0]
    elements = 2 * 2 * 2 * 32 * 8192
    assert (memory.tokens, memory.sixteen_bit_bytes) == (8192, 2 * elements)
    assert memory.bytes == round(elements * METHOD.average_bits(8192, 32, 2) / 8)


def test_bits_are_those_of_the_window_s_length(windows: list[WindowErrors]) -> None:
    errors = summarize(windows)
    assert errors.bits_per_element == METHOD.average_bits(NUM_TOKENS, 32, 2)
    assert errors.packed_bits_per_element == METHOD.bits_per_element(32, 2)


def test_where_nothing_is_packed_there_is_nothing_to_summarize() -> None:
    kl = torch.zeros(NUM_TOKENS - 1)
    errors = summarize([_window(kl, first_affected=NUM_TOKENS, packed=0)])
    assert errors.tokens is None
    assert errors.attention.accumulated.mae == 0
    assert errors.attention.accumulated.by_layer == (0, 0)


def test_no_tensor_of_a_window_outlives_it() -> None:
    window, sums = _window(torch.zeros(NUM_TOKENS - 1)), MethodSums()
    tensors = [window.logits.kl, *window.attention.values(), *window.key_drift.values()]
    tensors += [window.keys[0].magnitude, window.values[0].direction]
    references = [weakref.ref(tensor) for tensor in tensors]
    sums.add(window, {layer: errors[:, ::4] for layer, errors in window.attention.items()})
    del window, tensors
    assert sums.summary().num_windows == 1
    assert [reference() for reference in references] == [None] * len(references)


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no numbers at 1 of 79 tokens"):
        summarize([_window(torch.zeros(NUM_TOKENS - 1).index_fill(0, torch.tensor(3), math.nan))])


def test_the_result_goes_to_json_and_back(windows: list[WindowErrors]) -> None:
    result = summarize(windows)
    document = json.dumps(result.model_dump(mode="json"), allow_nan=False)
    assert MethodResult.model_validate_json(document) == result
