"""Tiny models with V's rotation fused, as `kvarn convert` writes them."""

import copy

import torch
from transformers import PreTrainedModel

from kvarn_cli.model.cache_trace import trace_cache
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.layout import ModelLayout
from kvarn_cli.model.projections import find_layout


def layout_of(
    model: PreTrainedModel, arrangement: str = "values last", head_dim: int | None = None
) -> ModelLayout:
    """Where V and O live in attention modules with heads as wide as asked for, or as the first's.

    By the names of the model's parameters.
    """
    traced = trace_cache(model)
    width = head_dim or next(iter(traced.values())).value_width
    return find_layout(model, traced, width, arrangement)


def fuse(model: PreTrainedModel, head_dim: int | None = None) -> PreTrainedModel:
    """A copy whose V is fused with R = H · diag(bent signs), where heads are so wide."""
    fused = copy.deepcopy(model)
    tensors = fused.state_dict()
    with torch.no_grad():
        for name, rotation in tensor_rotations(layout_of(model, head_dim=head_dim)).items():
            tensors[name].copy_(rotation(tensors[name]))
    return fused
