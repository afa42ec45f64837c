from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_config, tiny_model
from transformers import PreTrainedModel

from kvarn_cli.model.layout import ModelLayout, find_layout


@pytest.fixture(params=["llama", "mistral", "mistral-sliding", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return tiny_model(tiny_config(family))


@pytest.fixture
def layout_of() -> Callable[[PreTrainedModel], ModelLayout]:
    def layout_of(model: PreTrainedModel) -> ModelLayout:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return find_layout(model.config, shapes)

    return layout_of


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
