"""No quantization: the control of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvarn_cli.quantization.methods.base import Method
from kvarn_cli.settings import EXACT_BITS


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Keeps K and V as they are, 16 bits an element."""

    name: ClassVar[str] = "exact"
    takes_latents: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """Just the name: no setting matters."""
        return self.name

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs themselves."""
        return keys, values

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """16: a half-precision cache."""
        return EXACT_BITS

    def average_bits(self, num_tokens: int, head_dim: int, num_kv_heads: int = 1) -> float:
        """16 at every length."""
        return EXACT_BITS
