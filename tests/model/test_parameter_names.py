import pytest
from fused_models import layout_of
from tiny_models import tiny_config, tiny_model
from transformers import GPT2Config

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import build_without_weights
from kvarn_cli.model.parameter_names import checkpoint_modules, checkpoint_names

V, O = "model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj"  # noqa: E741


def names_of(config, shapes):
    model = build_without_weights(config)
    return checkpoint_names(model, layout_of(model), shapes)


def shapes_of(config, rename=lambda name: name):
    tensors = tiny_model(config).state_dict()
    return {rename(name): tuple(tensor.shape) for name, tensor in tensors.items()}


def test_each_tensor_is_loaded_under_its_own_name(family):
    config = tiny_config(family)
    names = names_of(config, shapes_of(config))
    assert len(names) == (6 if family == "qwen2" else 4)
    assert all(tensor == parameter for parameter, tensor in names.items())


def test_transformers_adds_the_prefix_of_a_base_model(family):
    config = tiny_config(family)
    names = names_of(config, shapes_of(config, lambda name: name.removeprefix("model.")))
    assert names["model.layers.1.self_attn.o_proj.weight"] == "layers.1.self_attn.o_proj.weight"
    assert all(parameter == f"model.{tensor}" for parameter, tensor in names.items())


def test_transformers_adds_the_prefix_of_old_gpt2_checkpoints():
    config = GPT2Config(n_layer=1, n_head=4, n_embd=128, vocab_size=64)
    shapes = shapes_of(config, lambda name: name.removeprefix("transformer."))
    shapes |= {"h.0.attn.bias": (1, 1, 64, 64), "h.0.attn.masked_bias": ()}
    names = names_of(config, shapes)
    assert names["transformer.h.0.attn.c_attn.weight"] == "h.0.attn.c_attn.weight"


@pytest.mark.parametrize("prefix", ["language_model.", "model.model.", "transformer."])
def test_names_that_the_class_would_not_load_are_refused(prefix):
    config = tiny_config("llama")
    shapes = shapes_of(config, lambda name: prefix + name)
    with pytest.raises(UnsupportedModelError, match="no tensor that LlamaForCausalLM loads") as no:
        names_of(config, shapes)
    assert "model.layers.0.self_attn.v_proj.weight" in str(no.value)
    assert "--rotation online" in no.value.hint


def test_two_tensors_for_one_parameter_are_refused():
    config = tiny_config("llama")
    shapes = shapes_of(config)
    twice = shapes | {name.removeprefix("model."): shape for name, shape in shapes.items()}
    with pytest.raises(UnsupportedModelError, match=r"from both model\.layers\..* and layers\."):
        names_of(config, twice)


@pytest.mark.parametrize("part", [V, O])
def test_a_missing_tensor_is_refused_by_name(part):
    config = tiny_config("llama")
    shapes = shapes_of(config)
    del shapes[f"{part}.weight"]
    with pytest.raises(UnsupportedModelError, match=f"loads into {part}.weight as it is"):
        names_of(config, shapes)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [(f"{V}.weight", (128, 128)), (f"{V}.bias", (128,)), (f"{O}.weight", (128, 64))],
)
def test_a_shape_that_the_configuration_does_not_give_is_refused(tensor, shape):
    config = tiny_config("qwen2")
    with pytest.raises(UnsupportedModelError, match=f"{tensor} has shape"):
        names_of(config, shapes_of(config) | {tensor: shape})


def test_a_bias_that_the_class_does_not_have_is_refused():
    shapes = shapes_of(tiny_config("llama", attention_bias=True))
    with pytest.raises(UnsupportedModelError, match=r"_proj\.bias may act .* does not load it"):
        names_of(tiny_config("llama"), shapes)


def test_a_bias_that_the_checkpoint_lacks_is_refused():
    shapes = shapes_of(tiny_config("llama"))
    with pytest.raises(UnsupportedModelError, match=r"loads into .*0.*v_proj\.bias as it is"):
        names_of(tiny_config("llama", attention_bias=True), shapes)


@pytest.mark.parametrize(
    "part", ["gate.weight", "sinks", "attn_sub_norm.weight", "v_norm.weight", "v_proj.weight_scale"]
)
def test_unknown_tensors_in_attention_are_refused(part):
    config = tiny_config("llama")
    name = f"model.layers.1.self_attn.{part}"
    with pytest.raises(UnsupportedModelError, match=f"{name} may act between") as caught:
        names_of(config, shapes_of(config) | {name: (128,)})
    assert "--rotation online" in caught.value.hint


def test_what_the_class_says_it_leaves_is_no_obstacle():
    config = tiny_config("llama")
    model = build_without_weights(config)
    layout, shapes = layout_of(model), shapes_of(config)
    extra = shapes | {"model.layers.1.self_attn.k_norm.weight": (32,)}
    model._keys_to_ignore_on_load_unexpected = {r"layers.1.self_attn.k_norm"}
    assert checkpoint_names(model, layout, extra) == checkpoint_names(model, layout, shapes)


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.self_attn.v_proj.weight",
        "model.layers.2.self_attn.gate.weight",
        "mtp.layers.0.self_attn.v_proj.weight",
        "vision_tower.layers.0.self_attn.v_proj.weight",
    ],
)
def test_what_is_not_in_attention_of_the_models_layers_is_no_obstacle(extra):
    config = tiny_config("llama")
    shapes = shapes_of(config)
    assert names_of(config, shapes | {extra: (16,)}) == names_of(config, shapes)


def test_modules_are_spelled_as_in_the_checkpoint():
    config = tiny_config("llama")
    model = build_without_weights(config)
    tensors = [name.removeprefix("model.") for name in shapes_of(config)]
    paths = ["model.layers.0.self_attn", "model.layers.0.self_attn.o_proj", "model.nowhere"]
    assert checkpoint_modules(model, paths, tensors) == {
        "model.layers.0.self_attn": "layers.0.self_attn",
        "model.layers.0.self_attn.o_proj": "layers.0.self_attn.o_proj",
        "model.nowhere": "model.nowhere",
    }


def test_copies_of_a_shared_module_are_refused():
    config = tiny_config("llama")
    model = build_without_weights(config)
    first, second = (layer.self_attn for layer in model.model.layers)
    second.v_proj, second.o_proj = first.v_proj, first.o_proj
    copies = shapes_of(config)
    once = {name: copies[name] for name in copies if not name.startswith((V, O))}
    assert len(checkpoint_names(model, layout_of(model), once)) == 2
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\..* from both"):
        checkpoint_names(model, layout_of(model), copies)
