"""A KV cache for transformers that keeps full tiles as packed records.

The first `sink_tokens` tokens and the newest, incomplete tile stay in the model's own dtype. A
tile is packed *after* the step that fills it: the tokens of one step attend exactly to one another
and to dequantized tiles from before the step. Dequantized tiles live for one attention call.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from kvarn_cli.errors import UnsupportedModelError, UsageError
from kvarn_cli.quantization.latent_codec import LatentCodec, codec_for
from kvarn_cli.quantization.saturation import watch_saturation
from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.runtime.coverage import (
    attention_head_dim,
    check_fit,
    covered_layers,
    rope_key_dim,
)
from kvarn_cli.runtime.description import described_cache
from kvarn_cli.settings import KVarNSettings


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache.

    Attributes:
        held_bytes: what the cache holds now, exact layers included.
        sixteen_bit_bytes: what the same tokens take as float16 or bfloat16.
    """

    held_bytes: int
    sixteen_bit_bytes: int


class KVarNLayer(DynamicLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """The cache of one full-attention layer.

    `keys` and `values` hold the exact tokens, the sink followed by the tail,
    [batch, kv_heads, tokens, head_dim]; `records` holds the packed tiles between them, uint8
    [batch, kv_heads, tiles, record_bytes]. An MLA layer has one KV head, whose `keys` are latents
    and whose `values` are RoPE keys.

    `saturated_scales` counts stored scales that had to be clamped.

    After `activate_past_recording` packing waits for the `crop` that ends each step, so that
    rejected draft tokens never enter a tile.
    """

    keys: Tensor
    values: Tensor
    records: Tensor

    def __init__(self, codec: TileCodec | LatentCodec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.codec = codec
        self.record_past = False
        self.saturated_scales = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start empty, with the shapes, dtype and device of the first states.

        Raises:
            UnsupportedModelError: the states are not K and V of the configured head width.
        """
        widths = key_states.shape[-1], value_states.shape[-1]
        if widths != self.codec.widths:
            configured = " and ".join(map(str, dict.fromkeys(self.codec.widths)))
            raise UnsupportedModelError(
                f"the model caches keys and values {widths[0]} and {widths[1]} wide, "
                f"its configuration says {configured}"
            )
        batch, heads = key_states.shape[:2]
        record_bytes = self.codec.record_bytes
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(batch, heads, 0, widths[0])
        self.values = value_states.new_empty(batch, heads, 0, widths[1])
        self.records = self.keys.new_empty(batch, heads, 0, record_bytes, dtype=torch.uint8)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the states of one step and return those of the whole sequence.

        Args:
            key_states: [batch, kv_heads, new_tokens, head_dim], after RoPE.
            value_states: the same shape.
            args: ignored, as in transformers' own layers.
            kwargs: ignored as well.

        Returns:
            K and V of all tokens in the model's dtype, those of packed tiles dequantized.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat((self.keys, key_states), dim=-2)
        self.values = torch.cat((self.values, value_states), dim=-2)
        states = self._unpacked()
        if not self.record_past:
            self._pack_full_tiles()
        return states

    def get_seq_length(self) -> int:
        """Tokens in the cache, exact and packed."""
        return self.keys.shape[-2] + self.packed_tokens if self.is_initialized else 0

    @property
    def packed_tokens(self) -> int:
        """Tokens held in records."""
        tiles = self.records.shape[-2] if self.is_initialized else 0
        return tiles * self.codec.settings.group_size

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, as long as they are exact.

        Args:
            tokens_to_remove: their number as a negative count, or 0.

        Raises:
            UsageError: the cut would open a packed tile, whose exact tokens are gone.
        """
        exact_tail = self.get_seq_length() - self.packed_tokens - self.codec.settings.sink_tokens
        if self.packed_tokens and -tokens_to_remove > exact_tail:
            raise UsageError(
                f"cannot remove {-tokens_to_remove} tokens: only the newest {exact_tail} are "
                "still exact, those before them are packed",
                hint="call activate_past_recording() before the steps that are to be undone",
            )
        super().crop(tokens_to_remove)
        if self.record_past and self.is_initialized:
            self._pack_full_tiles()

    def activate_past_recording(self) -> None:
        """Keep the tokens of each step exact until the `crop` that ends the step."""
        self.record_past = True

    def reset(self) -> None:
        """Forget all tokens and free their memory."""
        super().reset()
        self.records = torch.empty(0, dtype=torch.uint8)
        self.saturated_scales = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the chosen beams, [batch]."""
        self.batch_select_indices(beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        if self.is_initialized:
            self.records = self.records.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences with these indices."""
        super().batch_select_indices(indices)
        if self.is_initialized:
            self.records = self.records[indices]

    def _unpacked(self) -> tuple[Tensor, Tensor]:
        if not self.packed_tokens:
            return self.keys, self.values
        sink = self.codec.settings.sink_tokens
        keys, values = self.codec.decode(self.records)
        return _insert(self.keys, keys, sink), _insert(self.values, values, sink)

    def _pack_full_tiles(self) -> None:
        settings = self.codec.settings
        new_tokens = settings.packed_tokens(self.get_seq_length()) - self.packed_tokens
        if not new_tokens:
            return
        sink, end = settings.sink_tokens, settings.sink_tokens + new_tokens
        with watch_saturation() as saturated:
            records = self.codec.encode(self.keys[..., sink:end, :], self.values[..., sink:end, :])
        self.saturated_scales += saturated.count
        self.records = torch.cat((self.records, records), dim=-2)
        self.keys = torch.cat((self.keys[..., :sink, :], self.keys[..., end:, :]), dim=-2)
        self.values = torch.cat((self.values[..., :sink, :], self.values[..., end:, :]), dim=-2)


class KVarNIndexedLayer(KVarNLayer, DynamicIndexedLayer):
    """A `KVarNLayer` of sparse attention, whose indexer's keys stay as transformers keeps them."""


def _insert(exact: Tensor, packed: Tensor, sink: int) -> Tensor:
    head, tail = exact[..., :sink, :], exact[..., sink:, :]
    return torch.cat((head, packed.to(exact.dtype), tail), dim=-2)


class KVarNCache(Cache):
    """A transformers cache whose full-attention layers store K and V as packed records.

    Pass it to a forward pass or to `model.generate` as `cache`. Layers with a sliding window or a
    recurrent state keep transformers' own cache.

    Args:
        config: of the model.
        settings: of the quantizer.
        fused: True when the rotation of V, or of the latent, is fused into the model's weights.
        covered: indices of the layers to pack; None means every full-attention layer.

    Raises:
        UnsupportedModelError: the model keeps no K and V per layer, its heads have a width that
            no record holds, or `covered` names a layer without full attention.
        UsageError: the settings are of a latent cache and the model has none, or vice versa.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        settings: KVarNSettings,
        *,
        fused: bool = False,
        covered: Collection[int] | None = None,
    ) -> None:
        self.settings = settings
        full_attention = covered_layers(config)
        self.covered = full_attention if covered is None else tuple(sorted(covered))
        if others := sorted(set(self.covered) - set(full_attention)):
            raise UnsupportedModelError(
                f"layer {others[0]} of {config.model_type} has no full attention to pack",
                hint="leave layers with a sliding window or a recurrent state out",
            )
        check_fit(config, settings)
        width, rope_dim = attention_head_dim(config), rope_key_dim(config)
        codec = codec_for(settings, width, width if rope_dim is None else rope_dim, fused=fused)
        layers = DynamicCache(config=config).layers
        for index in self.covered:
            indexed = isinstance(layers[index], DynamicIndexedLayer)
            layers[index] = KVarNIndexedLayer(codec) if indexed else KVarNLayer(codec)
        super().__init__(layers=layers)

    @classmethod
    def from_model(cls, model: PreTrainedModel, settings: KVarNSettings | None = None) -> Self:
        """A cache for a converted model, or for any model with settings given.

        Args:
            model: its config is read; a `kvarn_config` block says whether V is rotated already.
            settings: replace those of the block.

        Raises:
            UsageError: the model is not converted and no settings are given.
            CheckpointError: the block is broken, or describes another model.
        """
        block = described_cache(model.config)
        if block is not None:
            return cls(
                model.config,
                settings or block.cache.settings,
                fused=block.fused,
                covered=block.layers.covered,
            )
        if settings is None:
            raise UsageError(
                "the model's configuration has no kvarn_config",
                hint='give settings, e.g. KVarNSettings.from_name("k4v2_g128")',
            )
        return cls(model.config, settings)

    def saturated_scales(self) -> dict[int, int]:
        """Stored scales that had to be clamped, by layer, where there are any."""
        return {
            index: layer.saturated_scales
            for index, layer in enumerate(self.layers)
            if isinstance(layer, KVarNLayer) and layer.saturated_scales
        }

    def memory_bytes(self) -> CacheMemory:
        """Bytes held now, and what a 16-bit cache of the same tokens would hold."""
        held = elements = 0
        for layer in self.layers:
            if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
                continue
            for states in (layer.keys, layer.values):
                if states is not None:
                    held += states.nbytes
                    elements += states.numel()
            if isinstance(layer, KVarNLayer):
                batch, heads = layer.records.shape[:2]
                held += layer.records.nbytes
                elements += batch * heads * layer.packed_tokens * sum(layer.codec.widths)
        return CacheMemory(held, 2 * elements)
