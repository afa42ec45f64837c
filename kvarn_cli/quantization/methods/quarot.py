"""QuaRot: Hadamard rotation, then asymmetric RTN per token."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.methods.base import Method
from kvarn_cli.quantization.rounding import rtn_along

_SCALE_AND_ZERO_BITS = 32


@dataclass(frozen=True, kw_only=True)
class QuaRot(Method):
    """K and V rotated by H and rounded per token over the channels of a head.

    Source: QuaRot (arXiv 2404.00456), section 4: KV cache quantization with groups of head_dim.
    """

    name: ClassVar[str] = "quarot"

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        hadamard = hadamard_matrix(keys.shape[-1], device=keys.device)
        rounded = (
            rtn_along(rotate(states, hadamard).float(), bits)
            for states, bits in ((keys, self.key_bits), (values, self.value_bits))
        )
        key_states, value_states = (rotate(states, hadamard) for states in rounded)
        return key_states, value_states

    def bits_per_element(self, head_dim: int) -> float:
        """Codes, and a float16 scale and zero point per token."""
        return (self.key_bits + self.value_bits) / 2 + _SCALE_AND_ZERO_BITS / head_dim
