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

    ‖x‖ − ‖x̂‖ is computed as ⟨x − x̂, x + x̂⟩ / (‖x‖ + ‖x̂‖), which loses no digits when both norms
    are nearly equal, and the direction error as what is left of ‖x − x̂‖².

    Args:
        exact: x, [..., head_dim]; computed in float32 or better.
        approximate: x̂, the same shape.

    Source: KVarN (arXiv 2606.03458), the decomposition of the error of one key vector.
    """
    dtype = torch.promote_types(exact.dtype, torch.float32)
    x, y = exact.to(dtype), approximate.to(dtype)
    difference = x - y
    squared_norm, total = (v.square().sum(-1) for v in (x, difference))
    norms = squared_norm.sqrt() + y.square().sum(-1).sqrt()
    along = (difference * (x + y)).sum(-1) / norms.clamp(min=torch.finfo(dtype).tiny)
    magnitude = torch.minimum(along.square(), total)
    return VectorErrors(magnitude.float(), (total - magnitude).float(), squared_norm.float())
