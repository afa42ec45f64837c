import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.rehearsal import rehearse


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass(family: str) -> None:
    random_state = torch.get_rng_state()
    rehearse(tiny_config(family))
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Gemma2Config(), "Gemma2Attention uses softcap"),
        (GptOssConfig(), "GptOssAttention uses s_aux"),
    ],
)
def test_attention_that_cannot_be_reproduced_is_refused_at_any_size(
    config: PreTrainedConfig, named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        rehearse(config)


@pytest.mark.parametrize("odd", [{"hidden_act": "none"}, {"rope_parameters": {"rope_type": "x"}}])
def test_a_class_without_a_small_instance_is_left_to_the_measurement(odd: dict[str, str]) -> None:
    rehearse(LlamaConfig(**odd))
