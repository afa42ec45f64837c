"""TurboQuant: a random rotation, then one fixed scalar quantizer for every coordinate."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvarn_cli.quantization.hadamard import rotate
from kvarn_cli.quantization.levels import optimal_levels, to_nearest
from kvarn_cli.quantization.methods.base import PresetMethod
from kvarn_cli.quantization.rounding import to_float16

_NORM_BITS = 16
_QUANTILES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TurboQuant(PresetMethod):
    """Each token's unit vector rotated at random, its coordinates rounded to Lloyd-Max levels.

    The coordinates of a randomly rotated unit vector are close to normal with variance
    1 / head_dim, so the levels need no data. The norm is kept in float16.

    Source: TurboQuant (arXiv 2504.19874), the quantizer for mean squared error.
    """

    name: ClassVar[str] = "turboquant"

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        return _quantized(keys, self.key_bits), _quantized(values, self.value_bits)

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Codes and a float16 norm per token."""
        return (self.key_bits + self.value_bits) / 2 + _NORM_BITS / head_dim


def _quantized(states: Tensor, bits: int) -> Tensor:
    head_dim = states.shape[-1]
    rotation = _random_rotation(head_dim)
    norm = states.float().norm(dim=-1, keepdim=True)
    unit = states.float() / norm.clamp(min=torch.finfo(torch.float32).tiny)
    levels = _normal_levels(2**bits) / head_dim**0.5
    rounded = to_nearest(rotate(unit, rotation), levels)
    return rotate(rounded, rotation.T) * to_float16(norm).float()


@lru_cache
def _random_rotation(order: int) -> Tensor:
    """A fixed orthonormal matrix drawn uniformly, [order, order] float32."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(order, order, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    rotation: Tensor = q * r.diagonal().sign()
    return rotation.float()


@lru_cache
def _normal_levels(count: int) -> Tensor:
    """Lloyd-Max levels of the standard normal distribution."""
    probabilities = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    return optimal_levels(torch.special.ndtri(probabilities), count)
