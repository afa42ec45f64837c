"""Magnitude and direction error of vectors."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VectorErrors:
    """Errors of one layer's K or V vectors; magnitude + direction = ‖x − x̂‖².

    Attributes:
        magnitude: (‖x‖ − ‖x̂‖)², float32 [kv_heads, tokens].
        direction: 2‖x‖‖x̂‖(1 − cos θ), float32 [kv_heads, tokens].
        squared_norm: ‖x‖², float32 [kv_heads, tokens].
    """

    magnitude: Tensor
    direction: Tensor
    squared_norm: Tensor

    @property
    def total(self) -> Tensor:
        """‖x − x̂‖², [kv_heads, tokens]."""
        return self.magnitude + self.direction


def vector_errors(exact: Tensor, approximate: Tensor) -> VectorErrors:
    """Split the squared error of each vector into magnitude and direction.

    The direction error is computed as ‖x‖‖x̂‖ · ‖x/‖x‖ − x̂/‖x̂‖‖², which equals
    2‖x‖‖x̂‖(1 − cos θ) and loses no digits when the angle is small. Computed in float64.

    Args:
        exact: x, [..., head_dim].
        approximate: x̂, the same shape.

    Source: KVarN (arXiv 2606.03458), the decomposition of the error of one key vector.
    """
    x, y = exact.double(), approximate.double()
    x_norm, y_norm = (states.norm(dim=-1, keepdim=True) for states in (x, y))
    tiny = torch.finfo(torch.float64).tiny
    turned = (x / x_norm.clamp(min=tiny) - y / y_norm.clamp(min=tiny)).square().sum(-1)
    x_norm, y_norm = x_norm[..., 0], y_norm[..., 0]
    return VectorErrors(
        magnitude=(x_norm - y_norm).square().float(),
        direction=(x_norm * y_norm * turned).float(),
        squared_norm=x_norm.square().float(),
    )
