"""The proof on attention modules alone, for classes of which no small instance can be made."""

from dataclasses import replace

import pytest
import torch
from made_up_models import made_up
from tiny_models import build_tiny_checkpoint, tiny_config
from transformers import GPT2Config, GPTNeoXConfig, Phi3Config, StableLmConfig

from kvarn_cli.conversion import fusing
from kvarn_cli.conversion.plan import plan_conversion
from kvarn_cli.conversion.run import run_conversion
from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import build_without_weights, trace_cache
from kvarn_cli.model.comparison import FLOAT64_TOLERANCE, SMALLEST_CONTROL
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.projections import find_layout
from kvarn_cli.model.proof import prove_attention, prove_fusion
from kvarn_cli.model.shrunken import NoInstanceError
from kvarn_cli.settings import KVarNSettings

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}


def prove(config, head_dim=32, **options):
    model = build_without_weights(config)
    return prove_attention(model, trace_cache(model), head_dim, **options)


@pytest.mark.parametrize(
    ("config", "arrangement"),
    [
        (tiny_config("llama"), "values last"),
        (tiny_config("qwen2"), "values last"),
        (tiny_config("qwen3"), "values last"),
        (Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=0), "values last"),
        (GPT2Config(n_layer=2, n_embd=128, n_head=4), "values last"),
        (GPTNeoXConfig(**SMALL), "by KV head"),
    ],
)
def test_proves_what_the_whole_model_proves(config, arrangement):
    proof = prove(config)
    assert (proof.checked, proof.arrangement) == ("attention modules", arrangement)
    assert proof.tolerance == FLOAT64_TOLERANCE
    assert proof.largest_difference < 1e-13
    assert proof.smallest_control > SMALLEST_CONTROL


@pytest.mark.parametrize("between", ["gate", "activation", "function", "clamp"])
def test_refuses_what_stands_between_attention_and_output(between):
    with pytest.raises(UnsupportedModelError, match="would change what MadeUpAttention computes"):
        prove(made_up(between))


def test_catches_a_forgotten_bias():
    def without_bias(layout, read):
        return {n: turn for n, turn in tensor_rotations(layout).items() if "bias" not in n}

    with pytest.raises(UnsupportedModelError, match="would change what Qwen2Attention computes"):
        prove(tiny_config("qwen2"), rotations=without_bias)


def test_is_void_when_a_tensor_does_not_matter():
    def idle(layout, read):
        return dict.fromkeys(tensor_rotations(layout), torch.clone)

    with pytest.raises(UnsupportedModelError, match="the proof is void"):
        prove(tiny_config("llama"), rotations=idle)


def test_convert_falls_back_to_it_and_says_so(tmp_path, monkeypatch):
    def unshrinkable(*_, **__):
        raise NoInstanceError("no small instance")

    monkeypatch.setattr(fusing, "prove_fusion", unshrinkable)
    source = build_tiny_checkpoint(tmp_path / "source", "qwen2")
    settings = KVarNSettings.from_name("k4v2_g32")
    plan = plan_conversion(
        str(source), settings=settings, rotation="fused", output=tmp_path / "out"
    )
    assert plan.proof is not None
    assert plan.proof.checked == "attention modules"
    proof = run_conversion(plan).metadata.proof
    assert proof is not None
    assert proof.checked == "attention modules"


def test_attention_of_another_kind_than_the_proven_is_refused():
    model = build_without_weights(tiny_config("llama", attention_bias=True))
    layout = find_layout(model, trace_cache(model), 32, "values last")
    proof = prove_fusion(tiny_config("llama", attention_bias=True), 32)
    proof.check_kinds(model, layout)
    plain = replace(proof, attention_kinds=prove_fusion(tiny_config("llama"), 32).attention_kinds)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.self_attn has other parts"):
        plain.check_kinds(model, layout)


def test_norms_of_single_heads_are_of_one_kind_whatever_their_number():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256}
    config = StableLmConfig(**SMALL | heads, qk_layernorm=True)
    model = build_without_weights(config)
    layout = find_layout(model, trace_cache(model), 32, "values last")
    prove_fusion(config, 32).check_kinds(model, layout)
