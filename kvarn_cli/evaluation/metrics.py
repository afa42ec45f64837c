"""Errors of one method over all windows: running sums, capped samples, and what they amount to."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvarn_cli.errors import CheckpointError
from kvarn_cli.evaluation.error_report import (
    Attention,
    AttentionErrors,
    CacheMemory,
    ContextError,
    KeyDrift,
    KLDivergence,
    Logits,
    MethodResult,
    Tokens,
)
from kvarn_cli.evaluation.intervals import mean_interval, median
from kvarn_cli.evaluation.pseudo_decode import STATIC_EVERY, WindowErrors
from kvarn_cli.evaluation.samples import Sample
from kvarn_cli.evaluation.vector_sums import VectorSums
from kvarn_cli.settings import EXACT_BITS

MEMORY_LENGTHS = (8_192, 32_768, 131_072)

_KL_SAMPLES = 1 << 18


class AttentionSums:
    """Attention errors of windows of one length: means of each window by head and by block."""

    def __init__(self) -> None:
        self._layers: tuple[int, ...] = ()
        self._num_tokens = self._block_tokens = 0
        self._affected: list[Tensor] = []
        self._blocks: list[Tensor] = []

    def add(self, attention: dict[int, Tensor], window: WindowErrors, every: int) -> None:
        """Fold one window in; layer → [heads, tokens], of every `every`-th token."""
        self._layers, self._block_tokens = tuple(attention), window.method.group_size
        self._num_tokens = window.num_tokens
        heads, blocks = [], []
        for errors in attention.values():
            by_head = errors.cpu().double()
            affected = by_head[:, math.ceil(window.first_affected / every) :]
            heads.append(affected.mean(1) if affected.shape[1] else affected.sum(1))
            parts = by_head.mean(0).split(self._block_tokens // every)
            blocks.append(torch.stack([part.mean() for part in parts]))
        self._affected.append(_stack(heads))
        self._blocks.append(torch.stack(blocks))

    def summary(self) -> AttentionErrors:
        """Means over windows; intervals over windows."""
        by_head = _mean(self._affected)
        by_layer = by_head.nanmean(1)
        by_window = torch.stack([blocks.mean(0) for blocks in self._blocks])
        starts = range(0, self._num_tokens, self._block_tokens)
        return AttentionErrors(
            mae=by_layer.mean().item(),
            layers=self._layers,
            by_layer=tuple(by_layer.tolist()),
            by_head=tuple(
                tuple(x for x in heads if not math.isnan(x)) for heads in by_head.tolist()
            ),
            by_context=tuple(
                ContextError(
                    start=start,
                    end=min(start + self._block_tokens, self._num_tokens),
                    mae=means.mean().item(),
                    interval=mean_interval(means.tolist()),
                )
                for start, means in zip(starts, by_window.T, strict=True)
            ),
            by_layer_context=tuple(map(tuple, _mean(self._blocks).tolist())),
        )


class MethodSums:
    """Folds the windows of one method, which all have the same length.

    Nothing per token is kept, but for samples that stop growing. It would not only add up: what
    outlives a pass lies in the heap between its freed tensors, and then the next pass cannot use
    their place.

    Args:
        first_position: predictions before it are left out of KL, agreement and loss.
        memory_lengths: context lengths to state the cache's bytes at.
    """

    def __init__(
        self, first_position: int = 0, memory_lengths: Sequence[int] = MEMORY_LENGTHS
    ) -> None:
        self._first_position = first_position
        self._memory_lengths = memory_lengths
        self._cache: dict[str, Any] = {}
        self._kl = Sample(_KL_SAMPLES)
        self._logits: list[tuple[float, ...]] = []
        self._drift: list[Tensor] = []
        self._accumulated, self._static = AttentionSums(), AttentionSums()
        self._keys, self._values = VectorSums(), VectorSums()
        self._saturated_scales: Counter[int] = Counter()
        self._elapsed_seconds: list[float] = []
        self._has_static = False

    @property
    def num_windows(self) -> int:
        """Windows folded in."""
        return len(self._logits)

    def add(self, window: WindowErrors, static: dict[int, Tensor] | None = None) -> None:
        """Fold one window in.

        Args:
            window: the accumulated regime.
            static: layer → errors of the static regime, [heads, tokens], of every
                `STATIC_EVERY`-th token; given always or never. With it, the accumulated attention
                error is taken at the same tokens, so that the two can be compared.

        Raises:
            CheckpointError: logits were NaN.
        """
        logits = window.logits
        if logits.kl.isnan().any():
            raise CheckpointError(
                f"the model's logits are no numbers at {int(logits.kl.isnan().sum())} of "
                f"{len(logits.kl)} tokens",
                hint="a weight holds NaN or infinity, or its arithmetic overflows: "
                "try --dtype float32",
            )
        self._cache = _cache_facts(window, self._memory_lengths)
        first = self._first_position
        self._kl.add(logits.kl[first:].cpu().double())
        parts = (logits.kl, logits.agreement, logits.loss_exact, logits.loss_method)
        self._logits.append(tuple(part[first:].cpu().double().mean().item() for part in parts))
        if static is None:
            self._accumulated.add(window.attention, window, 1)
        else:
            same_tokens = {
                layer: errors[:, ::STATIC_EVERY] for layer, errors in window.attention.items()
            }
            self._accumulated.add(same_tokens, window, STATIC_EVERY)
            self._static.add(static, window, STATIC_EVERY)
            self._has_static = True
        self._keys.add(window.keys)
        self._values.add(window.values)
        by_token = torch.stack(list(window.key_drift.values())).cpu().double()
        drift = by_token[:, window.first_affected :]
        self._drift.append(drift.mean(1) if drift.shape[1] else drift.sum(1))
        self._saturated_scales.update(window.saturated_scales)
        self._elapsed_seconds.append(window.elapsed_seconds)

    def summary(self) -> MethodResult:
        """What the windows so far amount to; at least one."""
        return MethodResult(
            **self._cache,
            num_windows=self.num_windows,
            logits=self._logit_summary(),
            attention=self._attention_summary(),
            tokens=self._token_summary(),
            saturated_scales=dict(sorted(self._saturated_scales.items())),
            elapsed_seconds=median(self._elapsed_seconds),
        )

    def _logit_summary(self) -> Logits:
        kl, top1, loss_exact, loss = (
            sum(values) / len(values) for values in zip(*self._logits, strict=True)
        )
        sample, kl_by_window = self._kl.values(), tuple(window[0] for window in self._logits)
        return Logits(
            first_position=self._first_position,
            kl=KLDivergence(
                mean=kl,
                interval=mean_interval(kl_by_window),
                by_window=kl_by_window,
                median=sample.median().item(),
                p999=_quantile(sample, 0.999),
            ),
            top1=top1,
            loss=loss,
            loss_exact=loss_exact,
            perplexity=math.exp(loss),
            perplexity_exact=math.exp(loss_exact),
        )

    def _attention_summary(self) -> Attention:
        accumulated = self._accumulated.summary()
        static = self._static.summary() if self._has_static else None
        gap = accumulated.mae / static.mae - 1 if static and static.mae else None
        return Attention(accumulated=accumulated, static=static, gap=gap)

    def _token_summary(self) -> Tokens | None:
        keys, values = self._keys.summary(), self._values.summary()
        if keys is None:
            return None
        by_layer = _mean(self._drift)
        drift = KeyDrift(mean=by_layer.mean().item(), by_layer=tuple(by_layer.tolist()))
        return Tokens(keys=keys, values=values, key_drift=drift)


def summarize(windows: Sequence[WindowErrors], *, first_position: int = 0) -> MethodResult:
    """Average the windows of one method in the accumulated regime.

    Args:
        windows: at least one.
        first_position: predictions before it are left out of KL, agreement and loss.

    Raises:
        CheckpointError: logits were NaN.
    """
    sums = MethodSums(first_position)
    for window in windows:
        sums.add(window)
    return sums.summary()


def _cache_facts(window: WindowErrors, memory_lengths: Sequence[int]) -> dict[str, Any]:
    """The fields of a result that depend on the method and on shapes alone."""
    method, shape = window.method, (window.head_dim, window.num_kv_heads)
    average_bits = method.average_bits(window.num_tokens, *shape)
    return {
        "method": method.label,
        "bits_per_element": _with_rope_key(window, average_bits),
        "packed_bits_per_element": _with_rope_key(window, method.bits_per_element(*shape)),
        "sink_tokens": method.sink_tokens,
        "residual_tokens": method.residual_tokens,
        "group_size": method.group_size,
        "tail": method.tail,
        "memory": tuple(_memory(window, length) for length in memory_lengths),
    }


def _memory(window: WindowErrors, length: int) -> CacheMemory:
    bits = window.method.average_bits(length, window.head_dim, window.num_kv_heads)
    elements = window.num_kv_heads * len(window.key_drift) * length
    if window.rope_dim is None:
        elements *= 2 * window.head_dim
    else:
        elements *= window.head_dim + window.rope_dim
    return CacheMemory(
        tokens=length,
        bytes=round(elements * _with_rope_key(window, bits) / 8),
        sixteen_bit_bytes=elements * EXACT_BITS // 8,
    )


def _with_rope_key(window: WindowErrors, bits: float) -> float:
    """Bits per element once the RoPE key beside a latent is counted, 16 bits an element."""
    if not window.rope_dim:
        return bits
    whole = window.head_dim + window.rope_dim
    return (window.head_dim * bits + window.rope_dim * EXACT_BITS) / whole


def _quantile(sample: Tensor, share: float) -> float:
    """`torch.quantile` without its limit on the number of values."""
    ordered = sample.sort().values
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low).item()


def _mean(windows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(windows)).mean(0)


def _stack(rows: Sequence[Tensor]) -> Tensor:
    """Rows of heads; layers with fewer heads than others are filled up with NaN."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=math.nan)
