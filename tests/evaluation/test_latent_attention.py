"""The pseudo-decode of models that cache a latent."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from decoding import exact_logits, largest_difference, one_pass_logits, random_tokens
from latent_models import LATENT_FAMILIES, latent_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import AttentionCall, attention_tap
from kvarn_cli.evaluation.metrics import summarize
from kvarn_cli.evaluation.pseudo_decode import pseudo_decode, record_exact
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention, Restoration
from kvarn_cli.evaluation.vector_errors import vector_errors
from kvarn_cli.quantization.hadamard import fused_rotation, rotate
from kvarn_cli.quantization.methods import Exact, Method, parse_method
from kvarn_cli.settings import KVarNSettings

SPECS = [f"{name}:mla_k2_g32,sink_tokens=16" for name in ("kvarn", "quarot", "kivi", "ablation")]


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    return latent_model("deepseek_v3")


@dataclass(frozen=True, kw_only=True)
class Shifted(Method):
    """Gives the latent back a constant off."""

    name: ClassVar[str] = "shifted"

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys + 1, values

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        return 8.0


def calls_of(model: PreTrainedModel, tokens: Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []

    def keep(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.attend(0, call.key.shape[2], call.key, call.value)

    with attention_tap(model, keep):
        exact_logits(model, tokens)
    return calls


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_under_a_tap_every_family_computes_what_it_always_does(family: str) -> None:
    sparse = {"index_topk": 10, "index_n_heads": 4, "index_head_dim": 32}
    model = latent_model(family, **(sparse if family == "deepseek_v32" else {}))
    tokens = random_tokens(60)
    plain = exact_logits(model, tokens)
    assert largest_difference(one_pass_logits(model, tokens, Exact()), plain) < 1e-5
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_the_latent_and_its_rope_key_are_seen(deepseek: PreTrainedModel) -> None:
    calls = calls_of(deepseek, random_tokens(20, batch=2))
    assert [call.layer for call in calls] == [0, 1]
    for call in calls:
        latent, rope_key = call.cached
        assert latent.shape == (2, 1, 20, 32)
        assert rope_key.shape == (2, 1, 20, 16)
        keys, values = call.expand(latent, rope_key)
        assert torch.equal(keys, call.key)
        assert torch.equal(values, call.value)


def test_each_query_sees_the_latents_that_a_cache_would_have_packed(
    deepseek: PreTrainedModel,
) -> None:
    """Against the expansion of the whole sequence for every query anew."""
    call = calls_of(deepseek, random_tokens(100))[1]
    method = Shifted(group_size=32, sink_tokens=16)
    output = QuantizedAttention([1], method)(call)
    latent, rope_key = call.cached
    weight = deepseek.model.layers[1].self_attn.kv_b_proj.weight.unflatten(0, (4, 24 + 20))
    for position in (0, 40, 47, 48, 79, 80, 99):
        seen = latent[0, 0, : position + 1].clone()
        seen[16 : 16 + max(position - 16, 0) // 32 * 32] += 1
        for head in range(4):
            keys, values = (seen @ weight[head].T).split((24, 20), dim=-1)
            keys = torch.cat((keys, rope_key[0, 0, : position + 1]), dim=-1)
            scores = keys @ call.query[0, head, position] * call.module.scaling
            expected = scores.softmax(-1) @ values
            assert largest_difference(output[0, position, head], expected) < 1e-9


@pytest.mark.parametrize("spec", SPECS)
def test_methods_quantize_the_latent_and_leave_the_rope_key(
    deepseek: PreTrainedModel, spec: str
) -> None:
    method = parse_method(spec)
    latent, rope_key = (
        states[:, :, :96].half() for states in calls_of(deepseek, random_tokens(100))[0].cached
    )
    approximate, same = method.reconstruct(latent, rope_key)
    assert torch.equal(same, rope_key.float())
    error = (approximate - latent).norm() / latent.float().norm()
    assert 0.05 < error < 0.5


def test_errors_are_those_of_the_latent(deepseek: PreTrainedModel) -> None:
    tokens, method = random_tokens(150), parse_method(SPECS[0])
    exact = record_exact(deepseek, tokens, static_methods=[method])
    errors = pseudo_decode(deepseek, exact, method)
    assert (errors.num_kv_heads, errors.head_dim, errors.rope_dim) == (1, 32, 16)
    assert errors.values == {}
    latent, rope_key = (states[:, :, 16:144] for states in calls_of(deepseek, tokens)[0].cached)
    expected = vector_errors(latent, method.reconstruct(latent, rope_key)[0])
    assert torch.allclose(errors.keys[0].total, expected.total[0], rtol=1e-3)
    assert errors.attention[0][:, :48].max() < 1e-9 < errors.attention[0][:, 48:].mean()
    assert errors.attention[1].shape == (4, 150)
    result = summarize([errors])
    assert result.tokens is not None
    assert result.tokens.values is None
    settings = KVarNSettings.from_name("mla_k2_g32")
    assert result.packed_bits_per_element == pytest.approx(settings.bits_per_element(32, 16))
    assert result.memory[0].sixteen_bit_bytes == 2 * (32 + 16) * 2 * 8192
    cache_bytes = 2 * settings.with_(sink_tokens=16).cache_bytes(8192, 32, 16)
    assert result.memory[0].bytes == pytest.approx(cache_bytes, abs=1)


def test_latents_can_be_restored(deepseek: PreTrainedModel) -> None:
    exact = record_exact(deepseek, random_tokens(150))
    method = parse_method(SPECS[0])

    def kl(restoration: Restoration | None) -> float:
        errors = pseudo_decode(deepseek, exact, method, restoration=restoration)
        return errors.logits.kl.mean().item()

    whole = kl(None)
    assert kl(Restoration(0.9, "worst")) < kl(Restoration(0.2, "worst")) < whole
    assert kl(Restoration(0.999, "worst")) < 1e-9


def rotated(model: PreTrainedModel, matrix: Tensor) -> Callable[[], None]:
    """Rotate the latent of every layer as its norm gives it, and undo it in kv_b_proj."""
    for layer in model.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            attention.kv_b_proj.weight.copy_(
                attention.kv_b_proj.weight * attention.kv_a_layernorm.weight @ matrix
            )
            rows = attention.kv_a_proj_with_mqa.weight[:32]
            rows.copy_(matrix.T @ rows)
            attention.kv_a_layernorm.weight.fill_(1)


@torch.no_grad()
def test_a_method_that_wants_the_plain_basis_gets_it() -> None:
    """KIVI on a rotated model is what KIVI is on the same model with its norm folded only."""
    matrix = fused_rotation(32, dtype=torch.float64)
    tokens = random_tokens(100)
    folded, turned = latent_model("deepseek_v3"), latent_model("deepseek_v3")
    rotated(folded, torch.eye(32, dtype=torch.float64))
    rotated(turned, matrix)
    outputs = []
    for model, rotation in ((folded, None), (turned, matrix), (turned, None)):
        (call, _), method = calls_of(model, tokens), parse_method(SPECS[2])
        outputs.append(QuantizedAttention([0], method, fused_rotation=rotation)(call))
    plain, undone, left = outputs
    assert largest_difference(plain, undone) < 0.1 * largest_difference(plain, left)
    call = calls_of(turned, tokens)[0]
    latent = rotate(call.cached[0], matrix.T)
    assert largest_difference(latent, calls_of(folded, tokens)[0].cached[0]) < 1e-6


def test_a_class_that_hides_its_latent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model code that some checkpoints bring along does."""
    attention = modeling_deepseek_v3.DeepseekV3Attention
    source = textwrap.dedent(inspect.getsource(attention.forward))
    names = vars(modeling_deepseek_v3) | {"hidden_way": attention.expand_kv}
    exec(source.replace("self.expand_kv(", "hidden_way(self, "), names)
    monkeypatch.setattr(attention, "forward", names["forward"])
    monkeypatch.delattr(attention, "expand_kv")
    with pytest.raises(UnsupportedModelError, match="Attention does not show the latent"):
        record_exact(latent_model("deepseek_v3"), random_tokens(20))


@pytest.mark.parametrize("name", ["kvquant", "turboquant"])
def test_methods_that_know_no_latents_refuse(name: str) -> None:
    with pytest.raises(Exception, match=f"{name} does not quantize latents") as refused:
        parse_method(f"{name}:mla_k4_g128")
    assert "kivi" in refused.value.hint


@pytest.mark.parametrize("spec", SPECS)
def test_specs_of_latents_go_both_ways(spec: str) -> None:
    method = parse_method(spec)
    assert parse_method(method.label) == method
    assert method.label.replace(",without=rotation", "") == spec
    assert method.settings.latent


def test_the_iterations_of_a_preset_are_its_own() -> None:
    assert parse_method("kvarn:mla_k4_g128").settings.iterations == 16
    assert parse_method("kvarn:mla_k4_g128,iterations=8").label == "kvarn:mla_k4_g128,iterations=8"
    assert parse_method("kvarn:k4v2_g128").settings.iterations == 8
