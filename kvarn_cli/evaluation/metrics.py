"""Errors of one method over all windows, as plain numbers that go to JSON."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn_cli.errors import CheckpointError
from kvarn_cli.evaluation.logit_errors import LogitErrors
from kvarn_cli.evaluation.pseudo_decode import WindowErrors
from kvarn_cli.evaluation.vector_errors import VectorErrors

WORST_SHARE = 0.05
_EXACT_BITS = 16


@dataclass(frozen=True)
class ContextError:
    """Attention error of the tokens [start, end) of a window.

    Attributes:
        start: first token, which is also the least context length of the block.
        end: behind the last token.
        attention_mae: mean over layers, windows, tokens, heads and channels.
    """

    start: int
    end: int
    attention_mae: float


@dataclass(frozen=True)
class VectorSummary:
    """Errors of the K or the V vectors of packed tokens.

    The worst tokens are the `WORST_SHARE` with the largest ‖x − x̂‖² within one window, layer and
    KV head (heads differ too much in scale to be ranked together); shares are means over those.

    Attributes:
        magnitude: mean of (‖x‖ − ‖x̂‖)² / ‖x‖².
        direction: mean of 2‖x‖‖x̂‖(1 − cos θ) / ‖x‖².
        worst_magnitude_share: mean of magnitude / total error among the worst tokens.
        worst_total_share: the worst tokens' share of the total error.
    """

    magnitude: float
    direction: float
    worst_magnitude_share: float
    worst_total_share: float


@dataclass(frozen=True)
class MethodErrors:
    """What one method does to one model.

    KL, agreement and loss are means over the predictions of all windows from `first_position` on.
    Attention errors of layers are means over the tokens that see a packed tile; they are 0 where
    no token does.

    Attributes:
        method: the method's label.
        num_windows: windows measured.
        first_position: the first prediction that counts for KL, agreement and loss.
        sequence_length: tokens of each.
        bits_per_element: of a covered layer's cache at this length; sink and tail count 16 bits.
        kl_mean: KL(exact ‖ method) of the next-token distributions, nats.
        kl_median: its median over predictions.
        kl_p999: its 99.9th percentile.
        top1_agreement: share of predictions with the same first choice.
        loss_exact: next-token loss in full precision, nats.
        loss_method: next-token loss of the method.
        attention_mae: mean absolute error of the attention output before W_O, over layers.
        attention_mae_by_layer: the same for each layer.
        attention_mae_by_context: the same by position, over layers, in blocks of one group.
        keys: errors of K; None where nothing was packed.
        values: errors of V; None where nothing was packed.
        elapsed_seconds: time of the quantized passes.
    """

    method: str
    num_windows: int
    first_position: int
    sequence_length: int
    bits_per_element: float
    kl_mean: float
    kl_median: float
    kl_p999: float
    top1_agreement: float
    loss_exact: float
    loss_method: float
    attention_mae: float
    attention_mae_by_layer: dict[int, float]
    attention_mae_by_context: tuple[ContextError, ...]
    keys: VectorSummary | None
    values: VectorSummary | None
    elapsed_seconds: float


def summarize(windows: Sequence[WindowErrors], *, first_position: int = 0) -> MethodErrors:
    """Average the windows of one method; all have the same length.

    Args:
        windows: at least one.
        first_position: predictions before it are left out of KL, agreement and loss.

    Raises:
        CheckpointError: logits were NaN.
    """
    first = windows[0]
    kl = _joined(windows, first_position, lambda logits: logits.kl)
    if kl.isnan().any():
        raise CheckpointError(
            f"the model's logits are no numbers at {int(kl.isnan().sum())} of {len(kl)} tokens",
            hint="a weight holds NaN or infinity, or its arithmetic overflows: try --dtype float32",
        )
    attention = torch.stack([torch.stack(list(window.attention.values())) for window in windows])
    by_token = attention.double().mean(dim=0)
    by_layer = _mean(by_token[:, first.first_affected :], dim=1)
    return MethodErrors(
        method=first.method.label,
        num_windows=len(windows),
        first_position=first_position,
        sequence_length=first.num_tokens,
        bits_per_element=_bits_per_element(first),
        kl_mean=kl.mean().item(),
        kl_median=kl.median().item(),
        kl_p999=kl.quantile(0.999).item(),
        top1_agreement=_joined(windows, first_position, lambda logits: logits.agreement)
        .mean()
        .item(),
        loss_exact=_joined(windows, first_position, lambda logits: logits.loss_exact).mean().item(),
        loss_method=_joined(windows, first_position, lambda logits: logits.loss_method)
        .mean()
        .item(),
        attention_mae=by_layer.mean().item(),
        attention_mae_by_layer=dict(zip(first.attention, by_layer.tolist(), strict=True)),
        attention_mae_by_context=_by_context(by_token.mean(dim=0), first.method.group_size),
        keys=_vector_summary(errors for window in windows for errors in window.keys.values()),
        values=_vector_summary(errors for window in windows for errors in window.values.values()),
        elapsed_seconds=sum(window.elapsed_seconds for window in windows),
    )


def _joined(
    windows: Sequence[WindowErrors], first_position: int, part: Callable[[LogitErrors], Tensor]
) -> Tensor:
    return torch.cat([part(window.logits)[first_position:] for window in windows]).double()


def _mean(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim) if x.shape[dim] else x.sum(dim)


def _by_context(by_token: Tensor, block_tokens: int) -> tuple[ContextError, ...]:
    blocks = by_token.split(block_tokens)
    return tuple(
        ContextError(index * block_tokens, index * block_tokens + len(block), block.mean().item())
        for index, block in enumerate(blocks)
    )


def _vector_summary(layers: Iterable[VectorErrors]) -> VectorSummary | None:
    rows = [
        torch.stack(_vector_means(errors)).flatten(1)
        for errors in layers
        if errors.squared_norm.shape[-1]
    ]
    if not rows:
        return None
    return VectorSummary(*torch.cat(rows, dim=1).double().mean(dim=1).tolist())


def _vector_means(errors: VectorErrors) -> tuple[Tensor, ...]:
    tiny = torch.finfo(torch.float32).tiny
    norms, total = errors.squared_norm.clamp(min=tiny), errors.total
    worst_total, worst = total.topk(math.ceil(WORST_SHARE * total.shape[-1]))
    worst_magnitude = errors.magnitude.gather(-1, worst)
    return (
        (errors.magnitude / norms).mean(-1),
        (errors.direction / norms).mean(-1),
        (worst_magnitude / worst_total.clamp(min=tiny)).mean(-1),
        worst_total.sum(-1) / total.sum(-1).clamp(min=tiny),
    )


def _bits_per_element(window: WindowErrors) -> float:
    packed = window.method.settings.packed_tokens(window.num_tokens)
    exact = window.num_tokens - packed
    bits = packed * window.method.bits_per_element(window.head_dim) + exact * _EXACT_BITS
    return bits / window.num_tokens
