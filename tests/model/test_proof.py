"""The proof passes sound architectures and catches sabotage and made-up attention classes."""

import math

import pytest
import torch
from made_up_models import made_up
from tiny_models import tiny_config
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    OlmoConfig,
    Phi3Config,
    Phi3ForCausalLM,
)

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, SMALLEST_CONTROL
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.proof import prove_fusion
from kvarn_cli.quantization.hadamard import fused_rotation

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}


class ShuffledConfig(Phi3Config):
    model_type = "shuffled"


class ShuffledForCausalLM(Phi3ForCausalLM):
    """Divides qkv_proj as no known model does: channel after channel."""

    config_class = ShuffledConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.qkv_proj.register_forward_hook(
                lambda _, inputs, output: output.unflatten(-1, (-1, 3)).mT.flatten(-2)
            )


AutoModelForCausalLM.register(ShuffledConfig, ShuffledForCausalLM, exist_ok=True)


def test_proves_every_family(family):
    proof = prove_fusion(tiny_config(family), 32)
    assert proof.tolerance == FLOAT64_TOLERANCE
    assert proof.largest_difference < 1e-13
    assert proof.smallest_control > 10 * SMALLEST_CONTROL
    assert not proof.float32_upcast


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_proves_the_width_that_will_be_fused(head_dim):
    assert prove_fusion(tiny_config("qwen3", head_dim=head_dim), head_dim).head_dim == head_dim


def test_proves_tied_embeddings_and_mixed_layers():
    prove_fusion(tiny_config("llama", tie_word_embeddings=True, num_key_value_heads=4), 32)
    prove_fusion(
        tiny_config(
            "qwen2",
            num_hidden_layers=6,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=3,
        ),
        32,
    )


def without(part):
    def rotations(layout, _):
        full = tensor_rotations(layout)
        return {name: turn for name, turn in full.items() if not name.endswith(part)}

    return rotations


def value_takes_the_transpose(layout, _):
    wrong = tensor_rotations(layout, [fused_rotation(layout.head_dim).T])
    return tensor_rotations(layout) | {
        name: turn for name, turn in wrong.items() if "v_proj" in name
    }


def heads_interleaved(layout, _):
    """Takes column c of W_O for channel c // num_heads of head c % num_heads."""
    rotation = fused_rotation(layout.head_dim, dtype=torch.float64)

    def turn(weight):
        channels_first = weight.unflatten(1, (len(rotation), -1))
        return torch.einsum("kdh,de->keh", channels_first, rotation).flatten(1)

    return tensor_rotations(layout) | {layer.output.tensor: turn for layer in layout.layers}


@pytest.mark.parametrize(
    "sabotage",
    [
        without("v_proj.bias"),
        without("o_proj.weight"),
        without("layers.1.self_attn.v_proj.weight"),
        value_takes_the_transpose,
        heads_interleaved,
    ],
)
def test_catches_a_sabotaged_fusion(sabotage):
    with pytest.raises(UnsupportedModelError, match="would change what Qwen2ForCausalLM computes"):
        prove_fusion(tiny_config("qwen2"), 32, rotations=sabotage)


def test_is_void_when_a_tensor_does_not_matter():
    def idle(layout, _):
        return dict.fromkeys(tensor_rotations(layout), torch.clone)

    with pytest.raises(
        UnsupportedModelError, match=r"void: leaving .* unrotated moves the outputs"
    ):
        prove_fusion(tiny_config("llama"), 32, rotations=idle)


@pytest.mark.parametrize(
    ("between", "named"),
    [
        ("gate", "in MadeUpAttention stands between"),
        ("activation", "in MadeUpAttention stands between"),
        ("function", r"MadeUpAttention\.forward does more than attend"),
        ("clamp", r"MadeUpAttention\.forward does more than attend"),
    ],
)
def test_refuses_what_stands_between_attention_and_output(between, named):
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        prove_fusion(made_up(between), 32)
    assert "--rotation online" in caught.value.hint


def test_refuses_a_clamp_on_v():
    with pytest.raises(UnsupportedModelError, match="OlmoAttention"):
        prove_fusion(OlmoConfig(clip_qkv=30.0), 128)


def test_a_norm_without_weights_commutes():
    assert prove_fusion(made_up("norm"), 32).largest_difference < 1e-13


def test_rounding_to_float32_on_the_path_is_seen_and_tolerated():
    proof = prove_fusion(made_up("float32"), 32)
    assert proof.float32_upcast
    assert proof.tolerance == FLOAT32_TOLERANCE
    assert 1e-9 < proof.largest_difference < 1e-6


def test_refuses_what_cannot_be_built():
    broken = tiny_config("llama", hidden_act="no such activation")
    with pytest.raises(UnsupportedModelError, match="no model of LlamaConfig can be built"):
        prove_fusion(broken, 32)


@pytest.mark.parametrize("value", [math.nan, -1e9])
def test_logits_that_are_no_numbers_prove_nothing(value):
    with pytest.raises(UnsupportedModelError, match="computes NaN or infinity") as caught:
        prove_fusion(tiny_config("llama", rms_norm_eps=value), 32)
    assert "rms_norm_eps" in caught.value.hint


def test_leaves_random_state_config_and_output_alone(capfd):
    config = tiny_config("llama", eos_token_id=[2, 299])
    before = config.to_dict()
    random_state = torch.get_rng_state()
    prove_fusion(config, 32)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert config.to_dict() == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("config", "arrangement"),
    [
        (Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=0), "values last"),
        (GPT2Config(n_embd=128, n_head=4, n_layer=2), "values last"),
        (GPTNeoXConfig(**SMALL), "by KV head"),
        (CodeGenConfig(n_embd=128, n_head=4, n_layer=2, rotary_dim=16), "in quarters"),
    ],
)
def test_finds_how_a_joined_projection_is_divided(config, arrangement):
    proof = prove_fusion(config, 32)
    assert proof.arrangement == arrangement
    assert proof.largest_difference < 1e-13


@pytest.mark.parametrize("width", [32, 64])
def test_readers_of_another_layers_v_take_the_rotation_back(width):
    """Gemma 4: heads of the layers without a window are wider, and the last two share K and V."""
    config = Gemma4TextConfig(
        **SMALL | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=16,
        intermediate_size=64,
    )
    assert prove_fusion(config, width).largest_difference < 1e-12


def test_no_arrangement_of_a_made_up_one_passes():
    with pytest.raises(UnsupportedModelError, match="would change what ShuffledForCausalLM"):
        prove_fusion(ShuffledConfig(**SMALL, num_key_value_heads=4, pad_token_id=0), 32)


def test_is_repeatable():
    first, second = (prove_fusion(tiny_config("qwen3"), 32) for _ in range(2))
    assert first.largest_difference == second.largest_difference
    assert first.smallest_control == second.smallest_control
