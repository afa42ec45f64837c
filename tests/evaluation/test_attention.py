from typing import Any

import pytest
import torch
from decoding import calm_model, exact_logits, random_tokens
from tiny_models import tiny_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import AttentionCall, attention_tap


def _plainly(call: AttentionCall) -> Tensor:
    return call.attend(0, call.key.shape[2], call.key, call.value)


def _tapped_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with attention_tap(model, _plainly):
        return exact_logits(model, tokens)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen2", "qwen3"])
def test_a_tap_that_attends_plainly_changes_nothing(family: str) -> None:
    model, tokens = calm_model(family), random_tokens(200)
    assert torch.equal(_tapped_logits(model, tokens), exact_logits(model, tokens))


def test_the_tap_sees_each_layer_once_with_its_mask() -> None:
    model = calm_model(
        "qwen3",
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=8,
    )
    calls: list[AttentionCall] = []

    def tap(call: AttentionCall) -> Tensor:
        calls.append(call)
        return _plainly(call)

    with attention_tap(model, tap):
        exact_logits(model, random_tokens(20))
    assert [call.layer for call in calls] == [0, 1]
    assert calls[0].mask is None
    assert calls[1].mask.sum(-1).flatten().tolist() == [*range(1, 8), *[8] * 13]


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_the_model_gets_its_attention_back_even_after_an_error(before: str) -> None:
    model = calm_model("llama")
    model.set_attn_implementation(before)
    _tapped_logits(model, random_tokens(5))
    assert model.config._attn_implementation == before
    with pytest.raises(ZeroDivisionError), attention_tap(model, lambda _: 1 / 0):
        exact_logits(model, random_tokens(5))
    assert model.config._attn_implementation == before


_SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 16,
}


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (Gemma2Config(**_SMALL, attn_logit_softcapping=1.0), "softcap"),
        (GptOssConfig(**_SMALL, num_local_experts=2, num_experts_per_tok=1), "s_aux"),
    ],
    ids=["capped scores", "attention sinks"],
)
def test_what_sdpa_leaves_out_is_computed_as_the_model_does(
    config: PreTrainedConfig, option: str
) -> None:
    model = tiny_model(config, dtype=torch.float64)
    model.set_experts_implementation("eager")
    tokens = random_tokens(50)
    seen: set[str] = set()

    def plainly_in_steps(call: AttentionCall) -> Tensor:
        seen.update(name for name, value in call.options.items() if value is not None)
        steps = [(0, 20), (20, 50)]
        return torch.cat(
            [
                call.attend(start, end, call.key[:, :, :end], call.value[:, :, :end])
                for start, end in steps
            ],
            dim=1,
        )

    with attention_tap(model, plainly_in_steps):
        tapped = exact_logits(model, tokens)
    assert option in seen
    torch.testing.assert_close(tapped, exact_logits(model, tokens), rtol=1e-4, atol=1e-5)


def test_attention_outside_the_interface_is_refused_by_name() -> None:
    config = BloomConfig(vocab_size=300, hidden_size=64, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM does not use transformers'"):
        _tapped_logits(model, random_tokens(10))
    assert model.config._attn_implementation == before


def test_attention_to_later_tokens_is_refused() -> None:
    model = calm_model("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="LlamaAttention attends to later tokens"):
        _tapped_logits(model, random_tokens(10))


def test_attention_to_a_cache_is_refused() -> None:
    model = calm_model("llama")
    past = model(random_tokens(10), use_cache=True).cache
    with (
        pytest.raises(UnsupportedModelError, match="attends to tokens other than its own"),
        attention_tap(model, _plainly),
    ):
        model(random_tokens(5), cache=past)
