import pytest
import torch
from decoding import calm_model
from transformers import PreTrainedModel

from kvarn_cli.settings import KVarNSettings


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """In float64, where two ways to the same logits differ by 1e-14 and no rounding flips."""
    return calm_model("llama", torch.float64)


@pytest.fixture
def settings() -> KVarNSettings:
    return KVarNSettings(key_bits=2, value_bits=2, group_size=32, sink_tokens=16)
