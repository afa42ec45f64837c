"""KVQuant: K before RoPE, levels fitted on calibration text, a few outliers kept exact."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.levels import optimal_levels, to_nearest
from kvarn_cli.quantization.methods.base import PresetMethod

OUTLIER_SHARE = 0.01

_OUTLIER_BITS = 32
_SCALE_AND_ZERO_BITS = 32
_MOST_SAMPLES = 1 << 16


@dataclass(frozen=True)
class _Fit:
    """What is fixed for one layer: K's range per channel, and both sets of levels in [−1, 1]."""

    key_low: Tensor
    key_high: Tensor
    key_levels: Tensor
    value_levels: Tensor


@dataclass(frozen=True, kw_only=True)
class KVQuant(PresetMethod):
    """K per channel before RoPE with fixed ranges, V per token; non-uniform levels for both.

    1 % of the values stay exact: of each head's group of K those that lie farthest outside the
    range that held 99 % of the calibration text, and the largest and smallest of each token's V
    (all KV heads together). Levels are found by k-means without the paper's sensitivity weights,
    which need gradients, and without its Q-Norm.

    Source: KVQuant (arXiv 2401.18079), section 3.
    """

    name: ClassVar[str] = "kvquant"
    keys_before_rope: ClassVar[bool] = True
    needs_fit: ClassVar[bool] = True
    constant_bits: ClassVar[float] = _SCALE_AND_ZERO_BITS / 2

    fits: Mapping[int, _Fit] = field(default_factory=dict, compare=False, repr=False)
    own_fit: _Fit | None = field(default=None, compare=False, repr=False)

    def fit(self, layers: Mapping[int, tuple[Tensor, Tensor]]) -> Self:
        """See `Method.fit`: ranges of K's channels and the levels of K and V, for each layer."""
        return replace(
            self, fits={layer: self._fit(keys, values) for layer, (keys, values) in layers.items()}
        )

    def for_layer(self, layer: int) -> "KVQuant":
        """See `Method.for_layer`."""
        return replace(self, own_fit=self.fits.get(layer))

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`; keys before RoPE.

        Raises:
            SettingsError: the method was not fitted to this layer.
        """
        fit = self.own_fit
        if fit is None:
            raise SettingsError("kvquant was not fitted on calibration text for this layer")
        keys, values = keys.float(), values.float()
        low, high = _token_range(values)
        outliers = self._key_outliers(keys, fit)
        return (
            _rounded(keys, fit.key_low, fit.key_high, fit.key_levels, outliers),
            _rounded(values, low, high, fit.value_levels, (values < low) | (values > high)),
        )

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Codes, 1 % outliers with their positions, and a float16 scale and zero per V token."""
        channels = head_dim * num_kv_heads
        key = self.key_bits + OUTLIER_SHARE * _OUTLIER_BITS
        outliers = 2 * _outliers_per_side(channels) * _OUTLIER_BITS
        value = self.value_bits + (outliers + _SCALE_AND_ZERO_BITS) / channels
        return (key + value) / 2

    def _key_outliers(self, keys: Tensor, fit: _Fit) -> Tensor:
        """The values farthest outside the channels' ranges, at most 1 % of each group."""
        outside = torch.maximum(fit.key_low - keys, keys - fit.key_high).clamp(min=0)
        groups = outside.unflatten(-2, (-1, self.group_size)).flatten(-2)
        budget = round(OUTLIER_SHARE * groups.shape[-1])
        least = groups.topk(budget).values[..., -1:]
        kept = (groups > 0) & (groups >= least)
        outliers: Tensor = kept.unflatten(-1, (self.group_size, -1)).flatten(-3, -2)
        return outliers

    def _fit(self, keys: Tensor, values: Tensor) -> _Fit:
        keys, values = keys.float(), values.float()
        edges = torch.tensor([OUTLIER_SHARE / 2, 1 - OUTLIER_SHARE / 2], device=keys.device)
        per_channel = keys.transpose(0, 1).flatten(1, 2)
        key_low, key_high = per_channel.quantile(edges, dim=1).unsqueeze(-2)
        return _Fit(
            key_low,
            key_high,
            _levels(keys, key_low, key_high, self.key_bits),
            _levels(values, *_token_range(values), self.value_bits),
        )


def _token_range(values: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of each token's values that are no outliers, [..., 1, tokens, 1]."""
    tokens = values.float().transpose(-3, -2).flatten(-2)
    outside = _outliers_per_side(tokens.shape[-1])
    high = tokens.topk(outside + 1).values[..., -1:]
    low = tokens.topk(outside + 1, largest=False).values[..., -1:]
    return low.unsqueeze(-3), high.unsqueeze(-3)


def _outliers_per_side(channels: int) -> int:
    return max(round(OUTLIER_SHARE * channels / 2), 1)


def _levels(states: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    inside = (states >= low) & (states <= high)
    samples = _unit(states, low, high)[inside]
    return optimal_levels(samples[:: len(samples) // _MOST_SAMPLES + 1].cpu(), 2**bits)


def _rounded(states: Tensor, low: Tensor, high: Tensor, levels: Tensor, exact: Tensor) -> Tensor:
    rounded = (to_nearest(_unit(states, low, high), levels) + 1) / 2 * (high - low) + low
    return torch.where(exact, states.half().float(), rounded)


def _unit(states: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Map [low, high] to [−1, 1]."""
    return (states - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny) * 2 - 1
