"""Quantized tiles and the byte record that stores one K and one V tile of a KV head.

The `vllm-fp16` layout, little-endian and without gaps:

    K codes   head_dim × group_size × key_bits / 8      row-major over [head_dim, group_size]
    K scale   fp16[head_dim]      RTN scale × channel scale
    K zero    fp16[head_dim]
    K column  fp16[group_size]    token scale
    V codes   group_size × head_dim × value_bits / 8    row-major over [group_size, head_dim]
    V column  fp16[head_dim]      channel scale
    V scale   fp16[group_size]    RTN scale × token scale
    V zero    fp16[group_size]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn_cli.quantization.rounding import (
    RoundedRows,
    pack_codes,
    round_to_nearest,
    to_float16,
    unpack_codes,
)
from kvarn_cli.quantization.variance_normalization import variance_normalize
from kvarn_cli.settings import KVarNSettings


@dataclass(frozen=True)
class QuantizedTiles:
    """What a record holds of tiles of one kind.

    Attributes:
        rows: codes uint8 [..., rows, columns]; scale and zero point float16 [..., rows, 1], both
            with the row's normalization scale multiplied in.
        column_scale: float16 [..., 1, columns].
    """

    rows: RoundedRows
    column_scale: Tensor

    def dequantize(self) -> Tensor:
        """`(codes · scale + zero_point) · column_scale`, float32 [..., rows, columns]."""
        return self.rows.dequantize().mul_(self.column_scale)


def quantize_tiles(tiles: Tensor, bits: int, settings: KVarNSettings) -> QuantizedTiles:
    """Normalize the variance of tiles, round to nearest, and absorb the row scales.

    Args:
        tiles: [..., rows, columns], float32.
        bits: bits of a code.
        settings: of the variance normalization.

    Returns:
        Codes and float16 scales, with the leading dimensions of `tiles`.

    Source: KVarN (arXiv 2606.03458), section 3.
    """
    batch = tiles.reshape(-1, *tiles.shape[-2:])
    scales = variance_normalize(batch, settings)
    rounded = round_to_nearest(batch / (scales.row * scales.column), bits)
    codes, scale, zero_point, column_scale = (
        part.reshape(*tiles.shape[:-2], *part.shape[1:])
        for part in (
            rounded.codes,
            to_float16(rounded.scale * scales.row),
            to_float16(rounded.zero_point * scales.row),
            to_float16(scales.column),
        )
    )
    return QuantizedTiles(RoundedRows(codes, scale, zero_point), column_scale)


def pack_records(keys: QuantizedTiles, values: QuantizedTiles, settings: KVarNSettings) -> Tensor:
    """Lay quantized K and V tiles out as records.

    Args:
        keys: of tiles [..., head_dim, group_size].
        values: of tiles [..., group_size, head_dim].
        settings: bits of the codes.

    Returns:
        uint8 [..., record_bytes].
    """
    return torch.cat(
        (
            pack_codes(keys.rows.codes, settings.key_bits).flatten(-2),
            *map(_as_bytes, (keys.rows.scale, keys.rows.zero_point, keys.column_scale)),
            pack_codes(values.rows.codes, settings.value_bits).flatten(-2),
            *map(_as_bytes, (values.column_scale, values.rows.scale, values.rows.zero_point)),
        ),
        dim=-1,
    )


def unpack_records(
    records: Tensor, head_dim: int, settings: KVarNSettings
) -> tuple[QuantizedTiles, QuantizedTiles]:
    """Undo `pack_records`: uint8 [..., record_bytes] → quantized K and V tiles."""
    group_size = settings.group_size
    key_codes, value_codes = (
        head_dim * group_size * bits // 8 for bits in (settings.key_bits, settings.value_bits)
    )
    channel, token = (2 * count for count in (head_dim, group_size))
    parts = records.split(
        [key_codes, channel, channel, token, value_codes, channel, token, token], dim=-1
    )
    key_scale, key_zero, key_column = map(_as_float16, parts[1:4])
    value_column, value_scale, value_zero = map(_as_float16, parts[5:])
    key_rows = RoundedRows(
        unpack_codes(parts[0], settings.key_bits).unflatten(-1, (head_dim, group_size)),
        key_scale[..., None],
        key_zero[..., None],
    )
    value_rows = RoundedRows(
        unpack_codes(parts[4], settings.value_bits).unflatten(-1, (group_size, head_dim)),
        value_scale[..., None],
        value_zero[..., None],
    )
    return (
        QuantizedTiles(key_rows, key_column[..., None, :]),
        QuantizedTiles(value_rows, value_column[..., None, :]),
    )


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.flatten(-2).contiguous().view(torch.uint8)


def _as_float16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)
