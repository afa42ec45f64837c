"""Which layers have a KV cache, and of what width, as the configuration says.

This is all that the *online* rotation needs, so it holds for any layout of the weights, quantized
weights too. What the *fused* rotation needs on top is in `layout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.settings import HEAD_DIMS

_EXACT_LAYERS = {
    "sliding_attention": "sliding-window attention; backends keep its cache exact",
    "chunked_attention": "chunked attention; backends keep its cache exact",
    "linear_attention": "linear attention; it has a state of fixed size and no KV cache",
}
_OTHER_CACHES = {
    "text_config": "the language model's configuration is nested",
    "is_encoder_decoder": "the model has an encoder and cross-attention",
    "kv_lora_rank": "the cache holds a latent (MLA), not keys and values",
    "per_layer_config": "layers differ in their shapes",
    "global_head_dim": "layers differ in their head width",
    "swa_head_dim": "layers differ in their head width",
    "v_head_dim": "K and V may differ in their head width",
    "num_kv_shared_layers": "some layers read the cache of another layer",
    "attention_k_eq_v": "some layers use K as V",
    "multi_query": "the number of KV heads is not num_key_value_heads",
}


@dataclass(frozen=True)
class LeftOutLayer:
    """A layer whose cache stays as it is, and why."""

    index: int
    reason: str


@dataclass(frozen=True)
class CacheLayout:
    """Which layers have a KV cache to quantize, and its shape.

    Attributes:
        num_layers: decoder layers.
        num_heads: query heads of a layer.
        num_kv_heads: KV heads of a layer.
        head_dim: channels of a head.
        covered: indices of the layers that attend to the whole context.
        left_out: the other layers.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    covered: tuple[int, ...]
    left_out: tuple[LeftOutLayer, ...]


def find_cache_layout(config: Mapping[str, Any]) -> CacheLayout:
    """Read which layers have a KV cache, and its head width, from a configuration.

    Args:
        config: contents of config.json as the configuration class completes them
            (`AutoConfig.from_pretrained(folder).to_dict()`); the file alone may lack defaults
            such as Mistral's sliding window.

    Raises:
        UnsupportedModelError: the cache is of a kind or width that no KVarN cache takes.
    """
    for key, meaning in _OTHER_CACHES.items():
        if config.get(key):
            raise UnsupportedModelError(
                f"{_architecture(config)} has {key} in its configuration: {meaning}",
                hint="supported are decoders with one KV cache shape in all layers, such as "
                "Llama, Mistral, Qwen2 and Qwen3",
            )
    num_layers = _positive(config, "num_hidden_layers")
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    if config.get("num_key_value_heads") is None:
        num_kv_heads = num_heads
    else:
        num_kv_heads = _positive(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly"
        )
    if config.get("head_dim") is not None:
        head_dim = _positive(config, "head_dim")
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise UnsupportedModelError(
            f"config.json gives no head_dim, and hidden_size {hidden_size} is no multiple of "
            f"{num_heads} heads"
        )
    _refuse_head_dim(head_dim)
    kinds = _layer_kinds(config, num_layers)
    return CacheLayout(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        covered=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        left_out=tuple(
            LeftOutLayer(i, _EXACT_LAYERS[kind])
            for i, kind in enumerate(kinds)
            if kind != "full_attention"
        ),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or [config.get("model_type") or "the model"]
    return str(architectures[0])


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(
            f"{_architecture(config)} has {key} {value!r} in its configuration; "
            "a positive number is needed",
            hint="supported are Llama-like configurations: Llama, Mistral, Qwen2, Qwen3",
        )
    return value


def _refuse_head_dim(head_dim: int) -> None:
    if head_dim in HEAD_DIMS:
        return
    distance = min(abs(width - head_dim) for width in HEAD_DIMS)
    nearest = " or ".join(str(width) for width in HEAD_DIMS if abs(width - head_dim) == distance)
    raise UnsupportedModelError(
        f"head_dim is {head_dim}; KVarN caches take {', '.join(map(str, HEAD_DIMS))}",
        hint=f"nearest is a model with head_dim {nearest}; --rotation online does not help, "
        "since K is rotated by a Hadamard matrix of the same width",
    )


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * num_layers
    if len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"layer_types names {len(kinds)} layers, num_hidden_layers {num_layers}"
        )
    for index, kind in enumerate(kinds):
        if kind != "full_attention" and kind not in _EXACT_LAYERS:
            raise UnsupportedModelError(
                f"layer {index} is of type {kind!r}, whose cache is not known",
                hint=f"known are full_attention, {', '.join(_EXACT_LAYERS)}",
            )
    return list(kinds)
