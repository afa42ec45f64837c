from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from decoding import calm_model, random_tokens
from fused_models import fuse
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.fitting import fit_methods
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.metrics import summarize
from kvarn_cli.evaluation.pseudo_decode import pseudo_decode, record_exact
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import Method, parse_method


@dataclass(frozen=True, kw_only=True)
class PermutedHeads(Method):
    """Hands the heads to another method in reverse order."""

    name: ClassVar[str] = "permuted"
    keys_before_rope: ClassVar[bool] = True

    inner: Method

    def for_layer(self, layer: int) -> Method:
        return PermutedHeads(inner=self.inner.for_layer(layer), group_size=self.group_size)

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.reconstruct(keys.flip(1), values.flip(1))
        return keys.flip(1), values.flip(1)

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        return self.inner.bits_per_element(head_dim, num_kv_heads)


METHODS = [parse_method(spec) for spec in ("kvarn:k2v2_g32", "exact", "kivi:k2v2_g32")]


def test_methods_are_measured_on_every_window_in_their_order(llama: PreTrainedModel) -> None:
    windows = random_tokens(300, batch=3)
    passes: list[tuple[int, int]] = []
    measured = measure_methods(
        llama, windows, METHODS, report=lambda _, done, total: passes.append((done, total))
    )
    assert passes == [(done, 12) for done in range(13)]
    results = measured.results
    assert [result.method for result in results] == [method.label for method in METHODS]
    assert not measured.interrupted
    kvarn, exact, kivi = results
    assert exact.logits.kl.mean == exact.attention.accumulated.mae == 0
    assert exact.attention.static.mae == 0
    assert min(kvarn.logits.kl.mean, kivi.logits.kl.mean) > 1e-3
    alone = summarize(
        [
            pseudo_decode(llama, record_exact(llama, window), METHODS[0])
            for window in windows.split(1)
        ],
        first_position=160,
    )
    assert {result.logits.first_position for result in results} == {160}
    assert kvarn.logits == alone.logits
    assert kvarn.tokens == alone.tokens


def test_static_and_accumulated_errors_are_equal_in_the_first_layer_only(
    llama: PreTrainedModel,
) -> None:
    windows = random_tokens(300, batch=2)
    for result in measure_methods(llama, windows, METHODS).results:
        accumulated, static = result.attention.accumulated, result.attention.static
        assert static.by_head[0] == accumulated.by_head[0]
        assert static.by_layer_context[0] == accumulated.by_layer_context[0]
        if result.method != "exact":
            assert static.by_layer[1] < accumulated.by_layer[1]
            assert result.attention.gap > 0
            assert result.tokens.key_drift.by_layer[0] == 0
            assert result.tokens.key_drift.by_layer[1] > 1e-4


def test_the_oracle_restores_the_worst_tokens_or_all_others(llama: PreTrainedModel) -> None:
    windows = random_tokens(300, batch=1)
    result = measure_methods(llama, windows, METHODS[2:], oracle_shares=(0.05, 0.5)).results[0]
    kl = {(entry.share, entry.restored): entry.kl_mean for entry in result.oracle}
    whole = result.logits.kl.mean
    assert kl[0.5, "worst"] < kl[0.05, "worst"] < whole
    assert kl[0.05, "others"] < kl[0.5, "others"] < whole


@pytest.mark.parametrize("passes", [1, 2, 4, 6])
def test_an_interrupt_keeps_the_windows_that_every_method_finished(
    llama: PreTrainedModel, passes: int
) -> None:
    """A window is one exact pass and one for each of the three methods."""

    def interrupt(_: str, done: int, __: int) -> None:
        if done == passes:
            raise KeyboardInterrupt

    windows = random_tokens(300, batch=3)
    if passes == 1:
        with pytest.raises(KeyboardInterrupt):
            measure_methods(llama, windows, METHODS, report=interrupt)
        return
    measured = measure_methods(llama, windows, METHODS, report=interrupt)
    assert measured.interrupted
    finished = {2: 1, 4: 3, 6: 3}[passes]
    assert [result.num_windows for result in measured.results] == [1] * finished


def test_a_permuted_head_order_shows_in_the_errors() -> None:
    """KV heads of different scale, handed to a fitted method in reverse order."""
    model = calm_model("llama", torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[:32] *= 0.2
    windows = random_tokens(300, batch=1)
    fitted = fit_methods(model, random_tokens(300, seed=1), [parse_method("kvquant:k4v4_g32")])[0]
    permuted = PermutedHeads(inner=fitted, group_size=32)
    own, wrong = measure_methods(model, windows, [fitted, permuted]).results
    assert wrong.logits.kl.mean > 3 * own.logits.kl.mean
    assert wrong.tokens.keys.direction > 3 * own.tokens.keys.direction


def test_v_handed_over_in_another_basis_shows_in_the_errors() -> None:
    """RTN in the plain basis keeps one heavy channel of V apart; a rotated V mixes it in."""
    model = calm_model("llama", torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[::32] *= 20
    windows, rotation = random_tokens(300, batch=1), fused_rotation(32, dtype=torch.float64)
    fused, kivi = fuse(model), [parse_method("kivi:k4v4_g32")]
    own = measure_methods(model, windows, kivi).results[0].tokens.values
    told = measure_methods(fused, windows, kivi, fused_rotation=rotation).results[0].tokens.values
    untold = measure_methods(fused, windows, kivi).results[0].tokens.values
    assert told.direction == pytest.approx(own.direction, rel=1e-3)
    assert abs(untold.direction / own.direction - 1) > 0.2


def test_a_fused_model_is_compared_with_itself_in_the_plain_basis(llama: PreTrainedModel) -> None:
    windows = random_tokens(300, batch=1)
    rotation = fused_rotation(32, dtype=torch.float64)
    original = measure_methods(llama, windows, METHODS[2:]).results[0].attention
    fused_model = fuse(llama)
    fused = measure_methods(fused_model, windows, METHODS[2:], fused_rotation=rotation).results[0]
    ratio = fused.attention.accumulated.mae / original.accumulated.mae
    assert abs(ratio - 1) < 1e-4
    assert abs(fused.attention.static.mae / original.static.mae - 1) < 1e-4
