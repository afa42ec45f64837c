"""What a report says, in words that follow from its thresholds."""

from collections.abc import Sequence
from itertools import accumulate

from kvarn_cli.evaluation.error_report import AttentionErrors, ErrorReport, MethodResult
from kvarn_cli.quantization.saturation import saturation_sentence

_MOST_LAYERS = 4
_LARGEST_LAYERS = 3
_SIMILAR_BITS = 0.5


def verdict(report: ErrorReport) -> list[str]:
    """A sentence per quantizing method, then what the static view hides and an oracle would save.

    A method keeps the model's choices when its top-1 agreement, mean KL and loss increase are all
    within the report's thresholds. For one that does not, the layers that hold half of the static
    attention error are named if they are at most four (and at most half of all); otherwise it is
    called spread, with the number of layers that hold half of it and the share of the largest
    three.
    """
    length = f"{report.windows.sequence_length:,} tokens"
    sentences = []
    for result in report.results:
        if result.method == "exact":
            continue
        kept = f"{result.logits.top1:.1%} of top-1 choices at {length}"
        if missed := _missed(report, result):
            sentences.append(
                f"{result.method} does not keep the model's choices ({kept}): "
                f"{', '.join(missed)}; {_layers(result)}."
            )
        else:
            sentences.append(f"{result.method} keeps {kept}.")
        if result.saturated_scales:
            sentences.append(f"{result.method}: {saturation_sentence(result.saturated_scales)}.")
    return [*sentences, *_static_view(report.results), *_oracle(report.results)]


def thresholds(report: ErrorReport) -> str:
    """The thresholds behind the verdict, as one sentence."""
    limits = report.thresholds
    return (
        f"Keeping means: top-1 agreement of at least {limits.min_top1:.0%}, mean KL of at most "
        f"{limits.max_kl:g} and a loss increase of at most {limits.max_loss_increase:g} nats."
    )


def _missed(report: ErrorReport, result: MethodResult) -> list[str]:
    limits, logits = report.thresholds, result.logits
    increase = logits.loss - logits.loss_exact
    found = []
    if logits.top1 < limits.min_top1:
        found.append(f"top-1 below {limits.min_top1:.0%}")
    if logits.kl.mean > limits.max_kl:
        found.append(f"KL {logits.kl.mean:.3f} above {limits.max_kl:g}")
    if increase > limits.max_loss_increase:
        found.append(f"loss +{increase:.3f} above {limits.max_loss_increase:g}")
    return found


def _layers(result: MethodResult) -> str:
    """Where the error comes from: few layers with half of it, or how far it is spread."""
    errors: AttentionErrors = result.attention.static or result.attention.accumulated
    whole = sum(errors.by_layer) or 1.0
    ranked = sorted(zip(errors.by_layer, errors.layers, strict=True), reverse=True)
    sums = [error / whole for error in accumulate(error for error, _ in ranked)]
    needed = next((n for n, held in enumerate(sums, start=1) if held >= 0.5), len(ranked))
    if needed <= min(_MOST_LAYERS, len(ranked) // 2):
        names = _listed([layer for _, layer in ranked[:needed]])
        return f"{names} most of the error"
    largest = min(_LARGEST_LAYERS, len(ranked))
    names = _listed([layer for _, layer in ranked[:largest]])
    return (
        f"the error is spread, {needed} of {len(ranked)} layers hold half of it; "
        f"{names} {sums[largest - 1]:.0%}"
    )


def _static_view(results: Sequence[MethodResult]) -> list[str]:
    """How far the best and the worst of the methods with the fewest bits are apart."""
    fewest = min(result.packed_bits_per_element for result in results)
    both = [
        (result.attention.static.mae, result.attention.accumulated.mae, result.method)
        for result in results
        if result.packed_bits_per_element <= fewest + _SIMILAR_BITS
        and result.attention.static is not None
        and result.attention.static.mae
    ]
    if len(both) < 2:
        return []
    _, _, best = min(both, key=lambda entry: entry[1])
    _, _, worst = max(both, key=lambda entry: entry[1])
    by_name = {method: (static, accumulated) for static, accumulated, method in both}
    static, accumulated = (by_name[worst][i] / by_name[best][i] for i in (0, 1))
    return [
        f"The attention error of {worst} is {static:.2f} times that of {best} when each layer is "
        f"judged alone (static), {accumulated:.2f} times when errors accumulate."
    ]


def _oracle(results: Sequence[MethodResult]) -> list[str]:
    """What exact copies of the worst tokens take off the KL, and of all the others."""
    sentences = []
    for result in results:
        kl = result.logits.kl.mean
        restored = {(entry.share, entry.restored): entry.kl_mean for entry in result.oracle or ()}
        for share in sorted({share for share, _ in restored} if kl else ()):
            worst, others = (1 - restored[share, kind] / kl for kind in ("worst", "others"))
            sentences.append(
                f"Restoring the worst {share:.0%} of tokens exactly takes {worst:.0%} off the KL "
                f"of {result.method}, restoring all others {others:.0%}."
            )
    return sentences


def _listed(layers: Sequence[int]) -> str:
    """Layers in their order, with a verb."""
    *first, last = map(str, sorted(layers))
    return f"layers {', '.join(first)} and {last} carry" if first else f"layer {last} carries"
