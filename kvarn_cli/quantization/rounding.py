"""Asymmetric round-to-nearest (RTN) along rows, and the packing of its codes into bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST_SCALE = 1e-10


@dataclass(frozen=True)
class RoundedRows:
    """Codes of rows and the two numbers that decode each row.

    Attributes:
        codes: uint8 [..., rows, columns], below 2^bits.
        scale: float [..., rows, 1].
        zero_point: float [..., rows, 1], the value of code 0.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def dequantize(self) -> Tensor:
        """`codes · scale + zero_point`, float32 [..., rows, columns]."""
        return torch.addcmul(self.zero_point.float(), self.codes.float(), self.scale.float())


def round_to_nearest(rows: Tensor, bits: int) -> RoundedRows:
    """Quantize each row between its minimum and maximum; halves round to even.

    Args:
        rows: [..., rows, columns], float32.
        bits: bits of a code, at most 8.

    Returns:
        Codes, and scale and zero point in float32: `scale = max((hi − lo)/(2^bits − 1), 1e-10)`,
        `zero_point = lo`.
    """
    levels = 2**bits - 1
    low, high = rows.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / levels).clamp_min(_SMALLEST_SCALE)
    codes = ((rows - low) / scale).round_().clamp_(0, levels)
    return RoundedRows(codes.to(torch.uint8), scale, low)


def to_stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a scale to the dtype that it is stored in; saturates instead of overflowing."""
    largest = torch.finfo(dtype).max
    return scale.clamp(-largest, largest).to(dtype)


def to_float16(scale: Tensor) -> Tensor:
    """Round a scale or zero point to float16; saturates instead of overflowing."""
    return to_stored(scale, torch.float16)


def rtn_along(rows: Tensor, bits: int) -> Tensor:
    """Round rows to nearest with float16 scales and zero points, and decode them again.

    Args:
        rows: [..., rows, columns], float32.
        bits: bits of a code.

    Returns:
        float32 [..., rows, columns].
    """
    rounded = round_to_nearest(rows, bits)
    return RoundedRows(
        rounded.codes, to_float16(rounded.scale), to_float16(rounded.zero_point)
    ).dequantize()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last dimension, low bits first.

    Args:
        codes: uint8 [..., columns], below 2^bits; columns a multiple of 8/bits.
        bits: 2 or 4.

    Returns:
        uint8 [..., columns · bits / 8]: code c sits in byte c // (8/bits) at shift
        (c mod (8/bits)) · bits.
    """
    grouped = codes.unflatten(-1, (-1, 8 // bits))
    packed: Tensor = grouped[..., 0].clone()
    for position in range(1, 8 // bits):
        packed |= grouped[..., position] << (position * bits)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_codes`: uint8 [..., bytes] → uint8 [..., bytes · 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)
