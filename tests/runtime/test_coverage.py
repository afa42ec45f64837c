import pytest
from tiny_models import tiny_config
from transformers import DeepseekV3Config, LlamaConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.runtime.coverage import attention_head_dim, covered_layers


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_full_attention_layers_are_covered(family: str) -> None:
    assert covered_layers(tiny_config(family, num_hidden_layers=3)) == (0, 1, 2)


def test_layers_with_a_sliding_window_are_covered_on_request_only() -> None:
    mixed = tiny_config(
        "qwen3",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=64,
    )
    assert covered_layers(mixed) == (1,)
    assert covered_layers(mixed, cover_sliding=True) == (0, 1, 2)
    assert covered_layers(tiny_config("mistral-sliding")) == ()


def test_a_cache_of_latents_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="deepseek_v3 caches a latent"):
        covered_layers(DeepseekV3Config(num_hidden_layers=2))


def test_a_layer_that_reads_another_layers_cache_is_refused_by_number() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    config.kv_sharing_modes = ["own", "reuse"]
    with pytest.raises(UnsupportedModelError, match="layer 1 of llama"):
        covered_layers(config)


def test_head_dim_is_the_configured_one_even_where_heads_do_not_fill_the_hidden_size() -> None:
    assert attention_head_dim(tiny_config("qwen3", head_dim=64)) == 64
    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    config.head_dim = None
    assert attention_head_dim(config) == 64
