from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from torch import Tensor
from transformers import (
    BloomConfig,
    DogeConfig,
    Gemma2Config,
    GptOssConfig,
    HrmTextConfig,
    InklingTextConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation import rehearsal
from kvarn_cli.evaluation.rehearsal import rehearse
from kvarn_cli.runtime.cache import KVarNCache


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass(family: str) -> None:
    random_state = torch.get_rng_state()
    rehearse(tiny_config(family))
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("config", [Gemma2Config(), GptOssConfig()], ids=["softcap", "sinks"])
def test_caps_and_sinks_are_reproduced(config: PreTrainedConfig) -> None:
    rehearse(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (BloomConfig(), "BloomForCausalLM does not use transformers' attention interface"),
        (DogeConfig(), "what DogeForCausalLM computes with a packed cache is not what"),
        (HrmTextConfig(), "layer 0 of HrmTextForCausalLM attends several times"),
        (InklingTextConfig(), "InklingAttention uses position_bias"),
    ],
    ids=["own attention", "mask made from V", "layers that run again", "bias of positions"],
)
def test_attention_that_cannot_be_reproduced_is_refused_at_any_size(
    config: PreTrainedConfig, named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        rehearse(config)


def test_a_cache_that_gives_back_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(KVarNCache):
        def update(self, keys: Tensor, values: Tensor, layer: int, **options: Any) -> Any:
            keys, values = super().update(keys, values, layer, **options)
            values[:, :, 32:40] = 0
            return keys, values

    monkeypatch.setattr(rehearsal, "KVarNCache", Forgetful)
    with pytest.raises(UnsupportedModelError, match="is not what a pseudo-decode computes"):
        rehearse(tiny_config("llama"))


@pytest.mark.parametrize("odd", [{"hidden_act": "none"}, {"rope_parameters": {"rope_type": "x"}}])
def test_a_class_without_a_small_instance_is_left_to_the_measurement(odd: dict[str, str]) -> None:
    rehearse(LlamaConfig(**odd))
