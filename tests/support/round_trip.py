"""A tiny random model through the whole of convert, and what it computes before and after."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from conversions import Converted, convert
from safetensors.torch import load_file
from tiny_models import randomize, tiny_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.verification.against_source import verify_against
from kvarn_cli.verification.folder import verify_folder

TOLERANCE = 1e-4
"""Of the largest logit, or of the largest V, in float32."""


@dataclass(frozen=True)
class Said:
    """What a model computes for some tokens.

    Attributes:
        logits: [tokens, vocabulary].
        values: V as each layer caches it, [KV heads, tokens, width], by layer.
    """

    logits: Tensor
    values: dict[int, Tensor]


def save(model: PreTrainedModel | PreTrainedConfig, folder: Path) -> Path:
    """Write a model, or one of this configuration, with every parameter drawn at random."""
    if isinstance(model, PreTrainedConfig):
        model = tiny_model(model)
    else:
        randomize(model)
    model.save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name."""
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@torch.no_grad()
def said_by(folder: Path) -> Said:
    """Load a folder with nothing of ours, and let it read forty tokens."""
    config = AutoConfig.from_pretrained(folder)
    known = type(config) in AutoModelForCausalLM._model_mapping
    loader = AutoModelForCausalLM if known else getattr(transformers, config.architectures[0])
    model = loader.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    logits = model(input_ids=tokens, cache=cache, use_cache=True).logits[0]
    values = {
        index: layer.values[0]
        for index, layer in enumerate(cache.layers)
        if isinstance(getattr(layer, "values", None), Tensor)
    }
    return Said(logits, values)


def round_trip(
    model: PreTrainedModel | PreTrainedConfig,
    folder: Path,
    *,
    rotation: str = "auto",
    edit: Callable[[Path], object] = lambda source: None,
) -> Converted:
    """Save a model, edit the checkpoint, convert it, and see that it computes what it did.

    A fused one must cache V times R in the layers it covers; nothing but the listed tensors may
    change.
    """
    source = save(model, folder / "source")
    edit(source)
    converted = convert(source, folder / "converted", rotation=rotation)
    metadata = converted.conversion.metadata
    original = open_checkpoint(source)
    checks = verify_folder(converted.output)
    checks += verify_against(open_checkpoint(converted.output), original)
    assert [problem for check in checks for problem in check.problems] == []
    before, after = said_by(source), said_by(converted.output)
    assert_close(after.logits, before.logits)
    rotated = fused_rotation(metadata.cache.head_dim)
    for layer in metadata.layers.covered:
        expected = before.values[layer]
        assert_close(after.values[layer], expected @ rotated if metadata.fused else expected)
    return converted


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
