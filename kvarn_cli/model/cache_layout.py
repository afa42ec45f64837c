"""Which layers have a KV cache, and of what width, as the configuration says.

This is all that the *online* rotation needs, so it holds for any layout of the weights, quantized
weights too. What the *fused* rotation needs on top is in `layout`.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.runtime.coverage import (
    architecture_of,
    attention_head_dim,
    covered_layers,
    left_out_layers,
    positive_number,
)

_OTHER_STRUCTURES = {
    "text_config": "the language model's configuration is nested",
    "is_encoder_decoder": "the model has an encoder and cross-attention",
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


def find_cache_layout(config: PreTrainedConfig) -> CacheLayout:
    """Read which layers have a KV cache, and its head width, from a configuration.

    Args:
        config: as transformers reads config.json.

    Raises:
        UnsupportedModelError: the cache is of a kind or width that no KVarN cache takes.
    """
    for key, meaning in _OTHER_STRUCTURES.items():
        if getattr(config, key, None):
            raise UnsupportedModelError(
                f"{architecture_of(config)} has {key} in its configuration: {meaning}",
                hint="supported are plain decoders, such as Llama, Mistral, Qwen2 and Qwen3",
            )
    covered = covered_layers(config)
    num_heads = positive_number(config, "num_attention_heads")
    num_kv_heads = num_heads
    if getattr(config, "num_key_value_heads", None) is not None:
        num_kv_heads = positive_number(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly"
        )
    return CacheLayout(
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=attention_head_dim(config),
        covered=covered,
        left_out=tuple(
            LeftOutLayer(index, reason) for index, reason in left_out_layers(config).items()
        ),
    )
