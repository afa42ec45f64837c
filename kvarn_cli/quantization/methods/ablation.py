"""KVarN with one part left out, to see what that part buys."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.methods.base import PresetMethod
from kvarn_cli.quantization.rounding import round_to_nearest, to_float16
from kvarn_cli.quantization.tile_record import quantize_tiles
from kvarn_cli.settings import KVarNSettings, check_choice

_WITHOUT = ("rotation", "normalization", "token_scales", "channel_scales")
_SCALE_BITS = 16


@dataclass(frozen=True, kw_only=True)
class Ablation(PresetMethod):
    """KVarN without its rotation, its normalization, or the scales of one axis.

    Attributes:
        without: `rotation` normalizes the variance in the plain basis; `normalization` only
            rotates; `token_scales` divides by the standard deviations of channels alone,
            `channel_scales` by those of tokens alone, both once, which is where one axis ends.
        iterations: passes of the normalization along both axes.

    Scales of the axis along which RTN has its own scales (K's channels, V's tokens) change
    nothing but rounding noise; they are part of the row's scale.

    Source: KVarN (arXiv 2606.03458), section 3.
    """

    name: ClassVar[str] = "ablation"
    takes_latents: ClassVar[bool] = True

    without: Literal["rotation", "normalization", "token_scales", "channel_scales"] = "rotation"
    iterations: int = KVarNSettings.iterations

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("without", self.without, _WITHOUT)

    @property
    def label(self) -> str:
        """The spec that parses to this method; it always says what is left out."""
        name = self.settings.name
        options = self._options(
            besides=("key_bits", "value_bits", "group_size", "without"),
            preset=KVarNSettings.from_name(name),
        )
        return ",".join([f"{self.name}:{name}", f"without={self.without}", *options])

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        tiled = (-1, self.group_size)
        key_tiles = self._rotated(keys).float().unflatten(-2, tiled).transpose(-1, -2).contiguous()
        key_states = self._decoded(key_tiles, self.key_bits, "token_scales").transpose(-1, -2)
        keys = self._rotated(key_states.flatten(-3, -2))
        if self.settings.latent:
            return keys, to_float16(values).float()
        value_tiles = self._rotated(values).float().unflatten(-2, tiled)
        value_states = self._decoded(value_tiles, self.value_bits, "channel_scales")
        return keys, self._rotated(value_states.flatten(-3, -2))

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Codes, row scales and zero points, and column scales where there are any."""
        key_rows, value_rows = 2 * _SCALE_BITS / self.group_size, 2 * _SCALE_BITS / head_dim
        key_columns = _SCALE_BITS / head_dim * self._has("token_scales")
        if self.settings.latent:
            return self.key_bits + key_rows + key_columns
        value_columns = _SCALE_BITS / self.group_size * self._has("channel_scales")
        scales = key_rows + key_columns + value_rows + value_columns
        return (self.key_bits + self.value_bits + scales) / 2

    def _rotated(self, states: Tensor) -> Tensor:
        if self.without == "rotation":
            return states
        return rotate(states, hadamard_matrix(states.shape[-1], device=states.device))

    def _has(self, scales: str) -> bool:
        return self.without not in ("normalization", scales)

    def _decoded(self, tiles: Tensor, bits: int, columns: str) -> Tensor:
        """Round tiles whose columns are what `columns` scales, and decode them."""
        if self.without == "rotation":
            return quantize_tiles(tiles, bits, self.settings).dequantize()
        column = tiles.new_ones(1)
        if self.without in ("token_scales", "channel_scales") and self._has(columns):
            settings = self.settings
            log_std = (
                tiles.std(dim=-2, keepdim=True).clamp(settings.std_min, settings.std_max).log()
            )
            column = log_std.clamp(settings.log_scale_min, settings.log_scale_max).exp()
        rounded = round_to_nearest(tiles / column, bits)
        scale, zero = to_float16(rounded.scale).float(), to_float16(rounded.zero_point).float()
        return (rounded.codes * scale + zero) * to_float16(column).float()
