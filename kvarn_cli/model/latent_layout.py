"""Where the latent of MLA models is made and read: names and slices, no mathematics.

A proposal, like those of `layout`: `proof` runs the class with it, and keeps the one that changes
nothing. One thing no name tells: whether the latent's norm multiplies by its weight w or by 1 + w.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import TracedLayer
from kvarn_cli.model.layout import (
    ONLINE_HINT,
    AttentionLayer,
    FoldedNorm,
    HeadSlices,
    ModelLayout,
)

UNIT_WEIGHTS: Mapping[str, Literal[0, 1]] = {"gain w": 1, "gain 1 + w": 0}
"""What a norm's weight may be when it scales nothing, by the norm's rule."""

_MAKES = "kv_a_proj_with_mqa"
_NORM = "kv_a_layernorm"
_READS = "kv_b_proj"


def find_latent_layout(
    model: PreTrainedModel, traced: Mapping[int, TracedLayer], rule: str
) -> ModelLayout:
    """Find what makes, scales and reads the latent of every MLA module.

    Args:
        model: on any device; its parameters name the tensors.
        traced: from `trace_cache`, of this model.
        rule: key of `UNIT_WEIGHTS`.

    Raises:
        UnsupportedModelError: a module has no such parts under their usual names, or their shapes
            do not fit what it caches.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    layers: dict[str, AttentionLayer] = {}
    width = 0
    for index, layer in traced.items():
        width = layer.key_width
        if layer.module not in layers:
            layers[layer.module] = _latent_layer(model, index, layer, names, UNIT_WEIGHTS[rule])
    return ModelLayout(width, tuple(layers.values()))


def latent_readers(
    model: PreTrainedModel, attention_modules: Iterable[str]
) -> dict[str, str | None]:
    """What reads the latent of each attention module, by path; None where its name is unknown."""
    paths = {path for path, _ in model.named_modules()}
    return {
        path: f"{path}.{_READS}" if f"{path}.{_READS}" in paths else None
        for path in attention_modules
    }


def _latent_layer(
    model: PreTrainedModel,
    index: int,
    traced: TracedLayer,
    names: Mapping[Tensor, str],
    unit: Literal[0, 1],
) -> AttentionLayer:
    attention = model.get_submodule(traced.module)
    width, rope_dim = traced.key_width, traced.value_width
    makes, norm, reads = (getattr(attention, part, None) for part in (_MAKES, _NORM, _READS))
    gain = getattr(norm, "weight", None)
    if (
        not isinstance(makes, nn.Linear)
        or not isinstance(reads, nn.Linear)
        or not isinstance(gain, torch.Tensor)
        or makes.out_features != width + rope_dim
        or reads.in_features != width
        or gain.shape != (width,)
    ):
        raise UnsupportedModelError(
            f"{traced.module} ({type(attention).__name__}) has no {_MAKES}, {_NORM} and {_READS} "
            f"that fit a latent of {width} channels and a RoPE key of {rope_dim}",
            hint=ONLINE_HINT,
        )
    parameters = [makes.weight] if makes.bias is None else [makes.weight, makes.bias]
    return AttentionLayer(
        index=index,
        module=traced.module,
        value=tuple(HeadSlices(names[parameter], 0, (0,), width) for parameter in parameters),
        output=HeadSlices(names[reads.weight], 1, (0,), width),
        norm=FoldedNorm(names[gain], unit),
    )
