import pytest
import torch
from decoding import calm_model, random_tokens
from fused_models import fuse
from tiny_models import tiny_model
from torch import nn
from transformers import Gemma4TextConfig, PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.pseudo_decode import pseudo_decode, record_exact
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import parse_method

COARSE = parse_method("kvarn:k2v2_g32,sink_tokens=16")


def test_the_exact_method_has_no_error_anywhere(llama: PreTrainedModel) -> None:
    exact = record_exact(llama, random_tokens(200))
    errors = pseudo_decode(llama, exact, parse_method("exact"))
    assert errors.logits.kl.abs().max() == 0
    assert errors.logits.agreement.all()
    assert torch.equal(errors.logits.loss_exact, errors.logits.loss_method)
    assert all(layer.abs().max() == 0 for layer in errors.attention.values())


def test_error_begins_with_the_first_token_that_sees_a_packed_tile(llama: PreTrainedModel) -> None:
    errors = pseudo_decode(llama, record_exact(llama, random_tokens(200)), COARSE)
    assert errors.first_affected == 48
    for layer in errors.attention.values():
        assert layer.shape == (4, 200)
        assert layer[:, :48].max() < 1e-12
        assert layer[:, 48:].min() > 1e-4
    assert errors.logits.kl[:48].max() < 1e-12
    assert errors.logits.kl[48:].mean() > 1e-4
    assert set(errors.attention) == set(errors.keys) == set(errors.values) == {0, 1}
    assert errors.keys[1].total.shape == (1, 2, 160)
    assert (errors.num_kv_heads, errors.head_dim) == (2, 32)
    assert errors.key_drift[0].max() == 0
    assert errors.key_drift[1][:48].max() < 1e-12
    assert errors.key_drift[1][48:].min() > 1e-6


def test_without_a_window_even_the_first_tile_s_own_tokens_are_packed(
    llama: PreTrainedModel,
) -> None:
    method = parse_method("kvarn:k2v2_g32,sink_tokens=0,tail=packed")
    errors = pseudo_decode(llama, record_exact(llama, random_tokens(50)), method)
    assert errors.first_affected == 0
    assert errors.attention[0].min() > 1e-4
    assert errors.keys[1].total.shape == (1, 2, 50)


def test_windows_of_different_lengths_are_measured_alike(llama: PreTrainedModel) -> None:
    """Causal attention: what comes behind a token does not change its errors."""
    tokens = random_tokens(300)
    long, short = (
        pseudo_decode(llama, record_exact(llama, tokens[:, :n]), COARSE) for n in (300, 170)
    )
    for layer in (0, 1):
        torch.testing.assert_close(
            long.attention[layer][:, :170], short.attention[layer], rtol=1e-4, atol=1e-6
        )
    torch.testing.assert_close(long.logits.kl[:169], short.logits.kl, rtol=1e-3, atol=1e-6)


def test_a_window_without_packed_tiles_is_measured_as_unaffected(llama: PreTrainedModel) -> None:
    errors = pseudo_decode(llama, record_exact(llama, random_tokens(48)), COARSE)
    assert errors.first_affected == 48
    assert errors.logits.kl.abs().max() < 1e-12


def test_more_bits_err_less_in_every_respect(llama: PreTrainedModel) -> None:
    exact = record_exact(llama, random_tokens(300))
    fine = pseudo_decode(llama, exact, parse_method("kvarn:k4v4_g32,sink_tokens=16"))
    coarse = pseudo_decode(llama, exact, COARSE)
    assert fine.logits.kl.mean() < coarse.logits.kl.mean() / 3
    for layer in (0, 1):
        assert fine.attention[layer].mean() < coarse.attention[layer].mean() / 2
        assert fine.keys[layer].total.mean() < coarse.keys[layer].total.mean() / 3
        assert fine.values[layer].total.mean() < coarse.values[layer].total.mean() / 3


def test_a_fused_model_is_compared_in_the_basis_of_the_original(llama: PreTrainedModel) -> None:
    tokens, fused = random_tokens(200), fuse(llama)
    rotation = fused_rotation(32, dtype=torch.float64)
    original, own = (
        record_exact(llama, tokens),
        record_exact(fused, tokens, fused_rotation=rotation),
    )
    for layer in (0, 1):
        torch.testing.assert_close(own.attention[layer], original.attention[layer])
    kivi = parse_method("kivi:k2v2_g32")
    on_original = pseudo_decode(llama, original, kivi)
    for exact in (original, own):
        on_fused = pseudo_decode(fused, exact, kivi, fused_rotation=rotation)
        for layer in (0, 1):
            torch.testing.assert_close(
                on_fused.attention[layer], on_original.attention[layer], rtol=1e-4, atol=1e-7
            )


def test_layers_of_another_width_than_the_fused_rotation_s_are_in_the_plain_basis() -> None:
    config = Gemma4TextConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    model, tokens = tiny_model(config, dtype=torch.float64), random_tokens(100)
    fused, rotation = fuse(model, 64), fused_rotation(64, dtype=torch.float64)
    original, own = (
        record_exact(model, tokens),
        record_exact(fused, tokens, fused_rotation=rotation),
    )
    assert original.attention[0].shape[-1] == 32
    for layer in (0, 1):
        torch.testing.assert_close(
            own.attention[layer], original.attention[layer], rtol=1e-4, atol=1e-5
        )
    kivi = parse_method("kivi:k2v2_g32")
    for covered in ([1], [0, 1]):
        errors = [
            pseudo_decode(each, original, kivi, fused_rotation=turned, covered=covered)
            for each, turned in ((model, None), (fused, rotation))
        ]
        torch.testing.assert_close(errors[0].logits.kl, errors[1].logits.kl, rtol=1e-3, atol=1e-6)


def test_the_layers_to_quantize_can_be_named() -> None:
    model = calm_model(
        "qwen3",
        torch.float64,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=48,
    )
    exact = record_exact(model, random_tokens(200))
    errors = pseudo_decode(model, exact, COARSE)
    assert errors.attention[0].max() == 0
    assert errors.attention[1][:, 48:].min() > 0
    assert set(errors.keys) == {1}
    errors = pseudo_decode(model, exact, COARSE, covered=[0, 1])
    assert errors.attention[0][:, 48:].mean() > 1e-3
    assert set(errors.keys) == {0, 1}
    assert set(pseudo_decode(model, exact, COARSE, covered=[0]).keys) == {0}


def test_a_model_with_sliding_layers_only_has_nothing_to_pack() -> None:
    model = calm_model("mistral-sliding")
    exact = record_exact(model, random_tokens(100))
    with pytest.raises(UnsupportedModelError, match="no layer of mistral attends to the full"):
        pseudo_decode(model, exact, COARSE)
    errors = pseudo_decode(model, exact, COARSE, covered=[0, 1])
    assert errors.logits.kl[48:].mean() > 1e-4


def test_a_layer_that_bypasses_the_attention_interface_is_refused_by_number() -> None:
    class Bypass(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    model = calm_model("llama")
    model.model.layers[1].self_attn = Bypass()
    with pytest.raises(UnsupportedModelError, match="layer 1 of LlamaForCausalLM did not call"):
        record_exact(model, random_tokens(20))
    exact = record_exact(model, random_tokens(20), covered=[0])
    assert set(exact.attention) == {0}
