"""llama.cpp's cache types q4_0 and q8_0: blocks of 32 channels with one float16 scale each."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvarn_cli.quantization.methods.base import Method
from kvarn_cli.quantization.rounding import to_float16

_BLOCK = 32
_SCALE_BITS = 16


@dataclass(frozen=True, kw_only=True)
class _Blocks(Method):
    """Symmetric rounding of blocks of 32 neighbouring channels of a token, for K and V alike."""

    code_bits: ClassVar[int]

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`; head_dim must be a multiple of 32."""
        key_blocks, value_blocks = (
            states.float().unflatten(-1, (-1, _BLOCK)) for states in (keys, values)
        )
        return self._round(key_blocks).flatten(-2), self._round(value_blocks).flatten(-2)

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Codes and a float16 scale per block."""
        return self.code_bits + _SCALE_BITS / _BLOCK

    @abstractmethod
    def _round(self, blocks: Tensor) -> Tensor:
        """Round [..., 32] and decode."""


@dataclass(frozen=True, kw_only=True)
class Q40(_Blocks):
    """Codes −8 … 7; the scale takes the value of largest magnitude, with its sign, to −8.

    Source: llama.cpp, `quantize_row_q4_0_ref` in ggml-quants.c.
    """

    name: ClassVar[str] = "q4_0"
    code_bits: ClassVar[int] = 4

    def _round(self, blocks: Tensor) -> Tensor:
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = largest / -8
        codes = (blocks * _inverse(scale) + 8.5).floor().clamp(0, 15) - 8
        return codes * to_float16(scale).float()


@dataclass(frozen=True, kw_only=True)
class Q80(_Blocks):
    """Codes −127 … 127; the scale takes the largest magnitude to 127.

    Source: llama.cpp, `quantize_row_q8_0_ref` in ggml-quants.c.
    """

    name: ClassVar[str] = "q8_0"
    code_bits: ClassVar[int] = 8

    def _round(self, blocks: Tensor) -> Tensor:
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        return (blocks * _inverse(scale)).round() * to_float16(scale).float()


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for a block of zeros."""
    return (1 / scale).nan_to_num(posinf=0.0, neginf=0.0)
