"""A KV cache for transformers that keeps full tiles as packed records."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvarn_cli.errors import UnsupportedModelError, UsageError
from kvarn_cli.runtime.coverage import architecture_of, check_fit, covered_layers
from kvarn_cli.runtime.description import described_cache
from kvarn_cli.runtime.packed_layer import (
    RECORD_PAST_HINT,
    KVarNHybridLayer,
    KVarNIndexedLayer,
    KVarNLayer,
    LayerPlan,
)
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


class KVarNCache(Cache):
    """A transformers cache whose full-attention layers store K and V as packed records.

    Pass it to a forward pass or to `model.generate` as `cache`. Layers with a sliding window or a
    recurrent state keep transformers' own cache. Each layer may have heads of its own width, which
    the first states tell.

    Args:
        config: of the model.
        settings: of the quantizer.
        fused: True when the rotation of V, or of the latent, is fused into the model's weights.
        covered: indices of the layers to pack; None means every full-attention layer.
        head_dim: width of the heads that the model's `kvarn_config` promises; None if it has none.

    Raises:
        UnsupportedModelError: the model keeps no K and V per layer, or `covered` names a layer
            without full attention.
        UsageError: the settings are of a latent cache and the model has none, or vice versa.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        settings: KVarNSettings,
        *,
        fused: bool = False,
        covered: Collection[int] | None = None,
        head_dim: int | None = None,
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
        layers = DynamicCache(config=config).layers
        for index in self.covered:
            plan = LayerPlan(index, architecture_of(config), settings, fused, head_dim)
            layer = layers[index]
            if isinstance(layer, LinearAttentionLayer):
                layers[index] = KVarNHybridLayer(plan, layer.number_of_states)
            elif isinstance(layer, DynamicIndexedLayer):
                layers[index] = KVarNIndexedLayer(plan)
            else:
                layers[index] = KVarNLayer(plan)
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
                head_dim=block.cache.head_dim,
            )
        if settings is None:
            raise UsageError(
                "the model's configuration has no kvarn_config",
                hint='give settings, e.g. KVarNSettings.from_name("k4v2_g128")',
            )
        return cls(model.config, settings)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens from all layers, or refuse before any has changed.

        Args:
            tokens_to_remove: their number as a negative count, or 0.

        Raises:
            UsageError: a layer no longer holds what it held before those tokens.
        """
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVarNLayer):
                layer.check_crop(tokens_to_remove)
            if _forgets(layer):
                raise UsageError(
                    f"cannot remove tokens: layer {index} keeps a window or a state, and not "
                    "those of the past",
                    hint=RECORD_PAST_HINT,
                )
        super().crop(tokens_to_remove)

    def saturated_scales(self) -> dict[int, int]:
        """Numbers that had to be clamped, by layer, where there are any; see `KVarNLayer`."""
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


def _forgets(layer: object) -> bool:
    """Whether this layer gives up old states in each step, as transformers' small ones do."""
    if isinstance(layer, LinearAttentionLayer):
        return not layer.record_past
    if isinstance(layer, DynamicSlidingWindowLayer):
        return not layer.record_past and layer.get_seq_length() >= layer.sliding_window
    return False
