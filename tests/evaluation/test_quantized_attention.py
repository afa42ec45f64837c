from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from decoding import (
    calm_model,
    exact_logits,
    largest_difference,
    method_of,
    one_pass_logits,
    random_tokens,
)
from fused_models import fuse
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.attention import AttentionCall, attention_tap
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention, Step, decode_steps
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import Exact, Method, parse_method
from kvarn_cli.settings import KVarNSettings

SETTINGS = KVarNSettings(key_bits=2, value_bits=2, group_size=32, sink_tokens=16)


@dataclass(frozen=True, kw_only=True)
class Shifted(Method):
    """Gives K and V back a constant off, so that seeing a tile is plain to see."""

    name: ClassVar[str] = "shifted"

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.float() + 1, values.float() - 2

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        return 8.0


@pytest.mark.parametrize(
    ("num_tokens", "sink", "step_tokens", "expected"),
    [
        (1, 128, None, [(0, 1, 0)]),
        (128, 128, None, [(0, 128, 0)]),
        (129, 128, None, [(0, 128, 0), (128, 129, 0)]),
        (400, 128, None, [(0, 128, 0), (128, 256, 0), (256, 384, 128), (384, 400, 256)]),
        (200, 0, None, [(0, 128, 0), (128, 200, 128)]),
        (600, 128, 300, [(0, 300, 0), (300, 600, 128)]),
        (5, 0, 2, [(0, 2, 0), (2, 4, 0), (4, 5, 0)]),
    ],
)
def test_steps_find_packed_what_was_full_before_them(
    num_tokens: int, sink: int, step_tokens: int | None, expected: list[tuple[int, int, int]]
) -> None:
    settings = KVarNSettings(group_size=128, sink_tokens=sink)
    steps = decode_steps(num_tokens, settings, step_tokens)
    assert steps == [Step(*values) for values in expected]


@pytest.mark.parametrize("step_tokens", [None, 1, 50])
def test_each_query_sees_the_tiles_that_a_cache_would_have_packed(step_tokens: int | None) -> None:
    """Against attention written as loops over queries and heads."""
    generator = torch.Generator().manual_seed(0)
    shape = {"dtype": torch.float64, "generator": generator}
    query = torch.randn(1, 4, 130, 32, **shape)
    key, value = torch.randn(1, 2, 130, 32, **shape), torch.randn(1, 2, 130, 32, **shape)
    module = torch.nn.Module()
    module.layer_idx, module.num_key_value_groups = 0, 2
    call = AttentionCall(module, query, key, value, None, {"scaling": 0.3})
    method = Shifted(group_size=32, sink_tokens=16)
    output = QuantizedAttention([0], method, step_tokens=step_tokens)(call)
    for position in range(130):
        start = position // step_tokens * step_tokens if step_tokens else position
        tiles = slice(16, 16 + (max(start - 16, 0) // 32) * 32)
        keys, values = key[0, :, : position + 1].clone(), value[0, :, : position + 1].clone()
        keys[:, tiles] += 1
        values[:, tiles] -= 2
        for head in range(4):
            weights = (keys[head // 2] @ query[0, head, position] * 0.3).softmax(-1)
            expected = weights @ values[head // 2]
            assert largest_difference(output[0, position, head], expected) < 1e-5


def test_residual_tokens_wait_behind_the_newest_tile() -> None:
    settings = KVarNSettings(group_size=32, sink_tokens=16, residual_tokens=40)
    steps = decode_steps(160, settings)
    assert steps == [
        Step(0, 56, 0),
        Step(56, 88, 0),
        Step(88, 120, 32),
        Step(120, 152, 64),
        Step(152, 160, 96),
    ]
    for step in steps:
        assert all(
            settings.packed_tokens(token) == step.packed_tokens
            for token in range(step.start, step.end)
        )


@pytest.mark.parametrize(
    "spec", ["kvarn:k2v2_g32,sink_tokens=18", "kivi:k2v2_g32,tail=packed", "exact"]
)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_queries_can_be_left_out(spec: str, family: str) -> None:
    calls: list[AttentionCall] = []

    def keep(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.attend(0, call.key.shape[2], call.key, call.value)

    model = calm_model(family, torch.float64, num_hidden_layers=1)
    with attention_tap(model, keep):
        exact_logits(model, random_tokens(151))
    method = parse_method(spec)
    whole, some = (QuantizedAttention([0], method, every=every)(calls[0]) for every in (1, 4))
    assert largest_difference(whole[:, ::4], some) < 1e-12


def test_without_a_window_every_query_sees_packed_tokens_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 70, 32, dtype=torch.float64, generator=generator)
    module = torch.nn.Module()
    module.layer_idx, module.num_key_value_groups = 0, 1
    call = AttentionCall(module, query, key, value, None, {"scaling": 0.3})
    method = Shifted(group_size=32, sink_tokens=0, tail="packed")
    tap = QuantizedAttention([0], method)
    shifted = AttentionCall(module, query, key + 1, value - 2, None, {"scaling": 0.3})
    expected = shifted.attend(0, 70, shifted.key, shifted.value)
    assert largest_difference(tap(call), expected) < 1e-5
    assert tap.key_errors[0].total.shape == (1, 2, 70)


def test_layers_outside_the_covered_ones_attend_exactly(llama: PreTrainedModel) -> None:
    tokens = random_tokens(150)
    tap = QuantizedAttention([], method_of(SETTINGS))
    with attention_tap(llama, tap):
        logits = exact_logits(llama, tokens)
    assert torch.equal(logits, exact_logits(llama, tokens))
    assert tap.key_errors == tap.value_errors == {}


def test_the_exact_method_is_the_plain_forward_pass(llama: PreTrainedModel) -> None:
    tokens = random_tokens(150)
    logits = one_pass_logits(llama, tokens, Exact(group_size=32, sink_tokens=0))
    assert torch.equal(logits, exact_logits(llama, tokens))


def test_sliding_windows_hold_while_tiles_are_packed() -> None:
    """With every layer covered, a token beyond the window still does not matter."""
    model = calm_model("mistral-sliding", torch.float64, num_hidden_layers=1)
    tokens = random_tokens(200)
    changed = tokens.clone()
    changed[0, :30] = random_tokens(30, seed=1)[0]
    logits = []
    for window in (tokens, changed):
        # Shifted packs token by token, so a changed token changes no other.
        with attention_tap(model, QuantizedAttention([0], Shifted(group_size=32, sink_tokens=0))):
            logits.append(exact_logits(model, window)[:, 30 + 64 :])
    assert largest_difference(*logits) < 1e-12
    assert largest_difference(logits[0], exact_logits(model, tokens)[:, 94:]) > 1e-2


@pytest.mark.parametrize("spec", ["kivi:k2v2_g32", "quarot:k2v2_g32"])
def test_methods_of_the_plain_basis_see_v_of_a_fused_model_unrotated(
    llama: PreTrainedModel, spec: str
) -> None:
    method, tokens = parse_method(spec), random_tokens(300)
    original = one_pass_logits(llama, tokens, method)
    fused = fuse(llama)
    results = {}
    for name, rotation in (("told", fused_rotation(32, dtype=torch.float64)), ("untold", None)):
        tap = QuantizedAttention([0, 1], method, fused_rotation=rotation)
        with attention_tap(fused, tap):
            results[name] = exact_logits(fused, tokens)
    assert largest_difference(results["told"], original) < 1e-5
    assert largest_difference(results["untold"], original) > 1e-2


def test_kvarn_takes_v_of_a_fused_model_as_it_is_cached(llama: PreTrainedModel) -> None:
    fused, tokens = fuse(llama), random_tokens(300)
    method = method_of(SETTINGS, value_rotation="fused")
    rotation = fused_rotation(32, dtype=torch.float64)
    logits = []
    for known in (rotation, None):
        with attention_tap(fused, QuantizedAttention([0, 1], method, fused_rotation=known)):
            logits.append(exact_logits(fused, tokens))
    assert torch.equal(*logits)


def test_errors_are_recorded_for_the_tiles_that_a_later_step_sees(llama: PreTrainedModel) -> None:
    tap = QuantizedAttention([0, 1], Shifted(group_size=32, sink_tokens=16))
    with attention_tap(llama, tap):
        exact_logits(llama, random_tokens(16 + 3 * 32))
    for errors in (*tap.key_errors.values(), *tap.value_errors.values()):
        assert errors.total.shape == (1, 2, 64)
    torch.testing.assert_close(tap.key_errors[0].total, torch.full((1, 2, 64), 32.0))
    torch.testing.assert_close(tap.value_errors[1].total, torch.full((1, 2, 64), 4 * 32.0))
