"""From the latents and RoPE keys that an MLA model caches to records and back.

Such a model (DeepSeek V2 and V3, MiniCPM3, …) caches one vector of a token for all heads, the
normalized latent, and one RoPE key. A record holds both, little-endian and without gaps; the
latent's part is K's part of an ordinary record of the same width:

    latent codes   latent_dim × group_size × key_bits / 8   row-major over [latent_dim, group_size]
    latent scale   fp16[latent_dim]    RTN scale × channel scale
    latent zero    fp16[latent_dim]
    latent column  fp16[group_size]    token scale
    RoPE key       fp16[group_size, rope_dim]

With 512 and 64 channels, 4 bits and 128 tokens these are 51,456 bytes, as in the public vLLM
backend; the order of the two parts is this package's choice.
"""

import torch
from torch import Tensor

from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.rounding import to_float16
from kvarn_cli.quantization.saturation import note_saturation
from kvarn_cli.quantization.tile_codec import TileCodec, dequantize_keys, quantize_keys
from kvarn_cli.quantization.tile_record import QuantizedTiles, pack_keys, unpack_keys
from kvarn_cli.settings import KVarNSettings


class LatentCodec:
    """Encodes and decodes whole tiles of latents, with the interface of `TileCodec`.

    The latent is rotated by H before quantization and back afterwards, unless its rotation is
    fused into the weights. The RoPE key is rounded to float16 and no further; numbers beyond its
    range are clamped and told to `watch_saturation`.

    Args:
        settings: of a latent cache.
        latent_dim: a power of two from 32 to 512.
        rope_dim: width of the RoPE key.
        rotate_latents: False when the model's latent arrives already rotated.

    Attributes:
        widths: of the latent and the RoPE key.
        record_bytes: bytes of one record.

    Raises:
        SettingsError: no record holds this latent_dim.
    """

    def __init__(
        self, settings: KVarNSettings, latent_dim: int, rope_dim: int, *, rotate_latents: bool
    ) -> None:
        self.settings = settings
        self.widths = (latent_dim, rope_dim)
        self.record_bytes = settings.record_bytes(latent_dim, rope_dim)
        self.rotate_latents = rotate_latents
        self._hadamard = hadamard_matrix(latent_dim)

    def encode(self, latents: Tensor, rope_keys: Tensor) -> Tensor:
        """Quantize and pack.

        Args:
            latents: [..., tokens, latent_dim], any float dtype; tokens a multiple of group_size.
            rope_keys: [..., tokens, rope_dim], after RoPE.

        Returns:
            uint8 [..., tokens / group_size, record_bytes].
        """
        exact = _stored(rope_keys).unflatten(-2, (-1, self.settings.group_size)).flatten(-2)
        raw = exact.contiguous().view(torch.uint8)
        return torch.cat((pack_keys(self._quantize(latents), self.settings), raw), dim=-1)

    def decode(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `encode` up to the quantization error.

        Returns:
            float32 [..., tokens, latent_dim] and [..., tokens, rope_dim].
        """
        latent_dim, rope_dim = self.widths
        quantized, raw = unpack_keys(records, latent_dim, self.settings)
        rope_keys = raw.contiguous().view(torch.float16).float()
        tile = (self.settings.group_size, rope_dim)
        return self._dequantize(quantized), rope_keys.unflatten(-1, tile).flatten(-3, -2)

    def reconstruct(self, latents: Tensor, rope_keys: Tensor) -> tuple[Tensor, Tensor]:
        """What `decode(encode(latents, rope_keys))` gives, without laying out records."""
        return self._dequantize(self._quantize(latents)), _stored(rope_keys).float()

    @torch.no_grad()
    def _quantize(self, latents: Tensor) -> QuantizedTiles:
        return quantize_keys(self._rotate(latents), self.settings)

    @torch.no_grad()
    def _dequantize(self, quantized: QuantizedTiles) -> Tensor:
        return self._rotate(dequantize_keys(quantized))

    def _rotate(self, latents: Tensor) -> Tensor:
        if not self.rotate_latents:
            return latents.float()
        self._hadamard = self._hadamard.to(latents.device)
        return rotate(latents, self._hadamard)


def _stored(rope_keys: Tensor) -> Tensor:
    rounded = to_float16(rope_keys)
    note_saturation(rounded)
    return rounded


def codec_for(
    settings: KVarNSettings, key_dim: int, value_dim: int, *, fused: bool
) -> TileCodec | LatentCodec:
    """The codec of what a model caches as K and V, or as latent and RoPE key.

    Args:
        settings: of the quantizer; they say which of the two it is.
        key_dim: width of K, or of the latent.
        value_dim: width of V, or of the RoPE key.
        fused: whether V, or the latent, arrives rotated already.

    Raises:
        SettingsError: no record holds this key_dim.
    """
    if settings.latent:
        return LatentCodec(settings, key_dim, value_dim, rotate_latents=not fused)
    return TileCodec(settings, key_dim, rotate_values=not fused)
