"""Which layers of a model a packed cache covers, and how wide a head is, by configuration alone.

This is the one place that decides both; conversion, measurement and the cache ask here. Which
layers keep a cache that grows with the sequence is transformers' own answer, since its model code
acts on it.
"""

from collections.abc import Mapping
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvarn_cli.errors import UnsupportedModelError, UsageError
from kvarn_cli.settings import DEFAULT_LATENT_PRESET, DEFAULT_PRESET, HEAD_DIMS, KVarNSettings

_OTHER_CACHES = {
    "is_heterogeneous": "layers differ in their shapes",
    "global_head_dim": "layers differ in their head width",
    "swa_head_dim": "layers differ in their head width",
    "v_head_dim": "K and V may differ in their head width",
    "num_kv_shared_layers": "some layers read the cache of another layer",
    "kv_sharing_modes": "some layers read the cache of another layer",
    "attention_k_eq_v": "some layers use K as V",
    "multi_query": "the number of KV heads is not num_key_value_heads",
}
_GROWING_LAYERS = {DynamicLayer, DynamicIndexedLayer}
_EXACT_LAYERS: Mapping[type, str] = {
    DynamicSlidingWindowLayer: "attention through a window; backends keep its cache exact",
    LinearAttentionLayer: "its state has a fixed size; it has no KV cache",
    DummyLayer: "it has no KV cache",
}


def covered_layers(config: PreTrainedConfig, *, cover_sliding: bool = False) -> tuple[int, ...]:
    """Indices of the layers whose K and V are quantized.

    These are the layers for which transformers itself would keep a cache that grows with the
    sequence. Layers with a sliding window or with a recurrent state keep their own, small cache.

    Args:
        config: of the model; a text model nested inside it is found.
        cover_sliding: count layers with a sliding window as well.

    Raises:
        UnsupportedModelError: the model caches something other than one K and one V per layer.
    """
    kinds = _GROWING_LAYERS | ({DynamicSlidingWindowLayer} if cover_sliding else set())
    return tuple(index for index, kind in enumerate(_layer_kinds(config)) if kind in kinds)


def left_out_layers(config: PreTrainedConfig) -> dict[int, str]:
    """Why each of the other layers keeps its cache as it is, by index.

    Raises:
        UnsupportedModelError: as for `covered_layers`.
    """
    return {
        index: _EXACT_LAYERS.get(kind, f"its cache is transformers' {kind.__name__}")
        for index, kind in enumerate(_layer_kinds(config))
        if kind not in _GROWING_LAYERS
    }


def attention_head_dim(config: PreTrainedConfig) -> int:
    """Width of one attention head: the configuration's own value, else hidden size / heads.

    Of an MLA model it is the width of the latent, which is what its cache holds.

    Raises:
        UnsupportedModelError: no packed cache takes this width, or the configuration has none.
    """
    text_config = _text_config(config)
    if rope_key_dim(config) is not None:
        return _latent_dim(text_config)
    head_dim = getattr(text_config, "head_dim", None)
    if head_dim is None:
        hidden_size = positive_number(text_config, "hidden_size")
        num_heads = positive_number(text_config, "num_attention_heads")
        if hidden_size % num_heads:
            raise UnsupportedModelError(
                f"config.json gives no head_dim, and hidden_size {hidden_size} is no multiple of "
                f"{num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    if head_dim in HEAD_DIMS:
        return int(head_dim)
    raise UnsupportedModelError(
        f"head_dim is {head_dim}; KVarN caches take {', '.join(map(str, HEAD_DIMS))}",
        hint=f"{_nearest(head_dim)}--rotation online does not help, since K is rotated by a "
        "Hadamard matrix of the same width",
    )


def rope_key_dim(config: PreTrainedConfig) -> int | None:
    """Width of the RoPE key that an MLA model caches beside its latent.

    Returns:
        None for models that cache K and V; 0 where the latent is cached alone.
    """
    text_config = _text_config(config)
    if getattr(text_config, "is_heterogeneous", False):
        return None
    if not getattr(text_config, "kv_lora_rank", None):
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


def positive_number(config: PreTrainedConfig, name: str) -> int:
    """A whole number above 0 from a configuration.

    Raises:
        UnsupportedModelError: it is missing or something else.
    """
    value: Any = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(
            f"{architecture_of(config)} has {name} {value!r} in its configuration; "
            "a positive number is needed",
            hint="supported are Llama-like configurations: Llama, Mistral, Qwen2, Qwen3",
        )
    return value


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
            f"{architecture_of(config)} nests something that is no model's configuration"
        )
    return text_config


def _layer_kinds(config: PreTrainedConfig) -> list[type]:
    text_config = _text_config(config)
    latent = rope_key_dim(config) is not None
    for key, meaning in _OTHER_CACHES.items():
        if getattr(text_config, key, None) and not (latent and key == "v_head_dim"):
            raise UnsupportedModelError(
                f"{architecture_of(text_config)} has {key} in its configuration: {meaning}",
                hint="supported are decoders with one KV cache shape in all layers, such as "
                "Llama, Mistral, Qwen2, Qwen3 and DeepSeek V3",
            )
    positive_number(text_config, "num_hidden_layers")
    try:
        return [type(layer) for layer in DynamicCache(config=text_config).layers]
    except KeyError as error:
        raise UnsupportedModelError(
            f"{architecture_of(text_config)} has layers of type {error}, whose cache is not known"
        ) from error
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers makes no cache for {architecture_of(text_config)}: {error}",
            hint="a value in config.json may be wrong, such as sliding_window",
        ) from error


def _latent_dim(text_config: PreTrainedConfig) -> int:
    latent_dim = positive_number(text_config, "kv_lora_rank")
    if latent_dim in HEAD_DIMS:
        return latent_dim
    raise UnsupportedModelError(
        f"kv_lora_rank is {latent_dim}; KVarN caches take latents of "
        f"{', '.join(map(str, HEAD_DIMS))} channels",
        hint="the latent is rotated by a Hadamard matrix of its own width",
    )


def _nearest(head_dim: object) -> str:
    if not isinstance(head_dim, int):
        return ""
    distance = min(abs(width - head_dim) for width in HEAD_DIMS)
    nearest = [str(width) for width in HEAD_DIMS if abs(width - head_dim) == distance]
    return f"nearest is a model with head_dim {' or '.join(nearest)}; "
