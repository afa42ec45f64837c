"""KVarN: Hadamard rotation, variance normalization along both axes of a tile, RTN."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvarn_cli.quantization.latent_codec import codec_for
from kvarn_cli.quantization.methods.base import PresetMethod
from kvarn_cli.settings import Encoder, KVarNSettings, Layout, check_choice


@dataclass(frozen=True, kw_only=True)
class KVarN(PresetMethod):
    """The records that KVarN backends store, decoded again.

    Attributes:
        iterations: passes of the variance normalization; 0 leaves rotation and RTN alone.
        log_scale_min: lower clip of a log scale.
        log_scale_max: upper clip of a log scale.
        std_min: lower clip of a standard deviation before its logarithm.
        std_max: upper clip of a standard deviation before its logarithm.
        layout: of the record; `paper-fp8` has scales in FP8.
        encoder: `reference` chooses codes and scales as public backends do, `refined` better.
        value_rotation: `online` rotates V, or a latent, as it is cached, `fused` takes it as
            rotated already; None leaves the choice to the model, and means `online` here.

    Source: KVarN (arXiv 2606.03458), section 3.
    """

    name: ClassVar[str] = "kvarn"
    takes_latents: ClassVar[bool] = True
    plain_basis: ClassVar[bool] = False

    iterations: int = KVarNSettings.iterations
    log_scale_min: float = KVarNSettings.log_scale_min
    log_scale_max: float = KVarNSettings.log_scale_max
    std_min: float = KVarNSettings.std_min
    std_max: float = KVarNSettings.std_max
    layout: Layout = KVarNSettings.layout
    encoder: Encoder = KVarNSettings.encoder
    value_rotation: Literal["online", "fused"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("value_rotation", self.value_rotation, ("online", "fused", None))

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        widths = (keys.shape[-1], values.shape[-1])
        codec = codec_for(self.settings, *widths, fused=self.value_rotation == "fused")
        return codec.reconstruct(keys, values)

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Bytes of a record over its elements."""
        return self.settings.bits_per_element(head_dim)
