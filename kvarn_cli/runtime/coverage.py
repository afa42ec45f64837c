"""Which layers of a model a packed cache covers, and which widths of heads it takes.

This is the one place that decides both; conversion, measurement and the cache ask here. Which
layers keep a cache that grows with the sequence is transformers' own answer, since its model code
acts on it. How wide the cached states are, only the states themselves tell.
"""

from collections.abc import Mapping
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvarn_cli.errors import UnsupportedModelError, UsageError
from kvarn_cli.settings import DEFAULT_LATENT_PRESET, DEFAULT_PRESET, HEAD_DIMS, KVarNSettings


class _CrossAttention:
    """Stands for a layer that attends to an encoder's states, of which text alone has none."""


_FULL_ATTENTION = {DynamicLayer, DynamicIndexedLayer, LinearAttentionAndFullAttentionLayer}
_SLIDING = {DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer}
_WINDOW = "attention through a window; backends keep its cache exact"
_EXACT_LAYERS: Mapping[type, str] = {
    DynamicSlidingWindowLayer: _WINDOW,
    LinearAttentionAndSlidingWindowAttentionLayer: _WINDOW,
    LinearAttentionLayer: "its state has a fixed size; it has no KV cache",
    DummyLayer: "it has no KV cache of its own",
    _CrossAttention: "it attends to an image; its cache does not grow with the text",
}


def covered_layers(config: PreTrainedConfig, *, cover_sliding: bool = False) -> tuple[int, ...]:
    """Indices of the layers whose K and V are quantized.

    These are the layers for which transformers itself would keep a cache that grows with the
    sequence. Layers with a sliding window or with nothing but a recurrent state keep their own,
    small cache, that of layers that attend to an image does not grow with the text, and layers
    that read the cache of another layer have none.

    Args:
        config: of the model; a text model nested inside it is found.
        cover_sliding: count layers with a sliding window as well.

    Raises:
        UnsupportedModelError: the model caches something other than one K and one V per layer.
    """
    kinds = _FULL_ATTENTION | _SLIDING if cover_sliding else _FULL_ATTENTION
    return tuple(index for index, kind in enumerate(_layer_kinds(config)) if kind in kinds)


def left_out_layers(config: PreTrainedConfig) -> dict[int, str]:
    """Why each of the other layers keeps its cache as it is, by index.

    Raises:
        UnsupportedModelError: as for `covered_layers`.
    """
    return {
        index: _EXACT_LAYERS.get(kind, f"its cache is transformers' {kind.__name__}")
        for index, kind in enumerate(_layer_kinds(config))
        if kind not in _FULL_ATTENTION
    }


def check_widths(
    architecture: str, layer: int, key_width: int, value_width: int, *, latent: bool = False
) -> None:
    """Refuse states that no record holds.

    Args:
        architecture: name of the model's class or type.
        layer: index of the layer that caches them.
        key_width: channels of a head of keys, or of the latent.
        value_width: channels of a head of values, or of the RoPE key.
        latent: whether a latent and a RoPE key are cached, which differ in width.

    Raises:
        UnsupportedModelError: keys and values differ in width, or no record has this width.
    """
    if key_width != value_width and not latent:
        raise UnsupportedModelError(
            f"layer {layer} of {architecture} caches keys {key_width} and values {value_width} "
            "wide; a KVarN record holds both in one width",
            hint="no preset and no rotation changes that; take a model with keys and values of one "
            "width, or with a latent cache (MLA)",
        )
    if key_width not in HEAD_DIMS:
        what, rotated = ("kv_lora_rank", "the latent") if latent else ("head_dim", "K")
        distance = min(abs(known - key_width) for known in HEAD_DIMS)
        near = " or ".join(str(known) for known in HEAD_DIMS if abs(known - key_width) == distance)
        raise UnsupportedModelError(
            f"{what} is {key_width} in layer {layer} of {architecture}; KVarN caches take "
            f"{', '.join(map(str, HEAD_DIMS))}",
            hint=f"nearest is a model with {what} {near}; --rotation online does not help, since "
            f"{rotated} is rotated by a Hadamard matrix of the same width",
        )


def rope_key_dim(config: PreTrainedConfig) -> int | None:
    """Width of the RoPE key that an MLA model caches beside its latent.

    Returns:
        None for models that cache K and V, or latents of several widths; 0 where the latent is
        cached alone.
    """
    text_config = _text_config(config)
    if text_config.is_heterogeneous or not getattr(text_config, "kv_lora_rank", None):
        return None
    return int(getattr(text_config, "qk_rope_head_dim", None) or 0)


def check_fit(config: PreTrainedConfig, settings: KVarNSettings) -> None:
    """Refuse settings of a latent cache for a model without a latent, and the other way round.

    Raises:
        UsageError: naming a preset that fits.
    """
    latent = rope_key_dim(config) is not None
    if latent == settings.latent:
        return
    cached = "a latent (MLA)" if latent else "K and V, no latent"
    raise UsageError(
        f"{settings.name} does not fit {architecture_of(config)}, which caches {cached}",
        hint=f"use {DEFAULT_LATENT_PRESET if latent else DEFAULT_PRESET}",
    )


def architecture_of(config: PreTrainedConfig) -> str:
    """The name of the model's class, or of its type where the configuration names no class."""
    architectures: Any = config.architectures
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return str(config.model_type or "the model")


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    text_config: Any = config.get_text_config(decoder=True)
    if not isinstance(text_config, PreTrainedConfig):
        raise UnsupportedModelError(
            f"{architecture_of(config)} nests something that is no model's configuration",
            hint="a value in config.json may be wrong, such as text_config or decoder",
        )
    return text_config


def _layer_kinds(config: PreTrainedConfig) -> list[type]:
    text_config = _text_config(config)
    architecture = architecture_of(text_config)
    num_layers: Any = getattr(text_config, "num_hidden_layers", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UnsupportedModelError(
            f"{architecture} has num_hidden_layers {num_layers!r} in its configuration; "
            "a positive number is needed",
            hint="config.json may be of another kind of model, or its text_config may lack it",
        )
    try:
        kinds: list[type] = [type(layer) for layer in DynamicCache(config=text_config).layers]
    except KeyError as error:
        raise UnsupportedModelError(
            f"{architecture} has layers of type {error}, whose cache is not known",
            hint="a value in layer_types of config.json may be wrong, or a newer release of "
            "transformers may know it",
        ) from error
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers makes no cache for {architecture}: {error}",
            hint="a value in config.json may be wrong, such as sliding_window",
        ) from error
    readers: Any = getattr(text_config, "num_kv_shared_layers", None)
    if isinstance(readers, int) and readers > 0:
        first = max(len(kinds) - readers, 0)
        kinds[first:] = [DummyLayer] * (len(kinds) - first)
    cross: Any = getattr(text_config, "cross_attention_layers", None)
    if isinstance(cross, list):
        kinds = [_CrossAttention if i in cross else kind for i, kind in enumerate(kinds)]
    return kinds
