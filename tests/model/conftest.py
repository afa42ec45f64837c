import pytest
import torch
from tiny_models import tiny_config, tiny_model
from transformers import PreTrainedModel


@pytest.fixture(params=["llama", "mistral", "mistral-sliding", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return tiny_model(tiny_config(family))


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
