"""The two ways to run tokens through a quantized cache: in one pass, and step by step."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from tiny_models import VOCAB_SIZE, tiny_config, tiny_model
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvarn_cli.evaluation.attention import attention_tap
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention, decode_steps
from kvarn_cli.quantization.methods import KVarN, Method
from kvarn_cli.runtime.coverage import covered_layers
from kvarn_cli.settings import KVarNSettings


def calm_model(
    family: str, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A tiny model whose logits stay near 1, so that float32 noise stays far below 1e-5."""
    model = tiny_model(tiny_config(family, **overrides), dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    return model


def random_tokens(num_tokens: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch, num_tokens), generator=generator)


def method_of(settings: KVarNSettings, **changes: Any) -> KVarN:
    return replace(KVarN.from_settings(settings), **changes)


@torch.inference_mode()
def exact_logits(model: PreTrainedModel, tokens: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=tokens, use_cache=False, **inputs).logits


@torch.inference_mode()
def one_pass_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    method: Method,
    *,
    step_tokens: int | None = None,
    **inputs: Any,
) -> Tensor:
    tap = QuantizedAttention(covered_layers(model.config), method, step_tokens=step_tokens)
    with attention_tap(model, tap):
        return model(input_ids=tokens, use_cache=False, **inputs).logits


@torch.inference_mode()
def cached_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    cache: Cache,
    lengths: Iterable[int],
    *,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Feed tokens in steps of these lengths; the cache may hold earlier tokens already."""
    outputs = []
    for step in tokens.split(list(lengths), dim=1):
        inputs = {}
        if attention_mask is not None:
            seen = attention_mask[:, : cache.get_seq_length() + step.shape[1]]
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            inputs = {"attention_mask": seen, "position_ids": positions}
        outputs.append(model(input_ids=step, cache=cache, use_cache=True, **inputs).logits)
    return torch.cat(outputs, dim=1)


def tile_lengths(num_tokens: int, settings: KVarNSettings) -> list[int]:
    return [step.end - step.start for step in decode_steps(num_tokens, settings)]


def largest_difference(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()
