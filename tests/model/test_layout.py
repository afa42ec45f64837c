import pytest
from tiny_models import tiny_config

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_layout import find_cache_layout
from kvarn_cli.model.layout import check_dtypes, find_layout

CONFIG = tiny_config("qwen2")
WIDE, NARROW, HIDDEN = 128, 64, 128


def block(index: int, prefix: str = "model.") -> dict[str, tuple[int, ...]]:
    name = f"{prefix}layers.{index}.self_attn."
    return {
        f"{name}q_proj.weight": (WIDE, HIDDEN),
        f"{name}q_proj.bias": (WIDE,),
        f"{name}k_proj.weight": (NARROW, HIDDEN),
        f"{name}k_proj.bias": (NARROW,),
        f"{name}v_proj.weight": (NARROW, HIDDEN),
        f"{name}v_proj.bias": (NARROW,),
        f"{name}o_proj.weight": (HIDDEN, WIDE),
    }


TENSORS = block(0) | block(1) | {"model.norm.weight": (HIDDEN,)}


def test_finds_every_layer_of_every_family(family, model, layout_of):
    layout = layout_of(model)
    assert [layer.index for layer in layout.layers] == [0, 1]
    names = set(model.state_dict())
    for layer in layout.layers:
        assert names.issuperset(layer.tensors)
        assert (layer.value_bias is not None) == (family == "qwen2")
    assert [layer.index for layer in layout.left_out] == (
        [0, 1] if family == "mistral-sliding" else []
    )


def test_output_bias_is_not_among_the_fused_tensors():
    with_output_bias = TENSORS | {"model.layers.0.self_attn.o_proj.bias": (HIDDEN,)}
    layer = find_layout(CONFIG, with_output_bias).layers[0]
    assert layer.tensors == (
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
    )


@pytest.mark.parametrize("prefix", ["", "language_model.model."])
def test_the_prefix_may_vary(prefix):
    layout = find_layout(CONFIG, block(0, prefix) | block(1, prefix))
    assert layout.layers[1].output_weight == f"{prefix}layers.1.self_attn.o_proj.weight"


def test_layers_that_the_model_does_not_load_are_ignored():
    extra = block(2) | block(0, "mtp.")
    assert find_layout(CONFIG, TENSORS | extra) == find_layout(CONFIG, TENSORS)


def test_refuses_two_candidates_for_the_decoder():
    with pytest.raises(UnsupportedModelError, match=r"model\.layers and draft\.layers"):
        find_layout(CONFIG, TENSORS | block(0, "draft.") | block(1, "draft."))


@pytest.mark.parametrize("part", ["v_proj.weight", "o_proj.weight", "q_proj.weight"])
def test_refuses_a_missing_tensor_by_name(part):
    name = f"model.layers.1.self_attn.{part}"
    tensors = {key: shape for key, shape in TENSORS.items() if key != name}
    with pytest.raises(UnsupportedModelError, match=f"{name} is missing"):
        find_layout(CONFIG, tensors)


def test_refuses_a_missing_layer_by_name():
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.v_proj.* is missing"):
        find_layout(CONFIG, block(0))


@pytest.mark.parametrize(
    ("part", "shape"),
    [
        ("v_proj.weight", (WIDE, HIDDEN)),
        ("v_proj.bias", (WIDE,)),
        ("o_proj.weight", (WIDE, NARROW)),
        ("q_proj.weight", (2 * WIDE, HIDDEN)),  # an output gate hides in the second half
    ],
)
def test_refuses_an_unexpected_shape_by_name(part, shape):
    name = f"model.layers.0.self_attn.{part}"
    with pytest.raises(UnsupportedModelError, match=f"{name} has shape"):
        find_layout(CONFIG, TENSORS | {name: shape})


@pytest.mark.parametrize(
    "part", ["gate.weight", "sinks", "attn_sub_norm.weight", "v_norm.weight", "v_proj.weight_scale"]
)
def test_refuses_unknown_tensors_in_attention(part):
    name = f"model.layers.1.self_attn.{part}"
    with pytest.raises(UnsupportedModelError, match=name) as caught:
        find_layout(CONFIG, TENSORS | {name: (WIDE,)})
    assert "--rotation online" in caught.value.hint


def test_old_rope_buffers_are_no_obstacle():
    find_layout(CONFIG, TENSORS | {"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.qkv_proj.weight",
        "transformer.h.0.attention.query_key_value.weight",
        "transformer.h.0.attn.c_attn.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
    ],
)
def test_refuses_joined_projections_and_names_them(name):
    with pytest.raises(UnsupportedModelError, match=name):
        find_layout(CONFIG, {name: (3 * WIDE, HIDDEN)})


def test_refuses_foreign_names():
    with pytest.raises(UnsupportedModelError, match="no tensor is named"):
        find_layout(CONFIG, {"decoder.block.0.attention.v.weight": (NARROW, HIDDEN)})


@pytest.mark.parametrize(
    ("quantization", "named"), [({"quant_method": "awq"}, "awq"), ({"quant_algo": "FP8"}, "FP8")]
)
def test_refuses_quantized_weights_but_offers_online_rotation(quantization, named):
    config = tiny_config("qwen2", quantization_config=quantization)
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        find_layout(config, TENSORS)
    assert "--rotation online" in caught.value.hint
    assert find_cache_layout(config).covered == (0, 1)


def test_dtypes_must_be_plain_floats():
    layout = find_layout(CONFIG, TENSORS)
    dtypes = dict.fromkeys(TENSORS, "BF16")
    check_dtypes(layout, dtypes)
    dtypes["model.norm.weight"] = "F8_E4M3"
    check_dtypes(layout, dtypes)
    dtypes["model.layers.1.self_attn.v_proj.weight"] = "F8_E4M3"
    with pytest.raises(UnsupportedModelError, match=r"layers\.1.*v_proj.*F8_E4M3"):
        check_dtypes(layout, dtypes)
