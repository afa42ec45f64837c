"""Which layers have a KV cache to quantize, and of what width.

This is all that the *online* rotation needs, so it holds for any layout of the weights, quantized
weights too. What the *fused* rotation needs on top is in `layout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.metadata import CONFIG_KEY
from kvarn_cli.model.cache_trace import TracedLayer
from kvarn_cli.runtime.coverage import (
    architecture_of,
    check_widths,
    covered_layers,
    left_out_layers,
    rope_key_dim,
)


@dataclass(frozen=True)
class LeftOutLayer:
    """A layer whose cache stays as it is, and why."""

    index: int
    reason: str


@dataclass(frozen=True)
class CacheLayout:
    """Which layers have a KV cache to quantize, and its shape.

    Attributes:
        head_dim: channels of a head, or of the latent of an MLA model.
        rope_dim: channels of the RoPE key beside a latent; None where K and V are cached.
        kv_heads: heads that are cached, by index of each layer that attends to the whole context.
        left_out: the other layers.
    """

    head_dim: int
    rope_dim: int | None
    kv_heads: Mapping[int, int]
    left_out: tuple[LeftOutLayer, ...]

    @property
    def widths(self) -> tuple[int, int]:
        """Channels as the settings count them: of a head and 0, or of the latent and RoPE key."""
        return self.head_dim, self.rope_dim or 0

    @property
    def covered(self) -> tuple[int, ...]:
        """Indices of the layers whose cache is quantized."""
        return tuple(self.kv_heads)

    @property
    def total_kv_heads(self) -> int:
        """KV heads of all covered layers together."""
        return sum(self.kv_heads.values())


def find_cache_layout(
    config: PreTrainedConfig, traced: Mapping[int, TracedLayer], *, cover_sliding: bool = False
) -> CacheLayout:
    """Join what the configuration says of the layers with what was seen to be cached.

    Args:
        config: as transformers reads config.json.
        traced: from `trace_cache`, of a model with this configuration.
        cover_sliding: count layers with a sliding window as well.

    Raises:
        UnsupportedModelError: there is no KV cache that grows with the sequence, or one of a kind
            or width that no KVarN cache takes.
    """
    covered = covered_layers(config, cover_sliding=cover_sliding)
    left_out = {i: reason for i, reason in left_out_layers(config).items() if i not in covered}
    left_out |= {index: "it caches nothing" for index in covered if index not in traced}
    layers = {index: traced[index] for index in covered if index in traced}
    if not layers:
        reason = next(iter(left_out.values()), "it has no attention layers")
        raise UnsupportedModelError(
            f"{architecture_of(config)} has no layer whose cache grows with the sequence: {reason}",
            hint="its cache is small already, so there is nothing to convert"
            + ("; inspect-errors --sliding measures layers with a window" * ("window" in reason)),
        )
    rope_dim = rope_key_dim(config)
    return CacheLayout(
        head_dim=_common_width(config, layers, rope_dim),
        rope_dim=rope_dim,
        kv_heads={index: layer.num_kv_heads for index, layer in layers.items()},
        left_out=tuple(LeftOutLayer(index, left_out[index]) for index in sorted(left_out)),
    )


def _common_width(
    config: PreTrainedConfig, layers: Mapping[int, TracedLayer], rope_dim: int | None
) -> int:
    architecture = architecture_of(config)
    first, width = next((index, layer.key_width) for index, layer in layers.items())
    for index, layer in layers.items():
        key_width, value_width = layer.key_width, layer.value_width
        check_widths(architecture, index, key_width, value_width, latent=rope_dim is not None)
        if rope_dim is not None and (layer.num_kv_heads, value_width) != (1, rope_dim):
            raise UnsupportedModelError(
                f"layer {index} of {architecture} caches {layer.num_kv_heads} heads of "
                f"{key_width} and {value_width} channels, not one latent and the RoPE key of "
                f"{rope_dim} that its configuration names",
                hint="no record holds it; where config.json is not the publisher's, kv_lora_rank "
                "or qk_rope_head_dim may be wrong",
            )
        if key_width != width:
            raise UnsupportedModelError(
                f"{architecture} has heads {width} wide in layer {first} and {key_width} wide in "
                f"layer {index}; a {CONFIG_KEY} describes one width",
                hint="KVarNCache and generate --preset take layers that differ, unconverted",
            )
    return width
