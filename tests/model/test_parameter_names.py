import pytest
from tiny_models import tiny_config, tiny_model

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.layout import find_layout
from kvarn_cli.model.parameter_names import parameter_names


def names_of(config, shapes):
    return parameter_names(config, find_layout(config, shapes), trust_remote_code=False)


def shapes_of(config, rename=lambda name: name):
    tensors = tiny_model(config).state_dict()
    return {rename(name): tuple(tensor.shape) for name, tensor in tensors.items()}


def test_each_tensor_is_loaded_under_its_own_name(family):
    config = tiny_config(family)
    names = names_of(config, shapes_of(config))
    assert len(names) == (6 if family == "qwen2" else 4)
    assert all(tensor == parameter for tensor, parameter in names.items())


def test_transformers_adds_the_prefix_of_a_base_model(family):
    config = tiny_config(family)
    names = names_of(config, shapes_of(config, lambda name: name.removeprefix("model.")))
    assert names["layers.1.self_attn.o_proj.weight"] == "model.layers.1.self_attn.o_proj.weight"
    assert all(parameter == f"model.{tensor}" for tensor, parameter in names.items())


@pytest.mark.parametrize("prefix", ["language_model.", "model.model.", "transformer."])
def test_names_that_the_class_would_not_load_are_refused(prefix):
    config = tiny_config("llama")
    shapes = shapes_of(config, lambda name: prefix + name)
    with pytest.raises(UnsupportedModelError, match=f"would not load {prefix}model.layers.0") as no:
        names_of(config, shapes)
    assert "called like model.layers.0.self_attn.v_proj.weight" in str(no.value)


def test_a_bias_that_the_class_does_not_have_is_refused():
    shapes = shapes_of(tiny_config("llama", attention_bias=True))
    with pytest.raises(UnsupportedModelError, match=r"would not load .*v_proj\.bias"):
        names_of(tiny_config("llama"), shapes)


def test_a_bias_that_the_checkpoint_lacks_is_refused():
    shapes = shapes_of(tiny_config("llama"))
    with pytest.raises(UnsupportedModelError, match=r"loads .*0.*v_proj\.bias, which the check"):
        names_of(tiny_config("llama", attention_bias=True), shapes)


def test_a_large_model_takes_no_memory():
    config = tiny_config("llama", hidden_size=2**20, num_attention_heads=2**13, head_dim=128)
    small = tiny_config("llama")
    layout = find_layout(small, shapes_of(small))
    assert len(parameter_names(config, layout, trust_remote_code=False)) == 4
