"""QuaRot: Hadamard rotation, then asymmetric RTN."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.methods.base import PresetMethod
from kvarn_cli.quantization.methods.kivi import SCALE_AND_ZERO_BITS, rtn_over_tokens
from kvarn_cli.quantization.rounding import rtn_along, to_float16
from kvarn_cli.settings import check_choice


@dataclass(frozen=True, kw_only=True)
class QuaRot(PresetMethod):
    """K and V rotated by H and rounded to nearest; V per token over the channels of a head.

    A latent is packed as K is.

    Attributes:
        key_axis: `channel` rounds K per channel over the tokens of a group, as KIVI and KVarN do,
            so that rotation is the only difference to `kivi`, and normalization the only one to
            `kvarn`; `token` is QuaRot as published, K per token over the channels of a head.

    Source: QuaRot (arXiv 2404.00456), section 4: KV cache quantization with groups of head_dim.
    """

    name: ClassVar[str] = "quarot"
    takes_latents: ClassVar[bool] = True

    key_axis: Literal["channel", "token"] = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("key_axis", self.key_axis, ("channel", "token"))

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        hadamard = hadamard_matrix(keys.shape[-1], device=keys.device)
        key_states = rotate(keys, hadamard)
        if self.key_axis == "channel":
            key_states = rtn_over_tokens(key_states, self.key_bits, self.group_size)
        else:
            key_states = rtn_along(key_states.float(), self.key_bits)
        key_states = rotate(key_states, hadamard)
        if self.settings.latent:
            return key_states, to_float16(values).float()
        value_states = rtn_along(rotate(values, hadamard), self.value_bits)
        return key_states, rotate(value_states, hadamard)

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Codes, and a float16 scale and zero point per rounded row."""
        key_row = self.group_size if self.key_axis == "channel" else head_dim
        key = self.key_bits + SCALE_AND_ZERO_BITS / key_row
        if self.settings.latent:
            return key
        return (key + self.value_bits + SCALE_AND_ZERO_BITS / head_dim) / 2
