import pytest
from tiny_models import tiny_config
from transformers import PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_layout import find_cache_layout


def plain_config(**changes):
    """A configuration of no particular class, which checks nothing itself."""
    values = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
    }
    return PreTrainedConfig(**(values | changes))


def test_reads_heads_and_width():
    layout = find_cache_layout(plain_config())
    assert (layout.num_layers, layout.num_heads, layout.num_kv_heads) == (2, 4, 2)
    assert layout.head_dim == 64
    assert layout.covered == (0, 1)
    assert layout.left_out == ()


def test_without_kv_heads_each_query_head_has_its_own():
    assert find_cache_layout(plain_config(num_key_value_heads=None)).num_kv_heads == 4


def test_sliding_layers_are_left_out_with_the_reason():
    config = tiny_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    layout = find_cache_layout(config)
    assert layout.covered == (0,)
    assert [layer.index for layer in layout.left_out] == [1]
    assert "attention through a window" in layout.left_out[0].reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_config": {"hidden_size": 64}}, "text_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_attention_heads": [4, 2]}, "num_attention_heads"),
        ({"num_attention_heads": None}, "num_attention_heads None"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads True"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"head_dim": 80}, "head_dim is 80"),
    ],
)
def test_refuses_other_caches_by_name(change, named):
    with pytest.raises(UnsupportedModelError, match=named):
        find_cache_layout(plain_config(**change))
