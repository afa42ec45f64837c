import pytest
from fused_models import layout_of
from tiny_models import tiny_config, tiny_model
from torch import nn
from transformers import BloomConfig, GPT2Config, GPTNeoXConfig, Phi3Config

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import TracedLayer, build_without_weights, trace_cache
from kvarn_cli.model.layout import HeadSlices, ModelLayout
from kvarn_cli.model.projections import ARRANGEMENTS, find_layout, has_joined_projections

WIDTH = 32
SMALL = {"num_hidden_layers": 1, "hidden_size": 4 * WIDTH, "num_attention_heads": 4}


def test_finds_every_layer_of_every_family(family, model):
    layout = layout_of(model)
    assert [layer.index for layer in layout.layers] == [0, 1]
    assert [layer.module for layer in layout.layers] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    for layer in layout.layers:
        assert set(model.state_dict()).issuperset(layer.tensors)
        assert len(layer.value) == (2 if family == "qwen2" else 1)
        assert (layer.num_heads, layer.num_kv_heads) == (4, 2)


def test_output_bias_is_not_among_the_fused_tensors():
    layer = layout_of(tiny_model(tiny_config("llama", attention_bias=True))).layers[0]
    assert layer.tensors == (
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
    )


def slices(config, arrangement):
    layout = layout_of(build_without_weights(config), arrangement)
    return {heads.tensor: heads for heads in layout.layers[0].slices}


def test_values_come_last_in_phi3():
    found = slices(
        Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=0, vocab_size=64), "values last"
    )
    assert found["model.layers.0.self_attn.qkv_proj.weight"] == HeadSlices(
        "model.layers.0.self_attn.qkv_proj.weight", 0, (6 * WIDTH, 7 * WIDTH), WIDTH
    )


@pytest.mark.parametrize("config", [GPTNeoXConfig(**SMALL), BloomConfig(n_head=4, hidden_size=128)])
def test_each_head_has_its_own_query_key_and_value_in_gpt_neox_and_bloom(config):
    found = slices(config, "by KV head")
    joined = [heads for name, heads in found.items() if "query_key_value" in name]
    assert len(joined) == 2
    for heads in joined:
        assert heads.starts == (2 * WIDTH, 5 * WIDTH, 8 * WIDTH, 11 * WIDTH)


def test_gpt2_stores_its_weights_transposed():
    found = slices(GPT2Config(n_layer=1, n_head=4, n_embd=128), "values last")
    axes = {name.partition("attn.")[2]: heads.axis for name, heads in found.items()}
    assert axes == {"c_attn.weight": 1, "c_attn.bias": 0, "c_proj.weight": 0}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (8, 2), (4, 1)])
def test_every_arrangement_gives_each_head_its_own_channels(arrangement, num_heads, num_kv_heads):
    starts = list(ARRANGEMENTS[arrangement](num_heads, num_kv_heads, WIDTH))
    if arrangement == "in quarters" and num_heads != num_kv_heads:
        assert starts == []
        return
    assert len(set(starts)) == num_kv_heads
    assert all(start % WIDTH == 0 for start in starts)
    assert max(starts) < (num_heads + 2 * num_kv_heads) * WIDTH


def test_joined_projections_are_told_from_separate_ones():
    for config, joined in ((GPT2Config(n_layer=1), True), (tiny_config("llama"), False)):
        model = build_without_weights(config)
        assert has_joined_projections(model, trace_cache(model)) is joined


def test_modules_of_another_width_are_left_out(model):
    traced = {
        0: TracedLayer("model.layers.0.self_attn", 2, 32, 32),
        1: TracedLayer("model.layers.1.self_attn", 2, 64, 64),
    }
    layout = find_layout(model, traced, 32, "values last")
    assert [layer.index for layer in layout.layers] == [0]


def test_a_module_that_runs_for_several_layers_counts_once(model):
    path = "model.layers.1.self_attn"
    traced = {index: TracedLayer(path, 2, 32, 32) for index in (3, 7)}
    (layer,) = find_layout(model, traced, 32, "values last").layers
    assert (layer.index, layer.module) == (3, path)


def test_a_reader_is_listed_with_its_givers_v(model):
    traced = {0: TracedLayer("model.layers.0.self_attn", 2, 32, 32, ("model.layers.1.self_attn",))}
    giver, reader = find_layout(model, traced, 32, "values last").layers
    assert (reader.index, reader.module) == (0, "model.layers.1.self_attn")
    assert reader.value == giver.value
    assert reader.output.tensor == "model.layers.1.self_attn.o_proj.weight"
    names = ModelLayout(32, (giver, reader)).tensors
    assert len(names) == len(set(names)) == len(giver.tensors) + 1


def change(model, name, module):
    setattr(model.model.layers[1].self_attn, name, module)
    return model


@pytest.mark.parametrize(
    ("name", "module", "named"),
    [
        ("v_proj", None, r"layers\.1\.self_attn \(LlamaAttention\) has no projection to V"),
        ("o_proj", None, r"layers\.1\.self_attn \(LlamaAttention\) has no output projection"),
        ("v_proj", nn.Embedding(64, 128), "has no projection to V"),
        ("v_proj", nn.Linear(128, 128), "make 128 channels and read 128, which does not fit the 2"),
        ("v_proj", nn.Linear(128, 70), "make 70 channels"),
        ("o_proj", nn.Linear(96, 128), "make 64 channels and read 96"),
        ("o_proj", nn.Linear(130, 128), "read 130"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, module, named):
    llama = tiny_model(tiny_config("llama"))
    traced = trace_cache(llama)
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        find_layout(change(llama, name, module), traced, 32, "values last")
    assert "--rotation online" in caught.value.hint


def test_a_thin_wrapper_and_a_projection_beside_attention_are_found():
    llama = tiny_model(tiny_config("llama"))
    traced = trace_cache(llama)
    layer = llama.model.layers[1]
    wrapped = nn.Module()
    wrapped.linear = nn.Linear(128, 64, bias=False)
    layer.self_attn.v_proj = wrapped
    layer.output = nn.Module()
    layer.output.dense = layer.self_attn.o_proj
    layer.self_attn.o_proj = None
    found = find_layout(llama, traced, 32, "values last").layers[1]
    assert found.tensors == (
        "model.layers.1.self_attn.v_proj.linear.weight",
        "model.layers.1.output.dense.weight",
    )
