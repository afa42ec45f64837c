"""One layer of a KV cache that keeps full tiles as packed records.

The first `sink_tokens` tokens and the newest, incomplete tile stay in the model's own dtype. A
tile is packed *after* the step that fills it: the tokens of one step attend exactly to one another
and to dequantized tiles from before the step. Dequantized tiles live for one attention call.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer

from kvarn_cli.errors import CheckpointError, UsageError
from kvarn_cli.metadata import CONFIG_KEY
from kvarn_cli.quantization.latent_codec import LatentCodec, codec_for
from kvarn_cli.quantization.saturation import watch_saturation
from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.runtime.coverage import check_widths
from kvarn_cli.settings import KVarNSettings

RECORD_PAST_HINT = "call activate_past_recording() before the steps that are to be undone"


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is packed.

    Attributes:
        index: of the layer.
        architecture: of the model, for messages.
        settings: of the quantizer.
        fused: the model's V arrives already rotated.
        head_dim: the width that the model's `kvarn_config` promises, if it has one.
    """

    index: int
    architecture: str
    settings: KVarNSettings
    fused: bool
    head_dim: int | None

    def codec(self, key_states: Tensor, value_states: Tensor) -> TileCodec | LatentCodec:
        """The codec for states like these.

        Raises:
            CheckpointError: they are not as wide as the model's `kvarn_config` says.
            UnsupportedModelError: no record holds them.
        """
        widths = key_states.shape[-1], value_states.shape[-1]
        if self.head_dim is not None and key_states.shape[-1] != self.head_dim:
            raise CheckpointError(
                f"config.json: {CONFIG_KEY} describes heads {self.head_dim} wide, and layer "
                f"{self.index} caches keys {widths[0]} and values {widths[1]} wide"
            )
        check_widths(self.architecture, self.index, *widths, latent=self.settings.latent)
        return codec_for(self.settings, *widths, fused=self.fused)


class KVarNLayer(DynamicLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """The cache of one full-attention layer.

    `keys` and `values` hold the exact tokens, the sink followed by the tail,
    [batch, kv_heads, tokens, head_dim]; `records` holds the packed tiles between them, uint8
    [batch, kv_heads, tiles, record_bytes]. An MLA layer has one KV head, whose `keys` are latents
    and whose `values` are RoPE keys.

    `saturated_scales` counts stored scales, and RoPE keys, that had to be clamped.

    After `activate_past_recording` packing waits for the `crop` that ends each step, so that
    rejected draft tokens never enter a tile.
    """

    keys: Tensor
    values: Tensor
    records: Tensor
    codec: TileCodec | LatentCodec

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.settings = plan.settings
        self.record_past = False
        self.saturated_scales = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start empty, with the shapes, dtype and device of the first states.

        Raises:
            CheckpointError: the states are not as wide as the model's `kvarn_config` says.
            UnsupportedModelError: no record holds states like these.
        """
        self.codec = self.plan.codec(key_states, value_states)
        batch, heads = key_states.shape[:2]
        key_width, value_width = self.codec.widths
        record_bytes = self.codec.record_bytes
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(batch, heads, 0, key_width)
        self.values = value_states.new_empty(batch, heads, 0, value_width)
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
        return tiles * self.settings.group_size

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, as long as they are exact.

        Args:
            tokens_to_remove: their number as a negative count, or 0.

        Raises:
            UsageError: see `check_crop`; nothing has changed.
        """
        self.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if self.record_past and self.is_initialized:
            self._pack_full_tiles()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` cannot do, and change nothing.

        Raises:
            UsageError: the cut would open a packed tile, whose exact tokens are gone.
        """
        exact_tail = self.get_seq_length() - self.packed_tokens - self.settings.sink_tokens
        if self.packed_tokens and -tokens_to_remove > exact_tail:
            raise UsageError(
                f"cannot remove {-tokens_to_remove} tokens: only the newest {exact_tail} are "
                "still exact, those before them are packed",
                hint=RECORD_PAST_HINT,
            )

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
        sink = self.settings.sink_tokens
        keys, values = self.codec.decode(self.records)
        return _insert(self.keys, keys, sink), _insert(self.values, values, sink)

    def _pack_full_tiles(self) -> None:
        settings = self.settings
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


class KVarNHybridLayer(  # type: ignore[misc, override, unused-ignore]
    LinearAttentionLayer, KVarNLayer
):
    """A `KVarNLayer` with recurrent states beside its K and V, which stay as they are."""

    def __init__(self, plan: LayerPlan, number_of_states: int) -> None:
        KVarNLayer.__init__(self, plan)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(  # type: ignore[override]
        self, *states: Tensor, **recurrent: Any
    ) -> None:
        """Start with K and V given by position, or with recurrent states given by name."""
        if states:
            KVarNLayer.lazy_initialization(self, *states)
        else:
            LinearAttentionLayer.lazy_initialization(self, **recurrent)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens from both; see `KVarNLayer.crop` and transformers' own."""
        self.check_crop(tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)
        KVarNLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        KVarNLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the chosen beams, [batch]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        sequences = torch.arange(len(self.keys) if self.is_initialized else 0)
        self.batch_select_indices(sequences.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences with these indices."""
        LinearAttentionLayer.reorder_cache(self, indices)  # type: ignore[arg-type]  # any integers do
        KVarNLayer.batch_select_indices(self, indices.to(self.device))


def _insert(exact: Tensor, packed: Tensor, sink: int) -> Tensor:
    head, tail = exact[..., :sink, :], exact[..., sink:, :]
    return torch.cat((head, packed.to(exact.dtype), tail), dim=-2)
