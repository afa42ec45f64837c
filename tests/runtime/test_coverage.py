import pytest
from tiny_models import tiny_config
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    Gemma3nTextConfig,
    GPT2Config,
    KimiLinearConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.runtime.coverage import (
    architecture_of,
    attention_head_dim,
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
    hybrid = FalconH1Config(num_hidden_layers=1)
    assert covered_layers(hybrid) == ()
    assert "LinearAttentionAndFullAttentionLayer" in left_out_layers(hybrid)[0]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2), "num_kv_shared_layers"),
        (PreTrainedConfig(num_hidden_layers=2, attention_k_eq_v=True), "attention_k_eq_v"),
        (PreTrainedConfig(num_hidden_layers=2, global_head_dim=512), "global_head_dim"),
        (PreTrainedConfig(num_hidden_layers=2, kv_sharing_modes=["own", "reuse"]), "kv_sharing"),
        (PreTrainedConfig(), "num_hidden_layers None"),
        (LlamaConfig(decoder=3), "nests something that is no model's configuration"),
        (LlamaConfig(text_config=3), "nests something"),
        (LlamaConfig(sliding_window="wide"), "makes no cache for llama: .*'str'"),
        (
            PreTrainedConfig(num_hidden_layers=1, layer_types=["minimax_m3_sparse"]),
            "layers of type 'minimax_m3_sparse'",
        ),
        (
            LlamaConfig(num_hidden_layers=2, per_layer_config={1: {"num_key_value_heads": 4}}),
            "is_heterogeneous",
        ),
    ],
)
def test_other_caches_are_refused_by_name(config: PreTrainedConfig, named: str) -> None:
    for ask in (covered_layers, left_out_layers):
        with pytest.raises(UnsupportedModelError, match=named):
            ask(config)


def test_head_dim_is_the_configured_one_even_where_heads_do_not_fill_the_hidden_size() -> None:
    assert attention_head_dim(tiny_config("qwen3", head_dim=64)) == 64
    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    config.head_dim = None
    assert attention_head_dim(config) == 64
    assert attention_head_dim(GPT2Config()) == 64


def test_of_a_model_with_mla_the_latent_counts() -> None:
    config = DeepseekV3Config(num_hidden_layers=2)
    assert covered_layers(config) == (0, 1)
    assert attention_head_dim(config) == 512
    assert rope_key_dim(config) == 64
    assert rope_key_dim(LlamaConfig()) is None
    sparse = DeepseekV32Config(num_hidden_layers=3)
    assert covered_layers(sparse) == (0, 1, 2)
    assert left_out_layers(sparse) == {}
    layers = ["linear_attention", "full_attention"]
    hybrid = KimiLinearConfig(num_hidden_layers=2, layer_types=layers)
    assert covered_layers(hybrid) == (1,)
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank is 384"):
        attention_head_dim(DeepseekV3Config(kv_lora_rank=384))


@pytest.mark.parametrize(
    ("head_dim", "nearest"), [(80, "64"), (96, "64 or 128"), (112, "128"), (120, "128")]
)
def test_widths_that_no_cache_takes_are_refused(head_dim: int, nearest: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"head_dim is {head_dim}") as caught:
        attention_head_dim(PreTrainedConfig(head_dim=head_dim))
    assert f"head_dim {nearest};" in caught.value.hint
    assert "--rotation online does not help" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": [64]}, r"head_dim is \[64\]"),
        ({"hidden_size": 250}, "hidden_size 250"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"hidden_size": "wide"}, "hidden_size 'wide'"),
    ],
)
def test_a_width_that_cannot_be_read_is_refused(change: dict[str, object], named: str) -> None:
    values = {"hidden_size": 256, "num_attention_heads": 4} | change
    with pytest.raises(UnsupportedModelError, match=named):
        attention_head_dim(PreTrainedConfig(**values))


@pytest.mark.parametrize("odd", ["LlamaForCausalLM", 5, [], [5], {"a": 1}, None])
def test_an_odd_list_of_architectures_gives_way_to_the_models_type(odd: object) -> None:
    assert architecture_of(LlamaConfig(architectures=odd)) == "llama"
    assert architecture_of(LlamaConfig(architectures=["X", odd])) == "X"
