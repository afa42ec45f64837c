import pytest
from tiny_models import tiny_config
from transformers import GPT2Config, MistralConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_layout import find_cache_layout

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}


def test_reads_heads_and_width():
    layout = find_cache_layout(CONFIG)
    assert (layout.num_layers, layout.num_heads, layout.num_kv_heads) == (2, 4, 2)
    assert layout.head_dim == 64
    assert layout.covered == (0, 1)
    assert layout.left_out == ()


def test_own_head_dim_wins():
    assert find_cache_layout(CONFIG | {"head_dim": 128}).head_dim == 128
    assert find_cache_layout(CONFIG | {"head_dim": None}).head_dim == 64


def test_without_kv_heads_each_query_head_has_its_own():
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert find_cache_layout(config).num_kv_heads == 4


@pytest.mark.parametrize(
    ("head_dim", "nearest"), [(80, "64"), (96, "64 or 128"), (112, "128"), (120, "128")]
)
def test_refuses_widths_that_no_cache_takes(head_dim, nearest):
    with pytest.raises(UnsupportedModelError, match=rf"head_dim is {head_dim}") as caught:
        find_cache_layout(CONFIG | {"head_dim": head_dim})
    assert f"head_dim {nearest};" in caught.value.hint
    assert "--rotation online does not help" in caught.value.hint


def test_sliding_layers_are_left_out_with_the_reason():
    config = tiny_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    layout = find_cache_layout(config.to_dict())
    assert layout.covered == (0,)
    assert [layer.index for layer in layout.left_out] == [1]
    assert "sliding-window" in layout.left_out[0].reason


def test_a_window_without_layer_types_covers_every_layer():
    assert find_cache_layout(CONFIG | {"sliding_window": 4096}).covered == ()
    unused = CONFIG | {"sliding_window": 4096, "use_sliding_window": False}
    assert find_cache_layout(unused).covered == (0, 1)
    assert find_cache_layout(MistralConfig(num_hidden_layers=3).to_dict()).covered == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"text_config": {"hidden_size": 64}}, "text_config"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"num_attention_heads": [4, 2]}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"hidden_size": 250}, "hidden_size 250"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1"),
        ({"layer_types": ["full_attention", "sparse"]}, "layer 1 is of type 'sparse'"),
    ],
)
def test_refuses_other_caches_by_name(change, named):
    with pytest.raises(UnsupportedModelError, match=named):
        find_cache_layout(CONFIG | change)


def test_refuses_configurations_with_other_names():
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers None"):
        find_cache_layout(GPT2Config().to_dict())
