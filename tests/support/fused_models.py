"""Tiny models with V's rotation fused, as `kvarn convert` writes them."""

import copy

import torch
from transformers import PreTrainedModel

from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.layout import find_layout


def fuse(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose V is fused with R = H · diag(bent signs)."""
    fused = copy.deepcopy(model)
    tensors = fused.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = find_layout(model.config, shapes)
    with torch.no_grad():
        for name, rotation in tensor_rotations(layout).items():
            tensors[name].copy_(rotation(tensors[name]))
    return fused
