import json
from dataclasses import asdict

import pytest
import torch

from kvarn_cli.errors import CheckpointError
from kvarn_cli.evaluation.logit_errors import LogitErrors
from kvarn_cli.evaluation.metrics import ContextError, summarize
from kvarn_cli.evaluation.pseudo_decode import WindowErrors
from kvarn_cli.evaluation.vector_errors import VectorErrors
from kvarn_cli.quantization.methods import Method, parse_method

NUM_TOKENS = 80
METHOD = parse_method("kvarn:k2v2_g32,sink_tokens=0")


def _vector_errors(magnitude: torch.Tensor, direction: torch.Tensor) -> VectorErrors:
    return VectorErrors(magnitude, direction, torch.full_like(magnitude, 4.0))


def _window(
    kl: torch.Tensor, *, first_affected: int = 32, method: Method = METHOD, packed: int = 40
) -> WindowErrors:
    """Attention errors of 0, then 1 (layer 0) or 3 (layer 2), from the first affected token on."""
    affected = (torch.arange(NUM_TOKENS) >= first_affected).float()
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
        attention={0: affected, 2: 3 * affected},
        keys={0: errors, 2: errors},
        values={0: _vector_errors(direction, magnitude)},
        head_dim=32,
        elapsed_seconds=0.25,
    )


@pytest.fixture
def windows() -> list[WindowErrors]:
    kl = torch.arange(NUM_TOKENS - 1) / 100
    return [_window(kl), _window(kl.flip(0) + 1)]


def test_logit_metrics_are_over_all_predictions_of_all_windows(windows: list[WindowErrors]) -> None:
    errors = summarize(windows)
    assert (errors.num_windows, errors.sequence_length) == (2, NUM_TOKENS)
    assert errors.kl_mean == pytest.approx(0.89)
    assert errors.kl_median == pytest.approx(0.78)
    assert errors.kl_p999 == pytest.approx(1.78, abs=0.01)
    assert errors.top1_agreement == pytest.approx(50 / 158)
    assert (errors.loss_exact, errors.loss_method) == (2.0, pytest.approx(2.89))
    assert errors.elapsed_seconds == 0.5


def test_predictions_before_the_first_position_do_not_count(windows: list[WindowErrors]) -> None:
    errors = summarize(windows, first_position=40)
    assert errors.first_position == 40
    counted = torch.cat([window.logits.kl[40:] for window in windows])
    assert errors.kl_mean == pytest.approx(counted.mean().item())
    assert errors.loss_method == pytest.approx(2 + counted.mean().item())
    assert errors.top1_agreement == pytest.approx((counted < 0.5).float().mean().item())


def test_attention_error_of_layers_is_over_affected_tokens(windows: list[WindowErrors]) -> None:
    errors = summarize(windows)
    assert errors.attention_mae == 2
    assert errors.attention_mae_by_layer == {0: 1, 2: 3}


def test_attention_error_by_context_is_over_all_tokens_of_a_block() -> None:
    errors = summarize([_window(torch.zeros(NUM_TOKENS - 1), first_affected=48)])
    assert errors.attention_mae_by_context == (
        ContextError(0, 32, 0.0),
        ContextError(32, 64, 1.0),
        ContextError(64, 80, 2.0),
    )


def test_the_worst_tokens_are_found_per_head(windows: list[WindowErrors]) -> None:
    """5 % of 40 tokens are 2: of one head the outliers, of the other any two."""
    keys = summarize(windows).keys
    assert keys is not None
    assert keys.magnitude == pytest.approx((0.01 + (38 * 0.01 + 2 * 2.25) / 40) / 2)
    assert keys.direction == pytest.approx((0.03 + (38 * 0.03 + 2 * 0.75) / 40) / 2)
    assert keys.worst_magnitude_share == pytest.approx((0.25 + 0.75) / 2)
    assert keys.worst_total_share == pytest.approx((0.05 + 24 / (24 + 38 * 0.16)) / 2)
    values = summarize(windows).values
    assert values is not None
    assert values.worst_magnitude_share == pytest.approx((0.75 + 0.25) / 2)


def test_bits_count_sink_and_tail_as_sixteen() -> None:
    kl = torch.zeros(NUM_TOKENS - 1)
    packed = METHOD.bits_per_element(32)
    assert summarize([_window(kl)]).bits_per_element == pytest.approx((64 * packed + 16 * 16) / 80)
    with_sink = parse_method("kvarn:k2v2_g32,sink_tokens=20")
    bits = summarize([_window(kl, method=with_sink)]).bits_per_element
    assert bits == pytest.approx((32 * packed + 48 * 16) / 80)
    assert summarize([_window(kl, method=parse_method("exact"))]).bits_per_element == 16


def test_where_nothing_is_packed_there_is_nothing_to_summarize() -> None:
    kl = torch.zeros(NUM_TOKENS - 1)
    errors = summarize([_window(kl, first_affected=NUM_TOKENS, packed=0)])
    assert errors.keys is errors.values is None
    assert errors.attention_mae == 0
    assert errors.attention_mae_by_layer == {0: 0, 2: 0}


def test_no_error_has_no_worst_tokens() -> None:
    window = _window(torch.zeros(NUM_TOKENS - 1))
    zero = torch.zeros(1, 2, 40)
    window.keys.update({0: _vector_errors(zero, zero), 2: _vector_errors(zero, zero)})
    keys = summarize([window]).keys
    assert keys is not None
    assert asdict(keys) == dict.fromkeys(asdict(keys), 0.0)


def test_the_result_goes_to_json(windows: list[WindowErrors]) -> None:
    document = json.loads(json.dumps(asdict(summarize(windows)), allow_nan=False))
    assert document["method"] == "kvarn:k2v2_g32,sink_tokens=0"
    assert document["attention_mae_by_context"][1]["start"] == 32


def test_logits_that_are_no_numbers_are_refused() -> None:
    kl = torch.full((NUM_TOKENS - 1,), 0.1)
    kl[7] = torch.nan
    with pytest.raises(CheckpointError, match="no numbers at 1 of 158 tokens"):
        summarize([_window(kl), _window(kl.nan_to_num())])
