from typing import Any

import pytest
from converted_folder import converted_config
from tiny_models import tiny_config, tiny_model

from kvarn_cli.errors import CheckpointError
from kvarn_cli.metadata import CONFIG_KEY, Layers
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.runtime.description import described_cache


def described(family: str = "llama", **changes: Any) -> Any:
    config = tiny_config(family)
    block = converted_config(**({"head_dim": 32} | changes))
    setattr(config, CONFIG_KEY, block.model_dump(mode="json"))
    return config


def test_a_fitting_block_is_read() -> None:
    block = described_cache(described())
    assert block is not None
    assert block.cache.head_dim == 32
    assert described_cache(tiny_config("llama")) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (described(layers=Layers(covered=[0, 2])), "covers layer 2"),
        (described(layers=Layers(covered=[-1])), "covers layer -1"),
        (described("mistral-sliding"), "covers layer 0"),
    ],
)
def test_the_block_of_another_model_is_refused_by_every_reader(config: Any, message: str) -> None:
    model = tiny_model(config)
    with pytest.raises(CheckpointError, match=message):
        described_cache(config)
    with pytest.raises(CheckpointError, match=message):
        KVarNCache.from_model(model)
