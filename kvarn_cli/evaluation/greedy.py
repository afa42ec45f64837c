"""How long a model with a packed cache writes what it would have written anyway."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvarn_cli.evaluation.quantized_attention import decode_steps
from kvarn_cli.quantization.methods import KVarN
from kvarn_cli.runtime.cache import KVarNCache


@torch.inference_mode()
def exact_continuation(model: PreTrainedModel, prompt: Tensor, num_tokens: int) -> Tensor:
    """Greedy continuation with transformers' own cache.

    Args:
        model: in evaluation mode.
        prompt: int64 [1, tokens].
        num_tokens: how many to generate; an end token does not stop it.

    Returns:
        int64 [num_tokens].
    """
    cache = DynamicCache(config=model.config)
    token = _next_token(model, prompt, cache)
    tokens = [token]
    while len(tokens) < num_tokens:
        token = _next_token(model, token, cache)
        tokens.append(token)
    return torch.cat(tokens, dim=1)[0]


@torch.inference_mode()
def same_tokens(model: PreTrainedModel, prompt: Tensor, expected: Tensor, method: KVarN) -> int:
    """How many tokens of a greedy continuation with `KVarNCache` are the expected ones.

    The prompt goes through the cache tile by tile, as if it had been decoded, so that it is read
    from packed tiles as well.

    Args:
        model: in evaluation mode.
        prompt: int64 [1, tokens].
        expected: int64 [num_tokens], from `exact_continuation`.
        method: settings of the cache; its tail must be exact.
    """
    cache = KVarNCache(model.config, method.settings, fused=method.value_rotation == "fused")
    for step in decode_steps(prompt.shape[1], method.settings):
        token = _next_token(model, prompt[:, step.start : step.end], cache)
    for count, right in enumerate(expected.tolist()):
        if token.item() != right:
            return count
        if count + 1 < len(expected):
            token = _next_token(model, token, cache)
    return len(expected)


def _next_token(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    logits: Tensor = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)
