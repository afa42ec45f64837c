"""The committed table of architectures, on a representative part; the script runs all of them."""

from pathlib import Path

import pytest
from architecture_outcomes import outcome_of
from architecture_table import read_rows
from architectures import MODEL_TYPES

REPRESENTATIVE = (
    "afmoe",  # a gate behind attention
    "bert",  # an encoder's names
    "bitnet",  # a norm behind attention
    "bloom",  # V inside query_key_value, attention of its own
    "cohere2",  # sliding and full layers
    "dbrx",  # V clamped
    "deepseek_v3",  # a latent cache
    "diffllama",  # V of two heads side by side
    "doge",  # a mask made from V
    "exaone4",  # norms of q and k, layers without RoPE
    "falcon",  # one KV head, interleaved
    "falcon_mamba",  # no KV cache at all
    "gemma2",  # capped scores
    "gemma3n_text",  # layers that read another layer's cache, a norm of V
    "gpt2",  # transposed weights
    "gpt_bigcode",  # one KV head beside all queries
    "gpt_oss",  # attention sinks and biases
    "hrm_text",  # layers that run again
    "longcat_flash",  # two latents in a layer
    "llama",
    "mimo_v2_flash",  # K wider than V
    "mixtral",  # experts
    "musicgen",  # cannot be instantiated
    "phi3",  # V inside qkv_proj
    "olmo_hybrid",  # linear attention beside full attention
    "qwen2",  # biases
    "sarvam_moe",  # renamed and joined while loading
    "stablelm",  # partial RoPE
)


@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_the_committed_row_is_current(model_type: str, tmp_path: Path) -> None:
    assert outcome_of(model_type, tmp_path).row() == read_rows()[model_type]


def test_every_model_type_has_its_row() -> None:
    assert tuple(read_rows()) == MODEL_TYPES


def test_every_row_is_right_or_says_why_not() -> None:
    for model_type, row in read_rows().items():
        _, _, _, rotation, cache, _ = (cell.strip() for cell in row.split("|"))
        reasons = ("online: ", "refused: ", "not instantiable: ")
        assert rotation == "fused" or rotation.startswith(reasons), model_type
        assert cache or rotation.startswith(("refused", "not instantiable")), model_type
