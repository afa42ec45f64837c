"""FP8: a cast to e4m3 with one scale per tensor."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvarn_cli.quantization.methods.base import Method
from kvarn_cli.settings import check_choice

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, kw_only=True)
class FP8(Method):
    """K and V divided by one scale per layer, cast to e4m3, saturating at 448.

    Attributes:
        scale: `one`, as vLLM does unless a checkpoint brings scales; `amax` maps the largest
            magnitude of the layer's K or V to 448.

    Source: vLLM's `kv_cache_dtype="fp8"`.
    """

    name: ClassVar[str] = "fp8"

    scale: Literal["one", "amax"] = "one"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scale", self.scale, ("one", "amax"))

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        return self._cast(keys.float()), self._cast(values.float())

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """8; the one scale of a layer weighs nothing."""
        return 8.0

    def _cast(self, states: Tensor) -> Tensor:
        scale = 1.0
        if self.scale == "amax":
            scale = max(states.abs().max().item() / _LARGEST, torch.finfo(torch.float32).tiny)
        scaled = (states / scale).clamp(-_LARGEST, _LARGEST)
        return scaled.to(torch.float8_e4m3fn).float() * scale
