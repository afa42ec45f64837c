"""A tiny random model of every class for text that transformers can instantiate.

Their configurations are the classes' own defaults, shrunken by the very rules that proofs use.
Where a default cannot be instantiated, or has heads of a width that no cache takes, a few values
are replaced, so that the class itself is exercised and not the refusal of its numbers.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvarn_cli.model.shrunken import build_random_model, shrink_config

CLASSES = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""Class by model type: the causal one, or else the one that reads images as well."""

MODEL_TYPES = tuple(sorted(CLASSES))

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_MROPE = {**_DEFAULT_ROPE, "mrope_section": [16, 24, 24]}
_QWEN4_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}
_REPLACED: dict[str, dict[str, Any]] = {
    # heads of 64 or 128 channels instead of 80, 96, …
    "arcee": {"head_dim": 64},
    "blenderbot": {"d_model": 2048},
    "bloom": {"hidden_size": 512},
    "ctrl": {"n_embd": 1024},
    "glm4_moe": {"head_dim": 64},
    "glm4v": {"text_config": {"rope_parameters": _MROPE}},
    "gpt_neox": {"hidden_size": 4096},
    "gpt_neox_japanese": {"hidden_size": 2048},
    "lfm2": {"hidden_size": 2048, "full_attn_idxs": [1]},
    "phi3": {"hidden_size": 2048},
    "phi4_multimodal": {"hidden_size": 2048},
    "stablelm": {"hidden_size": 2048},
    "xlm-roberta-xl": {"hidden_size": 2048, "is_decoder": True},
    "zamba": {"hidden_size": 2048},
    "zamba2": {"hidden_size": 2048},
    # windows that the default puts on every layer
    "mistral": {"sliding_window": None},
    # hybrids whose default has no attention layer
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 31 + ["full_attention"]},
    # encoders that are decoders only on request
    **{
        name: {"is_decoder": True}
        for name in (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xmod",
        )
    },
    # defaults that their own class cannot read
    "cohere_compass_text": {"rope_parameters": {"full_attention": _DEFAULT_ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "dots1": {
        "hidden_size": 4096,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv"] * 31 + ["full_attention"]},
    "ministral": {"head_dim": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "reformer": {"is_decoder": True},
}


def tiny_architecture(model_type: str) -> PreTrainedConfig:
    """The shrunken configuration of a model type, with the class that `CLASSES` names."""
    config = CONFIG_MAPPING[model_type](**_REPLACED.get(model_type, {}))
    config.architectures = [CLASSES[model_type]]
    return shrink_config(config)


def save_tiny_architecture(model_type: str, folder: Path) -> Path:
    """Save a random float32 checkpoint, its tensors under the names that checkpoints use."""
    model = build_random_model(tiny_architecture(model_type), seed=0, trust_remote_code=False)
    model.to(torch.float32)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    return folder
