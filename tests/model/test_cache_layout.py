import pytest
from tiny_models import tiny_config
from transformers import PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_layout import find_cache_layout
from kvarn_cli.model.cache_trace import TracedLayer


def traced(*layers):
    """KV heads, key width and value width of each layer."""
    return {
        index: TracedLayer(f"model.layers.{index}.self_attn", *layer)
        for index, layer in enumerate(layers)
    }


PLAIN = PreTrainedConfig(num_hidden_layers=2)


def test_heads_and_width_are_what_was_seen():
    layout = find_cache_layout(PLAIN, traced((2, 64, 64), (4, 64, 64)))
    assert layout.head_dim == 64
    assert layout.kv_heads == {0: 2, 1: 4}
    assert layout.total_kv_heads == 6
    assert layout.covered == (0, 1)
    assert layout.left_out == ()


def test_sliding_layers_are_left_out_with_the_reason():
    config = tiny_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    layout = find_cache_layout(config, traced((2, 32, 32), (2, 16, 16)))
    assert layout.covered == (0,)
    assert [layer.index for layer in layout.left_out] == [1]
    assert "attention through a window" in layout.left_out[0].reason


def test_a_layer_that_caches_nothing_is_left_out():
    layout = find_cache_layout(PLAIN, {1: TracedLayer("layers.1", 2, 64, 64)})
    assert layout.covered == (1,)
    assert [(layer.index, layer.reason) for layer in layout.left_out] == [(0, "it caches nothing")]


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([(2, 64, 64), (2, 128, 128)], "heads 64 wide in layer 0 and 128 wide in layer 1"),
        ([(2, 64, 64), (2, 64, 128)], "layer 1 of the model caches keys 64 and values 128 wide"),
        (
            [(2, 80, 80), (2, 80, 80)],
            "head_dim is 80 in layer 0 of the model; KVarN caches take 32, 64, 128, 256, 512",
        ),
        ([], "no layer whose cache grows with the sequence: it caches nothing"),
    ],
)
def test_refuses_other_caches_by_name(layers, named):
    with pytest.raises(UnsupportedModelError, match=named):
        find_cache_layout(PLAIN, traced(*layers))


@pytest.mark.parametrize(
    ("width", "nearest"), [(80, "64"), (96, "64 or 128"), (112, "128"), (120, "128")]
)
def test_names_the_nearest_widths(width, nearest):
    with pytest.raises(UnsupportedModelError) as caught:
        find_cache_layout(PLAIN, traced((2, width, width), (2, width, width)))
    assert f"nearest is a model with head_dim {nearest};" in caught.value.hint
    assert "--rotation online does not help" in caught.value.hint
