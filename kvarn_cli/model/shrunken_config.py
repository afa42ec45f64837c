"""Which numbers of a model's configuration can be cut without touching what attention computes.

What decides the arithmetic is kept: head widths, grouping of queries, the ranks of a latent cache,
one layer of each kind. What only costs time is cut: layers, heads, widths, experts, recurrent
states, vocabulary, towers for images and sound.

Which number is which is told by its name, after the configuration's own `attribute_map` has
translated it (`n_head`, `n_embd`, …). All widths shrink by the factor of the query heads, so what
was hidden_size = heads * head_dim, or twice that, stays so.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from transformers import PreTrainedConfig

VOCAB_SIZE = 128

_NUM_LAYERS = 2
_NUM_KV_HEADS = 2
_NUM_HEADS = 4
"""Where each query head has its own K and V; CodeGen divides them into quarters."""
_MAX_KINDS = 4
_HEADLESS_WIDTH = 64
_LIMITS: tuple[tuple[str, int], ...] = (
    (r".*vocab(_size.*)?", VOCAB_SIZE),
    (r".*intermediate.*|.*ffn_dim|ffn_hidden_size|feed_forward_size|d_inner|dim_ff|dff", 64),
    (r"router_hidden_size|prompt_mid_dim|.*_per_layer_input|ple_embed_dim", 32),
    (r"q_lora_rank|hc_lowrank|laurel_rank", 32),
    (r"linear_(key_|value_)?head_dim|.*(d_state|state_size)|.*dt_rank|time_step_rank", 16),
    (r".*experts|zero_expert_num", 4),
    (r".*per_tok(en)?|(moe_)?top_?k(_experts)?|moe_k", 2),
    (r"n_group|num_expert_group|topk_group|linear_num_(key_)?heads", 2),
    (r"(mamba_)?n_?groups", 1),
)
"""The largest value of a number, by its whole name; the first match counts."""

_ODD: Mapping[str, Mapping[str, Any]] = {
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": lambda config: config.num_hidden_layers - 1,
        "n_output_layers": 0,
    },
    "gpt_neo": {"attention_types": lambda config: [[config.attention_layers, 1]]},
    "hrm_text": {
        "num_layers_per_stack": 1,
        "num_hidden_layers": lambda config: config.H_cycles * (config.L_cycles + 1),
    },
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
}
"""Per model type, what no rule covers: values, or functions of the shrunken configuration."""

_STANDARD_NAMES = {
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
}

_KV_HEADS = re.compile(r"(.*_)?(key_value|kv|kv_n)_heads")
_HEADS = re.compile(r"(.*_)?attention_heads(_per_layer)?|n_heads?|num_heads")
_WIDTHS = re.compile(
    r"(.*_)?(hidden_size|d_model|n_embd|embedding_size|embed(ding)?_dim|emb_dim)"
    r"|word_embed_proj_dim|lru_width"
)
_DECODER_WIDTHS = re.compile(r"(out|text)_hidden_size")
_STATE_HEADS = re.compile(r"mamba_(n|num)_heads|n_mamba_heads|mamba_d_ssm")
_STATE_WIDTHS = re.compile(r"mamba_(d_head|headdim|head_dim)")
_LAYERS = re.compile(r"num_hidden_layers|(num_)?((en|de)coder_)?layers|n_layers?|num_blocks|depth")
_LEADING_LAYERS = re.compile(
    r"first_k_dense_replace|num_dense_layers|max_window_layers|loop_layer_index_(start|end)"
)
_TRAILING_LAYERS = "num_kv_shared_layers"
_NOT_PER_LAYER = re.compile(r".*(token_ids?|multipliers|limit)")
_TOKEN_IDS = re.compile(r".*(token_ids?|token_index)")
_TOWERS = re.compile(r".*(vision|audio|image|speech|encoder|vq|depth).*")


def cut_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A small copy of a configuration; see `shrunken.shrink_config`."""
    small = copy.deepcopy(config)
    decoder = _Numbers(config.get_text_config(decoder=True))
    _shrink(small, decoder, decoder)
    return small


class _Numbers:
    """How the numbers of a language model, or of a tower beside it, shrink."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.values = {name: value for name, _, value in _entries(config)}
        self.num_layers = self._number(("num_hidden_layers",), 0)
        overrides = vars(config).get("_heterogeneity_spec")
        self.overrides = overrides.per_layer_overrides if overrides else {}
        self.kept = self._kept_layers(config)
        self.num_heads = self._number(("num_attention_heads", "num_heads"), 0)
        kv_names = [name for name in self.values if _KV_HEADS.fullmatch(name)]
        self.num_kv_heads = self._number(("num_key_value_heads", *kv_names), self.num_heads)
        self.max_kv_heads = _NUM_KV_HEADS if kv_names else _NUM_HEADS
        hidden_size = self._number(("hidden_size",), 1)
        head_dim = self._number(("head_dim",), hidden_size // max(self.num_heads, 1))
        self.max_group = 4 if head_dim <= 64 else 2
        if self.num_heads:
            small_heads = self.heads("num_attention_heads", self.num_heads)
            self.factor = Fraction(small_heads, self.num_heads)
        else:
            self.factor = Fraction(min(hidden_size, _HEADLESS_WIDTH), hidden_size)

    def small(self, name: str, value: Any) -> Any:
        """A value of the configuration, cut down to what the kept layers need."""
        if isinstance(value, list):
            return self._small_list(name, value)
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if name == _TRAILING_LAYERS:
            return sum(index >= self.num_layers - value for index in self.kept)
        if _LEADING_LAYERS.fullmatch(name):
            return sum(index < value for index in self.kept)
        if _LAYERS.fullmatch(name):
            return min(value, len(self.kept) or _NUM_LAYERS)
        return self._small_number(name, value)

    def small_overrides(self, layer: int) -> dict[str, Any]:
        """What the configuration says of one layer alone, cut down."""
        overrides = self.overrides.get(layer, {})
        return {name: self.small(name, value) for name, value in overrides.items()}

    def heads(self, name: str, value: int) -> int:
        """Query heads for `value` of them: as many for each KV head as before, up to a few."""
        partner = self.values.get(name.replace("attention_heads", "key_value_heads"))
        num_kv_heads = partner if isinstance(partner, int) and partner else self.num_kv_heads or 1
        group = min(max(value // num_kv_heads, 1), self.max_group)
        return min(num_kv_heads, self.max_kv_heads) * group

    def _small_number(self, name: str, value: int) -> int:
        if _KV_HEADS.fullmatch(name):
            return min(value, self.max_kv_heads)
        if _HEADS.fullmatch(name):
            return self.heads(name, value)
        if _WIDTHS.fullmatch(name):
            scaled = value * self.factor
            return int(scaled) if scaled.denominator == 1 else -(-scaled // 32) * 32
        if _STATE_HEADS.fullmatch(name):
            return self._divided(value)
        if _STATE_WIDTHS.fullmatch(name):
            heads = next(v for key, v in self.values.items() if _STATE_HEADS.fullmatch(key))
            return value if self._divided(heads) != heads else self._divided(value)
        return _limited(name, value)

    def _small_list(self, name: str, value: list[Any]) -> list[Any]:
        if _rises(value, self.num_layers):
            return [self.kept.index(index) for index in value if index in self.kept]
        if len(value) == self.num_layers and not _NOT_PER_LAYER.fullmatch(name):
            value = [value[index] for index in self.kept]
        return [self.small(name, item) for item in value]

    def _divided(self, value: int) -> int:
        scaled = value * self.factor
        return int(scaled) if scaled.denominator == 1 else value

    def _kept_layers(self, config: PreTrainedConfig) -> list[int]:
        """The first layer of each kind, by whatever tells layers apart."""
        layers = range(self.num_layers)
        types = getattr(config, "layer_types", None)
        features: list[list[Any]] = [types or [], [self.overrides.get(layer) for layer in layers]]
        for name, value in self.values.items():
            if isinstance(value, list) and _rises(value, self.num_layers):
                features.append([layer in value for layer in layers])
            elif isinstance(value, list) and not _NOT_PER_LAYER.fullmatch(name):
                features.append(value)
            elif isinstance(value, int) and _LEADING_LAYERS.fullmatch(name):
                features.append([layer < value for layer in layers])
            elif isinstance(value, int) and name == _TRAILING_LAYERS:
                first = self.num_layers - value
                kinds = types or [None] * self.num_layers
                features.append([(kind, layer >= first) for layer, kind in enumerate(kinds)])
        kept: set[int] = set()
        for feature in features:
            if len(feature) == self.num_layers:
                kinds = [repr(item) for item in feature]
                kept |= set(sorted(kinds.index(kind) for kind in set(kinds))[:_MAX_KINDS])
        while len(kept) < min(self.num_layers, _NUM_LAYERS):
            kept.add(next(layer for layer in layers if layer not in kept))
        if types and "layer_types" not in self.values:
            return list(range(max(kept) + 1))
        return sorted(kept)

    def _number(self, names: Iterable[str], default: int) -> int:
        found = (self.values.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), default)


def _shrink(config: PreTrainedConfig, numbers: _Numbers, decoder: _Numbers) -> None:
    """Cut a configuration and what is nested in it down, by its own numbers.

    What a tower gives to the decoder is as wide as the decoder.
    """
    overrides = vars(config).pop("_heterogeneity_spec", None)
    for name, attribute, value in list(_entries(config)):
        if isinstance(value, PreTrainedConfig):
            is_tower = _TOWERS.fullmatch(attribute)
            _shrink(value, _Numbers(value) if is_tower else numbers, decoder)
        elif _TOKEN_IDS.fullmatch(name):
            setattr(config, attribute, _clamp_ids(value))
        elif value is not None:
            rules = decoder if _DECODER_WIDTHS.fullmatch(name) else numbers
            if (small := rules.small(name, value)) != value:
                setattr(config, attribute, small)
    if overrides is not None:
        config.per_layer_config = {
            index: numbers.small_overrides(layer) for index, layer in enumerate(numbers.kept)
        }
    for name, value in _ODD.get(config.model_type, {}).items():
        setattr(config, name, value(config) if callable(value) else value)


def _limited(name: str, value: int) -> int:
    limits = (limit for pattern, limit in _LIMITS if re.fullmatch(pattern, name))
    return min(value, next(limits, value))


def _entries(config: PreTrainedConfig) -> Iterable[tuple[str, str, Any]]:
    """Standard name, attribute and value of everything a configuration holds itself."""
    standard = {
        attribute: name
        for name, attribute in config.attribute_map.items()
        if name in _STANDARD_NAMES
    }
    for attribute, value in vars(config).items():
        if not attribute.startswith("_"):
            yield standard.get(attribute, attribute), attribute, value


def _rises(value: list[Any], num_layers: int) -> bool:
    """Whether a list names layers by their index."""
    numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    return bool(value) and numbers and value == sorted(set(value)) and value[-1] < num_layers


def _clamp_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_clamp_ids(item) for item in value]
    return min(value, VOCAB_SIZE - 1) if isinstance(value, int) else value
