import pytest
from tiny_models import tiny_config
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    KimiLinearConfig,
    LlamaConfig,
    MistralConfig,
    MllamaTextConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.runtime.coverage import (
    architecture_of,
    check_widths,
    covered_layers,
    left_out_layers,
    rope_key_dim,
)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_full_attention_layers_are_covered(family: str) -> None:
    config = tiny_config(family, num_hidden_layers=3)
    assert covered_layers(config) == (0, 1, 2)
    assert left_out_layers(config) == {}


def test_layers_with_a_sliding_window_are_covered_on_request_only() -> None:
    mixed = tiny_config(
        "qwen3",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=64,
    )
    assert covered_layers(mixed) == (1,)
    assert left_out_layers(mixed).keys() == {0, 2}
    assert covered_layers(mixed, cover_sliding=True) == (0, 1, 2)


def test_a_window_is_one_although_another_familys_switch_says_no() -> None:
    """Mistral's model code slides whatever `use_sliding_window` says, Qwen2's does not."""
    for config in (
        MistralConfig(num_hidden_layers=2),
        tiny_config("mistral-sliding"),
        tiny_config("mistral-sliding", use_sliding_window=False),
    ):
        assert covered_layers(config) == ()
        assert "window" in left_out_layers(config)[1]
    unused = tiny_config("qwen2", use_sliding_window=False, sliding_window=64)
    assert covered_layers(unused) == (0, 1)


def test_recurrent_layers_have_their_own_reason() -> None:
    linear = Qwen3NextConfig(num_hidden_layers=4)
    assert covered_layers(linear) == (3,)
    assert "fixed size" in left_out_layers(linear)[0]


def test_attention_with_a_state_beside_it_is_covered() -> None:
    hybrid = FalconH1Config(num_hidden_layers=2)
    assert covered_layers(hybrid) == (0, 1)
    assert left_out_layers(hybrid) == {}


def test_layers_that_read_the_cache_of_another_layer_are_left_out() -> None:
    kinds = ["sliding_attention", "full_attention"]
    for config in (
        Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=2 * kinds),
        Gemma4TextConfig(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=2 * kinds),
    ):
        assert covered_layers(config) == (1,)
        assert "no KV cache of its own" in left_out_layers(config)[3]
        assert covered_layers(config, cover_sliding=True) == (0, 1)


def test_layers_that_attend_to_an_image_are_left_out() -> None:
    config = MllamaTextConfig(num_hidden_layers=5, cross_attention_layers=[3])
    assert covered_layers(config) == (0, 1, 2, 4)
    assert "attends to an image" in left_out_layers(config)[3]


def test_layers_may_differ_in_width_and_heads() -> None:
    wide = Gemma4TextConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert covered_layers(wide) == (0, 1)
    few = LlamaConfig(num_hidden_layers=2, per_layer_config={1: {"num_key_value_heads": 4}})
    assert covered_layers(few) == (0, 1)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (PreTrainedConfig(), "num_hidden_layers None"),
        (LlamaConfig(decoder=3), "nests something that is no model's configuration"),
        (LlamaConfig(text_config=3), "nests something"),
        (LlamaConfig(sliding_window="wide"), "makes no cache for llama: .*'str'"),
        (
            PreTrainedConfig(num_hidden_layers=1, layer_types=["minimax_m3_sparse"]),
            "layers of type 'minimax_m3_sparse'",
        ),
    ],
)
def test_other_caches_are_refused_by_name(config: PreTrainedConfig, named: str) -> None:
    for ask in (covered_layers, left_out_layers):
        with pytest.raises(UnsupportedModelError, match=named):
            ask(config)


def test_of_a_model_with_mla_the_latent_counts() -> None:
    config = DeepseekV3Config(num_hidden_layers=2)
    assert covered_layers(config) == (0, 1)
    assert rope_key_dim(config) == 64
    assert rope_key_dim(LlamaConfig()) is None
    sparse = DeepseekV32Config(num_hidden_layers=3)
    assert covered_layers(sparse) == (0, 1, 2)
    assert left_out_layers(sparse) == {}
    layers = ["linear_attention", "full_attention"]
    hybrid = KimiLinearConfig(num_hidden_layers=2, layer_types=layers)
    assert covered_layers(hybrid) == (1,)


@pytest.mark.parametrize(
    ("head_dim", "nearest"), [(80, "64"), (96, "64 or 128"), (112, "128"), (120, "128")]
)
def test_widths_that_no_cache_takes_are_refused(head_dim: int, nearest: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"head_dim is {head_dim} in layer 7 of X"
    ) as caught:
        check_widths("X", 7, head_dim, head_dim)
    assert f"a model with head_dim {nearest};" in caught.value.hint
    assert "--rotation online does not help" in caught.value.hint


def test_keys_and_values_have_one_width_unless_they_are_a_latent_and_its_rope_key() -> None:
    check_widths("X", 0, 128, 128)
    check_widths("X", 0, 512, 64, latent=True)
    with pytest.raises(UnsupportedModelError, match="layer 3 of X caches keys 192 and values 128"):
        check_widths("X", 3, 192, 128)
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank is 384 in layer 0"):
        check_widths("X", 0, 384, 64, latent=True)


@pytest.mark.parametrize("odd", ["LlamaForCausalLM", 5, [], [5], {"a": 1}, None])
def test_an_odd_list_of_architectures_gives_way_to_the_models_type(odd: object) -> None:
    assert architecture_of(LlamaConfig(architectures=odd)) == "llama"
    assert architecture_of(LlamaConfig(architectures=["X", odd])) == "X"
