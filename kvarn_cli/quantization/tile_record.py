"""Quantized tiles and the byte record that stores one K and one V tile of a KV head.

A record is little-endian and without gaps. Its scales are fp16 in the layout `vllm-fp16`, FP8 e4m3
in the layout `paper-fp8`:

    K codes   head_dim × group_size × key_bits / 8      row-major over [head_dim, group_size]
    K scale   scale[head_dim]     RTN scale × channel scale
    K zero    fp16[head_dim]
    K column  scale[group_size]   token scale
    V codes   group_size × head_dim × value_bits / 8    row-major over [group_size, head_dim]
    V column  scale[head_dim]     channel scale
    V scale   scale[group_size]   RTN scale × token scale
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
    to_stored,
    unpack_codes,
)
from kvarn_cli.quantization.variance_normalization import TileScales, variance_normalize
from kvarn_cli.settings import KVarNSettings

SCALE_DTYPES = {"vllm-fp16": torch.float16, "paper-fp8": torch.float8_e4m3fn}
"""What scales are stored in, by layout; zero points are float16."""

_SMALLEST_ROW = 1e-6


@dataclass(frozen=True)
class QuantizedTiles:
    """What a record holds of tiles of one kind.

    Attributes:
        rows: codes uint8 [..., rows, columns]; scale (dtype of the layout) and zero point float16
            [..., rows, 1], both with the row's normalization scale multiplied in.
        column_scale: dtype of the layout [..., 1, columns].
    """

    rows: RoundedRows
    column_scale: Tensor

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        """What decodes the codes: scale and zero point of the rows, and column scale."""
        return self.rows.scale, self.rows.zero_point, self.column_scale

    def dequantize(self) -> Tensor:
        """`(codes · scale + zero_point) · column_scale`, float32 [..., rows, columns]."""
        return self.rows.dequantize().mul_(self.column_scale.float())


def quantize_tiles(tiles: Tensor, bits: int, settings: KVarNSettings) -> QuantizedTiles:
    """Normalize the variance of tiles, round to nearest, and absorb the row scales.

    Args:
        tiles: [..., rows, columns], float32.
        bits: bits of a code.
        settings: of the variance normalization, and the layout.

    Returns:
        Codes and scales, with the leading dimensions of `tiles`.

    Source: KVarN (arXiv 2606.03458), section 3.
    """
    batch = tiles.reshape(-1, *tiles.shape[-2:])
    scales, dtype = tile_scales(batch, settings), SCALE_DTYPES[settings.layout]
    rounded = round_to_nearest(batch / (scales.row * scales.column), bits)
    codes, scale, zero_point, column_scale = (
        part.reshape(*tiles.shape[:-2], *part.shape[1:])
        for part in (
            rounded.codes,
            to_stored(rounded.scale * scales.row, dtype),
            to_float16(rounded.zero_point * scales.row),
            to_stored(scales.column, dtype),
        )
    )
    return QuantizedTiles(RoundedRows(codes, scale, zero_point), column_scale)


def tile_scales(tiles: Tensor, settings: KVarNSettings) -> TileScales:
    """The scales of the variance normalization, within reach of what the layout stores.

    A record decodes to the same when its row scales are multiplied and its column scales divided
    by one number. For FP8, whose range is short, this is a power of two of each tile that brings
    the largest column scale and the largest balanced row together.

    Args:
        tiles: [N, rows, columns], float32.
        settings: of the variance normalization, and the layout.
    """
    scales = variance_normalize(tiles, settings)
    if settings.layout == "vllm-fp16":
        return scales
    row, column = (
        numbers.abs().amax(dim=(1, 2), keepdim=True)
        for numbers in (tiles / scales.column, scales.column)
    )
    shift = ((column / row.clamp_min(_SMALLEST_ROW)).log2() / 2).round().exp2()
    return TileScales(scales.row * shift, scales.column / shift)


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
            pack_keys(keys, settings),
            pack_codes(values.rows.codes, settings.value_bits).flatten(-2),
            *map(_as_bytes, (values.column_scale, values.rows.scale, values.rows.zero_point)),
        ),
        dim=-1,
    )


def pack_keys(keys: QuantizedTiles, settings: KVarNSettings) -> Tensor:
    """Lay out the part of a record that holds K, uint8 [..., bytes]."""
    return torch.cat(
        (
            pack_codes(keys.rows.codes, settings.key_bits).flatten(-2),
            *map(_as_bytes, (keys.rows.scale, keys.rows.zero_point, keys.column_scale)),
        ),
        dim=-1,
    )


def unpack_records(
    records: Tensor, head_dim: int, settings: KVarNSettings
) -> tuple[QuantizedTiles, QuantizedTiles]:
    """Undo `pack_records`: uint8 [..., record_bytes] → quantized K and V tiles."""
    keys, rest = unpack_keys(records, head_dim, settings)
    tokens, dtype = settings.group_size, SCALE_DTYPES[settings.layout]
    codes, column_scale, scale, zero_point = rest.split(
        [
            head_dim * tokens * settings.value_bits // 8,
            head_dim * dtype.itemsize,
            tokens * dtype.itemsize,
            tokens * torch.float16.itemsize,
        ],
        dim=-1,
    )
    rows = RoundedRows(
        unpack_codes(codes, settings.value_bits).unflatten(-1, (tokens, head_dim)),
        _as_numbers(scale, dtype)[..., None],
        _as_numbers(zero_point, torch.float16)[..., None],
    )
    return keys, QuantizedTiles(rows, _as_numbers(column_scale, dtype)[..., None, :])


def unpack_keys(
    records: Tensor, head_dim: int, settings: KVarNSettings
) -> tuple[QuantizedTiles, Tensor]:
    """Undo `pack_keys`; the bytes behind K's part come back as they are."""
    tokens, dtype = settings.group_size, SCALE_DTYPES[settings.layout]
    sizes = [
        head_dim * tokens * settings.key_bits // 8,
        head_dim * dtype.itemsize,
        head_dim * torch.float16.itemsize,
        tokens * dtype.itemsize,
    ]
    codes, scale, zero_point, column_scale, rest = records.split(
        [*sizes, records.shape[-1] - sum(sizes)], dim=-1
    )
    rows = RoundedRows(
        unpack_codes(codes, settings.key_bits).unflatten(-1, (head_dim, tokens)),
        _as_numbers(scale, dtype)[..., None],
        _as_numbers(zero_point, torch.float16)[..., None],
    )
    return QuantizedTiles(rows, _as_numbers(column_scale, dtype)[..., None, :]), rest


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.flatten(-2).contiguous().view(torch.uint8)


def _as_numbers(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.contiguous().view(dtype)
