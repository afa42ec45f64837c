"""QuaRot: Hadamard rotation, then asymmetric RTN."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.methods.base import Method
from kvarn_cli.quantization.methods.kivi import KIVI
from kvarn_cli.quantization.rounding import rtn_along
from kvarn_cli.settings import check_choice

_SCALE_AND_ZERO_BITS = 32


@dataclass(frozen=True, kw_only=True)
class QuaRot(Method):
    """K and V rotated by H and rounded to nearest; V per token over the channels of a head.

    Attributes:
        key_axis: `channel` rounds K per channel over the tokens of a group, as KIVI and KVarN do,
            so that rotation is the only difference to `kivi`, and normalization the only one to
            `kvarn`; `token` is QuaRot as published, K per token over the channels of a head.

    Source: QuaRot (arXiv 2404.00456), section 4: KV cache quantization with groups of head_dim.
    """

    name: ClassVar[str] = "quarot"

    key_axis: Literal["channel", "token"] = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("key_axis", self.key_axis, ("channel", "token"))

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        hadamard = hadamard_matrix(keys.shape[-1], device=keys.device)
        key_states, value_states = (rotate(states, hadamard) for states in (keys, values))
        if self.key_axis == "channel":
            key_states, value_states = self._unrotated.reconstruct(key_states, value_states)
        else:
            key_states = rtn_along(key_states.float(), self.key_bits)
            value_states = rtn_along(value_states.float(), self.value_bits)
        return rotate(key_states, hadamard), rotate(value_states, hadamard)

    def bits_per_element(self, head_dim: int) -> float:
        """Codes, and a float16 scale and zero point per rounded row."""
        if self.key_axis == "channel":
            return self._unrotated.bits_per_element(head_dim)
        return (self.key_bits + self.value_bits) / 2 + _SCALE_AND_ZERO_BITS / head_dim

    @property
    def _unrotated(self) -> KIVI:
        return KIVI(key_bits=self.key_bits, value_bits=self.value_bits, group_size=self.group_size)
