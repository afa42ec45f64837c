"""Errors of one method on one window of tokens, by one ordinary forward pass.

`record_exact` runs a window in full precision once; `pseudo_decode` runs it as a quantized cache
would (see `quantized_attention`) and compares. Attention outputs are compared in the basis of the
original weights: those of a model whose V is fused with R are brought back to it by Rᵀ. Errors
accumulate: each layer gets what the layers before it really gave.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import AttentionCall, Tap, attention_tap
from kvarn_cli.evaluation.logit_errors import LogitErrors, compare_logits
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention, decode_steps
from kvarn_cli.evaluation.vector_errors import VectorErrors
from kvarn_cli.quantization.hadamard import rotate
from kvarn_cli.quantization.methods import Method
from kvarn_cli.runtime.coverage import covered_layers


@dataclass(frozen=True)
class ExactRun:
    """A window in full precision.

    Attributes:
        tokens: int64 [1, tokens].
        logits: [tokens, vocabulary].
        attention: layer → attention output before W_O, [tokens, heads, head_dim], in the basis of
            the original weights.
    """

    tokens: Tensor
    logits: Tensor
    attention: dict[int, Tensor]


@dataclass(frozen=True)
class WindowErrors:
    """Errors of one method on one window.

    Attributes:
        method: what was measured.
        num_tokens: length of the window.
        first_affected: the first token that sees a packed tile; num_tokens if none does.
        logits: errors of the predictions of tokens 1, 2, ….
        attention: layer → mean absolute error of the attention output per token, over heads and
            channels, float32 [tokens].
        keys: covered layer → errors of K over the packed tokens that a later step sees.
        values: the same of V.
        head_dim: width of one head.
        elapsed_seconds: time of the quantized pass.
    """

    method: Method
    num_tokens: int
    first_affected: int
    logits: LogitErrors
    attention: dict[int, Tensor]
    keys: dict[int, VectorErrors]
    values: dict[int, VectorErrors]
    head_dim: int
    elapsed_seconds: float


def record_exact(
    model: PreTrainedModel, tokens: Tensor, *, fused_rotation: Tensor | None = None
) -> ExactRun:
    """Run one window in full precision.

    Args:
        model: a causal language model in eval mode.
        tokens: int64 [1, tokens], at least 2.
        fused_rotation: R [head_dim, head_dim] if V of this model is fused with it.

    Raises:
        UnsupportedModelError: the model does not use transformers' attention interface.
    """
    attention: dict[int, Tensor] = {}

    def tap(call: AttentionCall) -> Tensor:
        output = call.attend(0, call.key.shape[2], call.key, call.value)
        if call.layer is not None:
            attention[call.layer] = _in_plain_basis(output, fused_rotation)[0]
        return output

    logits = _logits(model, tokens, tap)
    _check_seen(model, covered_layers(model.config), attention)
    return ExactRun(tokens, logits, attention)


def pseudo_decode(
    model: PreTrainedModel,
    exact: ExactRun,
    method: Method,
    *,
    step_tokens: int | None = None,
    fused_rotation: Tensor | None = None,
    covered: Collection[int] | None = None,
) -> WindowErrors:
    """Run the window of an exact run as a quantized cache would, and compare.

    Args:
        model: the model of the exact run, or the same model with V fused.
        exact: of the window to run.
        method: what packed tiles come back as.
        step_tokens: tokens of one forward step; None means one tile a step, which equals decoding
            token by token.
        fused_rotation: R [head_dim, head_dim] if V of `model` is fused with it.
        covered: layers to quantize; None means every full-attention layer.

    Raises:
        UnsupportedModelError: the model does not use transformers' attention interface, or has
            no layer to quantize.
    """
    if covered is None:
        covered = covered_layers(model.config)
    if not covered:
        raise UnsupportedModelError(
            f"no layer of {model.config.model_type} attends to the full sequence, so none has a "
            "cache worth packing"
        )
    quantized = QuantizedAttention(
        covered, method, step_tokens=step_tokens, fused_rotation=fused_rotation
    )
    attention: dict[int, Tensor] = {}

    def tap(call: AttentionCall) -> Tensor:
        output = quantized(call)
        if call.layer is not None:
            difference = _in_plain_basis(output, fused_rotation)[0] - exact.attention[call.layer]
            attention[call.layer] = difference.float().abs_().mean(dim=(1, 2))
        return output

    started = time.perf_counter()
    logits = _logits(model, exact.tokens, tap)
    elapsed_seconds = time.perf_counter() - started
    _check_seen(model, covered, attention)
    num_tokens = exact.tokens.shape[1]
    steps = decode_steps(num_tokens, method.settings, step_tokens)
    return WindowErrors(
        method=method,
        num_tokens=num_tokens,
        first_affected=next((step.start for step in steps if step.packed_tokens), num_tokens),
        logits=compare_logits(exact.logits, logits, exact.tokens[0]),
        attention=attention,
        keys=quantized.key_errors,
        values=quantized.value_errors,
        head_dim=exact.attention[min(covered)].shape[-1],
        elapsed_seconds=elapsed_seconds,
    )


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: Tensor, tap: Tap) -> Tensor:
    with attention_tap(model, tap):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0]


def _in_plain_basis(output: Tensor, fused_rotation: Tensor | None) -> Tensor:
    return output if fused_rotation is None else rotate(output, fused_rotation.T)


def _check_seen(model: PreTrainedModel, covered: Collection[int], seen: Collection[int]) -> None:
    if missing := sorted(set(covered) - set(seen)):
        raise UnsupportedModelError(
            f"layer {missing[0]} of {type(model).__name__} did not call the attention function "
            "that transformers' attention interface gave it",
            hint="its cache errors cannot be measured with this release",
        )
