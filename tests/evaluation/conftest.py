import pytest
import torch
from decoding import calm_model
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """In float64, where two ways to the same result differ by 1e-14 and no rounding flips."""
    return calm_model("llama", torch.float64)
