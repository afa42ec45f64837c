"""Where V and O live in a checkpoint: names and shapes, no mathematics.

Everything about it is an allow-list: a tensor in an attention block that is not known to leave
`(A V) R` alone is a reason to refuse the fused rotation.

Llama-like means `…layers.{i}.self_attn.{q,k,v,o}_proj`, with or without biases and q/k norms:
Llama, Mistral, Qwen2, Qwen3 and their relatives. The prefix before `layers` may vary.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_layout import CacheLayout, LeftOutLayer, find_cache_layout
from kvarn_cli.runtime.coverage import positive_number

FUSIBLE_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes whose tensors can be rotated, by their name in safetensors."""

ONLINE_HINT = "use --rotation online, which changes no weight"
_ATTENTION = re.compile(
    r"(?P<prefix>(?:.*\.)?)layers\.(?P<index>[0-9]{1,6})\.self_attn\.(?P<part>.+)"
)
_KNOWN_BESIDE_PROJECTIONS = {"q_norm.weight", "k_norm.weight", "rotary_emb.inv_freq"}
_JOINED_PROJECTIONS = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "kv_b_proj")


@dataclass(frozen=True)
class AttentionLayer:
    """The tensors of one layer that the fused rotation changes, by name.

    Attributes:
        index: the layer.
        value_weight: W_V, [num_kv_heads * head_dim, hidden_size].
        value_bias: b_V, [num_kv_heads * head_dim], or None.
        output_weight: W_O, [hidden_size, num_heads * head_dim]; its bias is never changed.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: channels of a head.
    """

    index: int
    value_weight: str
    value_bias: str | None
    output_weight: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def value_tensors(self) -> tuple[str, ...]:
        """W_V and, where there is one, b_V."""
        return (
            (self.value_weight,)
            if self.value_bias is None
            else (self.value_weight, self.value_bias)
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that change."""
        return (*self.value_tensors, self.output_weight)


@dataclass(frozen=True)
class ModelLayout:
    """Everything the fused rotation needs to know: the cache, and V and O of each layer.

    V and O are listed for every layer, those outside the quantized cache too, so that all
    layers of a fused checkpoint hold V in one basis.
    """

    cache: CacheLayout
    layers: tuple[AttentionLayer, ...]

    @property
    def left_out(self) -> tuple[LeftOutLayer, ...]:
        """Layers outside the quantized cache."""
        return self.cache.left_out


def find_layout(config: PreTrainedConfig, tensors: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    """Find V and O of every decoder layer, or say what stands in the way of fusing them.

    Args:
        config: as for `find_cache_layout`.
        tensors: shape of each tensor of the checkpoint, by name.

    Raises:
        UnsupportedModelError: the cache is unsupported, the weights are quantized, a tensor is
            missing or has an unexpected shape, or an attention block holds a tensor that may
            change the attention output before W_O.
    """
    cache = find_cache_layout(config)
    _refuse_quantized(config)
    blocks = _attention_blocks(tensors)
    prefix = _decoder_prefix(blocks, tensors, cache.num_layers)
    hidden_size = positive_number(config, "hidden_size")
    layers = []
    for index in range(cache.num_layers):
        block = f"{prefix}layers.{index}.self_attn."
        layers.append(_attention_layer(block, index, tensors, cache, hidden_size))
        _refuse_unknown_parts(block, blocks[prefix][index])
    return ModelLayout(cache, tuple(layers))


def check_dtypes(layout: ModelLayout, dtypes: Mapping[str, str]) -> None:
    """Refuse V and O that are not stored as plain floating-point numbers.

    Args:
        layout: where V and O live.
        dtypes: safetensors' name of each tensor's dtype, such as `BF16`, by tensor name.

    Raises:
        UnsupportedModelError: a tensor to be fused has another dtype than `FUSIBLE_DTYPES`.
    """
    for layer in layout.layers:
        for name in layer.tensors:
            if dtypes[name] not in FUSIBLE_DTYPES:
                raise UnsupportedModelError(
                    f"{name} is stored as {dtypes[name]}; a rotation needs "
                    f"{', '.join(FUSIBLE_DTYPES)}",
                    hint=f"fuse the checkpoint before quantizing it, or {ONLINE_HINT}",
                )


def _refuse_quantized(config: PreTrainedConfig) -> None:
    values = config.to_dict()
    quantization = values.get("quantization_config") or values.get("compression_config")
    if not quantization:
        return
    method = quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed"
    raise UnsupportedModelError(
        f"the weights are quantized already (quantization_config: {method})",
        hint=f"fuse the unquantized checkpoint and quantize the result, or {ONLINE_HINT}",
    )


def _attention_blocks(
    tensors: Mapping[str, tuple[int, ...]],
) -> dict[str, dict[int, list[str]]]:
    """Names behind `self_attn.`, by prefix and layer."""
    blocks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in tensors:
        if match := _ATTENTION.fullmatch(name):
            blocks[match["prefix"]][int(match["index"])].append(match["part"])
    return blocks


def _decoder_prefix(
    blocks: Mapping[str, Mapping[int, list[str]]],
    tensors: Mapping[str, tuple[int, ...]],
    num_layers: int,
) -> str:
    for name in tensors:
        joined = next((part for part in _JOINED_PROJECTIONS if part in name.split(".")), None)
        if joined is not None:
            raise UnsupportedModelError(
                f"{name}: attention with {joined} is a layout that cannot be fused yet",
                hint=f"separate v_proj and o_proj can be fused; for this model {ONLINE_HINT}",
            )
    if not blocks:
        raise UnsupportedModelError(
            "no tensor is named …layers.0.self_attn.v_proj.weight", hint=ONLINE_HINT
        )
    complete = [
        prefix for prefix, layers in blocks.items() if set(range(num_layers)) <= set(layers)
    ]
    if len(complete) > 1:
        raise UnsupportedModelError(
            f"{' and '.join(f'{prefix}layers' for prefix in complete)} both look like the decoder",
            hint=ONLINE_HINT,
        )
    if complete:
        return complete[0]
    prefix = max(blocks, key=lambda candidate: len(blocks[candidate]))
    missing = min(set(range(num_layers)) - set(blocks[prefix]))
    raise UnsupportedModelError(
        f"{prefix}layers.{missing}.self_attn.v_proj.weight is missing", hint=ONLINE_HINT
    )


def _attention_layer(
    block: str,
    index: int,
    tensors: Mapping[str, tuple[int, ...]],
    cache: CacheLayout,
    hidden_size: int,
) -> AttentionLayer:
    query_width = cache.num_heads * cache.head_dim
    value_width = cache.num_kv_heads * cache.head_dim
    widths = {"q_proj": query_width, "k_proj": value_width, "v_proj": value_width}
    expected = {f"{name}.weight": (width, hidden_size) for name, width in widths.items()}
    expected["o_proj.weight"] = (hidden_size, query_width)
    biases = {f"{name}.bias": (width,) for name, width in widths.items()}
    biases["o_proj.bias"] = (hidden_size,)
    for part, shape in (expected | biases).items():
        found = tensors.get(block + part)
        if found is None and part in biases:
            continue
        if found is None:
            raise UnsupportedModelError(f"{block}{part} is missing", hint=ONLINE_HINT)
        if tuple(found) != shape:
            raise UnsupportedModelError(
                f"{block}{part} has shape {list(found)}; {cache.num_heads} query heads and "
                f"{cache.num_kv_heads} KV heads of width {cache.head_dim} need {list(shape)}",
                hint=ONLINE_HINT,
            )
    value_bias = f"{block}v_proj.bias"
    return AttentionLayer(
        index=index,
        value_weight=f"{block}v_proj.weight",
        value_bias=value_bias if value_bias in tensors else None,
        output_weight=f"{block}o_proj.weight",
        num_heads=cache.num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
    )


def _refuse_unknown_parts(block: str, parts: list[str]) -> None:
    projections = {f"{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")}
    unknown = sorted(set(parts) - projections - _KNOWN_BESIDE_PROJECTIONS)
    if unknown:
        raise UnsupportedModelError(
            f"{block}{unknown[0]} may act between attention and o_proj, so V cannot be fused",
            hint=ONLINE_HINT,
        )
