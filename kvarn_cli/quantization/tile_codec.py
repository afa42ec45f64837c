"""From key and value states of tokens to records and back."""

import torch
from torch import Tensor

from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.refined_encoder import refine_tiles
from kvarn_cli.quantization.saturation import note_saturation
from kvarn_cli.quantization.tile_record import (
    QuantizedTiles,
    pack_records,
    quantize_tiles,
    unpack_records,
)
from kvarn_cli.settings import KVarNSettings, check_head_dim


class TileCodec:
    """Encodes and decodes whole tiles of one head width.

    K is rotated by H before quantization and back afterwards; V as well, unless its rotation is
    fused into the weights.

    Args:
        settings: of the quantizer.
        head_dim: a power of two from 32 to 512.
        rotate_values: False when the model's V arrives already rotated.

    Attributes:
        widths: of K and V.
        record_bytes: bytes of one record.

    Raises:
        SettingsError: no record holds this head_dim.
    """

    def __init__(self, settings: KVarNSettings, head_dim: int, *, rotate_values: bool) -> None:
        check_head_dim(head_dim)
        self.settings = settings
        self.head_dim = head_dim
        self.rotate_values = rotate_values
        self.widths = (head_dim, head_dim)
        self.record_bytes = settings.record_bytes(head_dim)
        self._hadamard = hadamard_matrix(head_dim)

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Quantize and pack.

        Args:
            keys: [..., tokens, head_dim] after RoPE, any float dtype; tokens a multiple of
                group_size.
            values: the same shape, as the model caches them.

        Returns:
            uint8 [..., tokens / group_size, record_bytes].
        """
        return pack_records(*self._quantize(keys, values), self.settings)

    def decode(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `encode` up to the quantization error: two float32 [..., tokens, head_dim]."""
        return self._dequantize(*unpack_records(records, self.head_dim, self.settings))

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What `decode(encode(keys, values))` gives, without laying out records."""
        return self._dequantize(*self._quantize(keys, values))

    @torch.no_grad()
    def _quantize(self, keys: Tensor, values: Tensor) -> tuple[QuantizedTiles, QuantizedTiles]:
        keys = self._rotate(keys)
        values = self._rotate(values) if self.rotate_values else values.float()
        settings = self.settings
        value_tiles = values.float().unflatten(-2, (-1, settings.group_size))
        if settings.encoder == "refined":
            quantized = refine_tiles(value_tiles, settings.value_bits, settings, tokens="rows")
        else:
            quantized = quantize_tiles(value_tiles, settings.value_bits, settings)
        note_saturation(*quantized.scales)
        return quantize_keys(keys, settings), quantized

    @torch.no_grad()
    def _dequantize(self, keys: QuantizedTiles, values: QuantizedTiles) -> tuple[Tensor, Tensor]:
        value_states = values.dequantize().flatten(-3, -2)
        key_states = self._rotate(dequantize_keys(keys))
        return key_states, self._rotate(value_states) if self.rotate_values else value_states

    def _rotate(self, states: Tensor) -> Tensor:
        self._hadamard = self._hadamard.to(states.device)
        return rotate(states, self._hadamard)


def quantize_keys(keys: Tensor, settings: KVarNSettings) -> QuantizedTiles:
    """Quantize rotated K, or a latent: [..., tokens, head_dim] → tiles [..., head_dim, tokens]."""
    tiles = keys.float().unflatten(-2, (-1, settings.group_size)).transpose(-1, -2).contiguous()
    if settings.encoder == "refined":
        quantized = refine_tiles(tiles, settings.key_bits, settings, tokens="columns")
    else:
        quantized = quantize_tiles(tiles, settings.key_bits, settings)
    note_saturation(*quantized.scales)
    return quantized


def dequantize_keys(keys: QuantizedTiles) -> Tensor:
    """Undo `quantize_keys` up to the codes: float32 [..., tokens, head_dim]."""
    return keys.dequantize().transpose(-1, -2).flatten(-3, -2)
