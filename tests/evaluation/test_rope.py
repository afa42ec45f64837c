import math

import pytest
import torch
from decoding import calm_model, exact_logits, random_tokens
from tiny_models import randomize
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    GlmConfig,
    Llama4TextConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import AttentionCall, attention_tap
from kvarn_cli.evaluation.fitting import fit_methods
from kvarn_cli.evaluation.rope import Rope
from kvarn_cli.quantization.methods import Exact, parse_method

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    randomize(model)
    return model.eval()


def _yarn() -> PreTrainedModel:
    return calm_model("llama", torch.float64, rope_parameters=YARN)


def _partial() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return _model(PhiConfig(**SIZES, rope_parameters=rope))


def _pairs() -> PreTrainedModel:
    """GLM turns neighbouring channels, half of them."""
    return _model(GlmConfig(**SIZES, num_key_value_heads=1, head_dim=32))


def _wide_pairs() -> PreTrainedModel:
    """Cohere turns neighbouring channels, all of them."""
    return _model(CohereConfig(**SIZES, num_key_value_heads=1))


MODELS = [_yarn, _partial, _pairs, _wide_pairs]


@pytest.mark.parametrize("make", MODELS)
def test_undone_keys_are_those_of_the_projection(make) -> None:
    model, calls = make(), []

    def tap(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.attend(0, call.key.shape[2], call.key, call.value)

    projected = {}
    for layer, block in enumerate(model.model.layers):
        block.self_attn.k_proj.register_forward_hook(
            lambda _, __, output, layer=layer: projected.update({layer: output})
        )
    with attention_tap(model, tap):
        exact_logits(model, random_tokens(150))
    for call in calls:
        tokens = slice(40, 120)
        rope = Rope(call, tokens)
        undone = rope.undo(call.key[:, :, tokens])
        expected = projected[call.layer].unflatten(-1, (-1, undone.shape[-1])).transpose(1, 2)
        torch.testing.assert_close(undone, expected[:, :, tokens], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rope.redo(undone), call.key[:, :, tokens], rtol=1e-5, atol=1e-5)
        assert (undone - call.key[:, :, tokens]).abs().max() > 0.1


def test_cos_and_sin_of_yarn_are_scaled_and_those_of_partial_rotary_narrower() -> None:
    """So the models above are what they are there for."""
    calls = []

    def tap(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.attend(0, call.key.shape[2], call.key, call.value)

    for make in (_yarn, _partial):
        with attention_tap(model := make(), tap):
            exact_logits(model, random_tokens(10))
    for call, scale, rotary_dim in ((calls[0], 0.1 * math.log(4) + 1, 32), (calls[-1], 1, 16)):
        cos, sin = call.position_embeddings
        assert cos.shape[-1] == rotary_dim
        assert call.key.shape[-1] == 32
        torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, scale**2))


@pytest.mark.parametrize("make", MODELS)
def test_a_method_that_needs_it_is_fitted_to_every_layer(make) -> None:
    model, exact = make(), Exact()
    kept, fitted = fit_methods(model, random_tokens(200), [exact, parse_method("kvquant:k2v2_g32")])
    assert kept is exact
    assert set(fitted.fits) == {0, 1}
    keys = torch.randn(1, model.config.num_key_value_heads, 64, 32)
    assert fitted.for_layer(1).reconstruct(keys, keys)[0].shape == keys.shape


def test_a_layer_that_leaves_rope_out_is_refused_by_number() -> None:
    layers = ["sliding_attention", "full_attention"]
    model = _model(Cohere2Config(**SIZES, num_key_value_heads=1, layer_types=layers))
    with pytest.raises(UnsupportedModelError, match="layer 1 of Cohere2ForCausalLM does not apply"):
        fit_methods(model, random_tokens(50), [parse_method("kvquant:k2v2_g32")])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            OPTConfig(
                **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
                ffn_dim=96,
                word_embed_proj_dim=64,
            ),
            "its file has no apply_rotary_pos_emb",
        ),
        (
            Llama4TextConfig(
                **SIZES,
                intermediate_size_mlp=96,
                num_key_value_heads=1,
                head_dim=32,
                num_local_experts=2,
                layer_types=["full_attention"] * 2,
            ),
            "its file has no apply_rotary_pos_emb",
        ),
    ],
)
def test_a_model_without_rope_is_refused(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        fit_methods(_model(config), random_tokens(50), [parse_method("kvquant:k2v2_g32")])
