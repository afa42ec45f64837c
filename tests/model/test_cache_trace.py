import pytest
import torch
from architectures import tiny_architecture
from tiny_models import tiny_config, tiny_model
from transformers import (
    FalconConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MptConfig,
    PreTrainedConfig,
    T5Config,
    XLNetConfig,
)

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import TracedLayer, build_without_weights, trace_cache


def test_each_layer_tells_its_module_heads_and_widths(family):
    model = build_without_weights(tiny_config(family))
    assert model.device.type == "meta"
    assert trace_cache(model) == {
        index: TracedLayer(f"model.layers.{index}.self_attn", 2, 32, 32) for index in (0, 1)
    }


def test_a_large_model_takes_no_memory():
    config = LlamaConfig(
        hidden_size=2**14, num_attention_heads=128, num_key_value_heads=8, num_hidden_layers=60
    )
    traced = trace_cache(build_without_weights(config))
    assert len(traced) == 60
    assert traced[59] == TracedLayer("model.layers.59.self_attn", 8, 128, 128)


def test_a_class_may_cache_more_heads_than_its_weights_make():
    config = FalconConfig(
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_size=128,
        new_decoder_architecture=True,
        num_kv_heads=2,
    )
    assert trace_cache(build_without_weights(config))[0].num_kv_heads == 4


SHARED = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        (Gemma3nTextConfig(**SHARED, intermediate_size=64, laurel_rank=8), (32, 32)),
        (Gemma4TextConfig(**SHARED, intermediate_size=64, global_head_dim=64), (32, 64)),
    ],
)
def test_modules_that_read_the_cache_of_another_are_seen(config, widths):
    """The third layer has a window as the first, the fourth none as the second."""
    assert trace_cache(build_without_weights(config)) == {
        index: TracedLayer(
            module=f"model.layers.{index}.self_attn",
            num_kv_heads=2,
            key_width=width,
            value_width=width,
            readers=(f"model.layers.{index + 2}.self_attn",),
        )
        for index, width in enumerate(widths)
    }


def test_asking_a_cache_for_its_length_is_no_reading():
    """MPT's attention asks the first layer for it."""
    config = MptConfig(vocab_size=64, d_model=128, n_heads=4, n_layers=3)
    traced = trace_cache(build_without_weights(config))
    assert [layer.readers for layer in traced.values()] == [(), (), ()]


def test_what_has_no_cache_of_keys_and_values_is_empty():
    config = Mamba2Config(
        hidden_size=64,
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=16,
        num_hidden_layers=1,
    )
    assert trace_cache(build_without_weights(config)) == {}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (tiny_config("llama", hidden_act="no such activation"), "LlamaConfig can be built"),
        (T5Config(), "T5Config can be built"),
        (PreTrainedConfig(), "PreTrainedConfig can be built"),
        (XLNetConfig(n_layer=1), "does not run on a few tokens"),
    ],
)
def test_what_does_not_run_is_refused_by_name(config, named):
    with pytest.raises(UnsupportedModelError, match=named):
        trace_cache(build_without_weights(config))


def test_leaves_weights_hooks_and_random_state_alone(capfd):
    model = tiny_model(tiny_config("llama"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert trace_cache(model).keys() == {0, 1}
    build_without_weights(tiny_config("llama"))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("model_type", ["dbrx", "megatron-bert"])
def test_code_that_asks_for_data_is_traced_all_the_same(model_type):
    """DBRX loops over the experts that were chosen, Megatron-BERT asks whether a mask is full."""
    traced = trace_cache(build_without_weights(tiny_architecture(model_type)))
    assert set(traced) == {0, 1}
