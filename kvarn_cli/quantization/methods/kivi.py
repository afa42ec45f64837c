"""KIVI: asymmetric RTN without any rotation."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvarn_cli.quantization.methods.base import PresetMethod
from kvarn_cli.quantization.rounding import rtn_along, to_float16

SCALE_AND_ZERO_BITS = 32


@dataclass(frozen=True, kw_only=True)
class KIVI(PresetMethod):
    """K per channel over the tokens of a group, V per token over groups of as many channels.

    As published: `kivi:k2v2_g32,sink_tokens=0,residual_tokens=128`. KIVI's own code packs K when
    128 tokens have gathered and V token by token behind the newest 128; here both are packed a
    group at a time behind the residual. A latent is packed as K is.

    Source: KIVI (arXiv 2402.02750), sections 3 and 4; scales and zero points in float16.
    """

    name: ClassVar[str] = "kivi"
    takes_latents: ClassVar[bool] = True

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        keys = rtn_over_tokens(keys, self.key_bits, self.group_size)
        if self.settings.latent:
            return keys, to_float16(values).float()
        channels = self._value_group(values.shape[-1])
        value_groups = values.float().unflatten(-1, (-1, channels))
        return keys, rtn_along(value_groups, self.value_bits).flatten(-2)

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Codes, and a float16 scale and zero point per K channel and group and per V group."""
        key = self.key_bits + SCALE_AND_ZERO_BITS / self.group_size
        if self.settings.latent:
            return key
        value = self.value_bits + SCALE_AND_ZERO_BITS / self._value_group(head_dim)
        return (key + value) / 2

    def _value_group(self, head_dim: int) -> int:
        return min(self.group_size, head_dim)


def rtn_over_tokens(states: Tensor, bits: int, group_size: int) -> Tensor:
    """Round each channel over each group of tokens: float32 [..., tokens, head_dim]."""
    groups = states.float().unflatten(-2, (-1, group_size)).transpose(-1, -2)
    return rtn_along(groups, bits).transpose(-1, -2).flatten(-3, -2)
