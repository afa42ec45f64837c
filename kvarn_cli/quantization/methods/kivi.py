"""KIVI: asymmetric RTN without any rotation."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvarn_cli.quantization.methods.base import Method
from kvarn_cli.quantization.rounding import rtn_along

_SCALE_AND_ZERO_BITS = 32


@dataclass(frozen=True, kw_only=True)
class KIVI(Method):
    """K per channel over the tokens of a group, V per token over its channels.

    Source: KIVI (arXiv 2402.02750), section 3; scales and zero points in float16.
    """

    name: ClassVar[str] = "kivi"

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        key_groups = keys.float().unflatten(-2, (-1, self.group_size))
        key_states = rtn_along(key_groups.transpose(-1, -2), self.key_bits).transpose(-1, -2)
        return key_states.flatten(-3, -2), rtn_along(values.float(), self.value_bits)

    def bits_per_element(self, head_dim: int) -> float:
        """Codes, and a float16 scale and zero point per channel of a K group and per V token."""
        key = self.key_bits + _SCALE_AND_ZERO_BITS / self.group_size
        value = self.value_bits + _SCALE_AND_ZERO_BITS / head_dim
        return (key + value) / 2
