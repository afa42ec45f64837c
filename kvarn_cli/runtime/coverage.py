"""Which layers of a model a packed cache covers, judged from its configuration alone."""

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvarn_cli.errors import UnsupportedModelError


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
    text_config = config.get_text_config(decoder=True)
    _refuse_other_caches(text_config)
    kinds = {DynamicLayer, DynamicSlidingWindowLayer} if cover_sliding else {DynamicLayer}
    layers = DynamicCache(config=text_config).layers
    return tuple(index for index, layer in enumerate(layers) if type(layer) in kinds)


def attention_head_dim(config: PreTrainedConfig) -> int:
    """Width of one attention head: the configuration's own value, else hidden size / heads."""
    text_config = config.get_text_config(decoder=True)
    head_dim = getattr(text_config, "head_dim", None)
    return int(head_dim or text_config.hidden_size // text_config.num_attention_heads)


def _refuse_other_caches(text_config: PreTrainedConfig) -> None:
    name = text_config.model_type
    if getattr(text_config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"{name} caches a latent (multi-head latent attention) instead of keys and values",
            hint="models with grouped or plain multi-head attention work",
        )
    sharing = getattr(text_config, "kv_sharing_modes", None) or ()
    if "reuse" in sharing:
        raise UnsupportedModelError(
            f"layer {list(sharing).index('reuse')} of {name} attends to another layer's cache",
            hint="models whose layers each have keys and values of their own work",
        )
