"""Tiny models with multi-head latent attention (MLA)."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer
from transformers import (
    BailingHybridConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    KimiLinearConfig,
    LongcatFlashConfig,
    MiniCPM3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

_CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v32": DeepseekV32Config,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "minicpm3": MiniCPM3Config,
    "kimi_linear": KimiLinearConfig,
    "bailing_hybrid": BailingHybridConfig,
    "longcat_flash": LongcatFlashConfig,
}
LATENT_FAMILIES = tuple(_CONFIG_CLASSES)


def latent_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A config of one of `LATENT_FAMILIES`: 2 layers, a latent 32 wide, a RoPE key of 16."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    if family in {"kimi_linear", "bailing_hybrid"}:
        values["layer_types"] = ["linear_attention", "full_attention"]
        values |= {"linear_head_dim": 16, "linear_num_heads": 4}
    elif family == "longcat_flash":
        values |= {"head_dim": 16, "num_layers": 1, "ffn_hidden_size": 96}
    return _CONFIG_CLASSES[family](**(values | overrides))


def latent_model(
    family: str, dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    """A tiny MLA model whose logits stay near 1."""
    model = tiny_model(latent_config(family, **overrides), dtype=dtype)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    return model.requires_grad_(False)


def build_latent_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Save a tiny float32 MLA model and its tokenizer to `folder` and return the folder."""
    latent_model(family, torch.float32, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
