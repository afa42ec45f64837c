"""Errors of one method on one window of tokens, by one ordinary forward pass.

`record_exact` runs a window in full precision once; `pseudo_decode` runs it as a quantized cache
would (see `quantized_attention`) and compares. Attention outputs are compared in the basis of the
original weights: those of a model whose V is fused with R are brought back to it by Rᵀ. A rotated
latent changes neither K nor V, so with MLA they are in that basis anyway.

There are two regimes. In `pseudo_decode` errors accumulate: each layer gets what the layers before
it really gave. In the static regime each layer gets its full-precision input, and only its own
error is seen; `record_exact` measures it on the way, at every `STATIC_EVERY`-th token.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import NOT_MEASURED_HINT, AttentionCall, Tap, attention_tap
from kvarn_cli.evaluation.logit_errors import LogitErrors, compare_logits
from kvarn_cli.evaluation.quantized_attention import (
    QuantizedAttention,
    Restoration,
    decode_steps,
)
from kvarn_cli.evaluation.vector_errors import VectorErrors
from kvarn_cli.quantization.hadamard import rotate
from kvarn_cli.quantization.methods import Method
from kvarn_cli.runtime.coverage import covered_layers, rope_key_dim

STATIC_EVERY = 4


@dataclass(frozen=True)
class ExactRun:
    """A window in full precision.

    Attributes:
        tokens: int64 [1, tokens].
        logits: [tokens, vocabulary].
        attention: layer → attention output before W_O, [tokens, heads, head_dim], in the basis of
            the original weights.
        keys: layer → K after RoPE, as attention sees it, [kv_heads, tokens, head_dim].
        static: for each method asked for, layer → its error alone, as in `WindowErrors.attention`
            but of every `STATIC_EVERY`-th token.
        elapsed_seconds: time of the pass, without the static measurements.
    """

    tokens: Tensor
    logits: Tensor
    attention: dict[int, Tensor]
    keys: dict[int, Tensor]
    static: tuple[dict[int, Tensor], ...]
    elapsed_seconds: float


@dataclass(frozen=True)
class WindowErrors:
    """Errors of one method on one window.

    Attributes:
        method: what was measured.
        num_tokens: length of the window.
        first_affected: the first token that sees a packed tile; num_tokens if none does.
        logits: errors of the predictions of tokens 1, 2, ….
        attention: layer → mean absolute error of the attention output over channels, float32
            [heads, tokens].
        keys: covered layer → errors of K, or of the latent, over the packed tokens that a later
            step sees.
        values: the same of V; none of a layer with a latent.
        key_drift: covered layer → ‖ΔK‖² / ‖K‖² of K before it is quantized against the exact run,
            mean over heads, float32 [tokens].
        saturated_scales: layer → stored scales that had to be clamped, where there are any.
        num_kv_heads: KV heads of a covered layer.
        head_dim: width of one head, or of the latent.
        elapsed_seconds: time of the quantized pass.
        rope_dim: width of the RoPE key beside a latent; None where K and V are cached.
    """

    method: Method
    num_tokens: int
    first_affected: int
    logits: LogitErrors
    attention: dict[int, Tensor]
    keys: dict[int, VectorErrors]
    values: dict[int, VectorErrors]
    key_drift: dict[int, Tensor]
    saturated_scales: dict[int, int]
    num_kv_heads: int
    head_dim: int
    elapsed_seconds: float
    rope_dim: int | None = None


def record_exact(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    fused_rotation: Tensor | None = None,
    static_methods: Sequence[Method] = (),
    step_tokens: int | None = None,
    covered: Collection[int] | None = None,
) -> ExactRun:
    """Run one window in full precision, and measure methods in the static regime on the way.

    Args:
        model: a causal language model in eval mode.
        tokens: int64 [1, tokens], at least 2.
        fused_rotation: R [head_dim, head_dim] if V of this model, or its latent, is fused with it.
        static_methods: methods to measure in the static regime.
        step_tokens: see `pseudo_decode`; of the static regime.
        covered: see `pseudo_decode`; of the static regime.

    Raises:
        UnsupportedModelError: a covered layer does not use transformers' attention interface, or
            does not show the latent that it caches.
    """
    if covered is None:
        covered = covered_layers(model.config)
    latent = rope_key_dim(model.config) is not None
    taps = [
        QuantizedAttention(
            covered,
            method,
            step_tokens=step_tokens,
            fused_rotation=fused_rotation,
            record_errors=False,
            every=STATIC_EVERY,
        )
        for method in static_methods
    ]
    attention: dict[int, Tensor] = {}
    keys: dict[int, Tensor] = {}
    static: tuple[dict[int, Tensor], ...] = tuple({} for _ in taps)
    static_seconds = 0.0

    def tap(call: AttentionCall) -> Tensor:
        nonlocal static_seconds
        output = call.attend(0, call.key.shape[2], call.key, call.value)
        if call.layer is None:
            return output
        if call.layer in attention:
            raise UnsupportedModelError(
                f"layer {call.layer} of {type(model).__name__} attends several times in one pass, "
                "and a pseudo-decode knows one cache for each layer",
                hint=NOT_MEASURED_HINT,
            )
        if latent and call.layer in covered and call.latent is None:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} does not show the latent that it caches: it has no "
                "method expand_kv",
                hint=NOT_MEASURED_HINT,
            )
        exact = _in_plain_basis(call, output, fused_rotation)[0]
        attention[call.layer], keys[call.layer] = exact, call.key[0]
        started = time.perf_counter()
        for quantized, errors in zip(taps, static, strict=True):
            local = _in_plain_basis(call, quantized(call), fused_rotation)[0]
            errors[call.layer] = _mean_error(local, exact[::STATIC_EVERY])
        static_seconds += time.perf_counter() - started
        return output

    started = time.perf_counter()
    logits = _logits(model, tokens, tap)
    elapsed_seconds = time.perf_counter() - started - static_seconds
    _check_seen(model, covered, attention)
    return ExactRun(tokens, logits, attention, keys, static, elapsed_seconds)


def pseudo_decode(
    model: PreTrainedModel,
    exact: ExactRun,
    method: Method,
    *,
    step_tokens: int | None = None,
    fused_rotation: Tensor | None = None,
    covered: Collection[int] | None = None,
    restoration: Restoration | None = None,
) -> WindowErrors:
    """Run the window of an exact run as a quantized cache would, and compare.

    Args:
        model: the model of the exact run, or the same model with V fused.
        exact: of the window to run.
        method: what packed tiles come back as.
        step_tokens: tokens of one forward step; None means one tile a step, which equals decoding
            token by token.
        fused_rotation: R [head_dim, head_dim] if V of `model`, or its latent, is fused with it.
        covered: layers to quantize; None means every full-attention layer.
        restoration: tokens to give back exactly in spite of the method.

    Raises:
        UnsupportedModelError: the model does not use transformers' attention interface, or has
            no layer to quantize.
    """
    if covered is None:
        covered = covered_layers(model.config)
    if not covered:
        raise UnsupportedModelError(
            f"no layer of {model.config.model_type} attends to the full sequence, so none has a "
            "cache worth packing",
            hint="inspect-errors --sliding measures layers with a window",
        )
    quantized = QuantizedAttention(
        covered,
        method,
        step_tokens=step_tokens,
        fused_rotation=fused_rotation,
        restoration=restoration,
    )
    attention: dict[int, Tensor] = {}
    key_drift: dict[int, Tensor] = {}
    cached: dict[int, tuple[int, int, int | None]] = {}

    def tap(call: AttentionCall) -> Tensor:
        output = quantized(call)
        if call.layer is not None:
            plain = _in_plain_basis(call, output, fused_rotation)[0]
            attention[call.layer] = _mean_error(plain, exact.attention[call.layer])
            if call.layer in covered:
                key_drift[call.layer] = _relative_drift(call.key[0], exact.keys[call.layer])
                cached[call.layer] = _cache_shape(call)
        return output

    started = time.perf_counter()
    logits = _logits(model, exact.tokens, tap)
    elapsed_seconds = time.perf_counter() - started
    _check_seen(model, covered, attention)
    num_tokens = exact.tokens.shape[1]
    num_kv_heads, head_dim, rope_dim = cached[min(covered)]
    return WindowErrors(
        method=method,
        num_tokens=num_tokens,
        first_affected=first_affected(num_tokens, method, step_tokens),
        logits=compare_logits(exact.logits, logits, exact.tokens[0]),
        attention=attention,
        keys=quantized.key_errors,
        values=quantized.value_errors,
        key_drift=key_drift,
        saturated_scales=quantized.saturated_scales,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        elapsed_seconds=elapsed_seconds,
    )


def first_affected(num_tokens: int, method: Method, step_tokens: int | None = None) -> int:
    """The first token that sees a packed tile; num_tokens if none does."""
    if method.tail == "packed":
        return min(method.sink_tokens, num_tokens)
    steps = decode_steps(num_tokens, method.settings, step_tokens)
    return next((step.start for step in steps if step.packed_tokens), num_tokens)


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: Tensor, tap: Tap) -> Tensor:
    with attention_tap(model, tap):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0]


def _in_plain_basis(call: AttentionCall, output: Tensor, fused_rotation: Tensor | None) -> Tensor:
    """Undo V's rotation, which only layers with V of its width have.

    That of a latent ends where K and V are expanded from it.
    """
    if fused_rotation is None or call.latent is not None:
        return output
    if call.value.shape[-1] != len(fused_rotation):
        return output
    return rotate(output, fused_rotation.T)


def _cache_shape(call: AttentionCall) -> tuple[int, int, int | None]:
    """KV heads, width of K or the latent, and width of the RoPE key beside a latent."""
    first, second = call.cached
    rope_dim = None if call.latent is None else second.shape[-1]
    return first.shape[1], first.shape[-1], rope_dim


def _mean_error(output: Tensor, exact: Tensor) -> Tensor:
    """Two [tokens, heads, head_dim] → [heads, tokens]."""
    return (output - exact).float().abs_().mean(dim=-1).T


def _relative_drift(keys: Tensor, exact: Tensor) -> Tensor:
    """Two [kv_heads, tokens, head_dim] → [tokens]."""
    squared = ((keys - exact).float().square().sum(-1), exact.float().square().sum(-1))
    return (squared[0] / squared[1].clamp(min=torch.finfo(torch.float32).tiny)).mean(dim=0)


def _check_seen(model: PreTrainedModel, covered: Collection[int], seen: Collection[int]) -> None:
    if missing := sorted(set(covered) - set(seen)):
        raise UnsupportedModelError(
            f"layer {missing[0]} of {type(model).__name__} did not call the attention function "
            "that transformers' attention interface gave it",
            hint=NOT_MEASURED_HINT,
        )
