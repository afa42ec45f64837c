"""Several methods on several windows, with one exact run in memory at a time."""

from collections.abc import Collection, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.metrics import MethodErrors, summarize
from kvarn_cli.evaluation.pseudo_decode import WindowErrors, pseudo_decode, record_exact
from kvarn_cli.progress import Report, silent
from kvarn_cli.quantization.methods import Method

_STAGE = "measuring"


def measure_methods(
    model: PreTrainedModel,
    windows: Tensor,
    methods: Sequence[Method],
    *,
    fused_rotation: Tensor | None = None,
    step_tokens: int | None = None,
    covered: Collection[int] | None = None,
    report: Report = silent,
) -> list[MethodErrors]:
    """Pseudo-decode every window with every method, against the same model in full precision.

    All methods are judged on the same predictions: those from the first on that sees a packed
    tile under any of them. Before it all are exact and would only thin the errors out.

    Args:
        model: in evaluation mode.
        windows: int64 [windows, tokens].
        methods: what to measure, at least one.
        fused_rotation: R [head_dim, head_dim] if V of the model is fused with it.
        step_tokens: tokens of one forward step; None means one tile a step.
        covered: layers to quantize; None means every full-attention layer.
        report: told about progress.

    Returns:
        One entry per method, in their order.

    Raises:
        UnsupportedModelError: see `pseudo_decode`.
    """
    errors: list[list[WindowErrors]] = [[] for _ in methods]
    total = len(windows) * (1 + len(methods))
    report(_STAGE, 0, total)
    for number, tokens in enumerate(windows.to(model.device).split(1)):
        done = number * (1 + len(methods)) + 1
        exact = record_exact(model, tokens, fused_rotation=fused_rotation)
        report(_STAGE, done, total)
        for offset, (method, measured) in enumerate(zip(methods, errors, strict=True), start=1):
            measured.append(
                pseudo_decode(
                    model,
                    exact,
                    method,
                    step_tokens=step_tokens,
                    fused_rotation=fused_rotation,
                    covered=covered,
                )
            )
            report(_STAGE, done + offset, total)
    first_position = min(measured[0].first_affected for measured in errors)
    if first_position >= windows.shape[1] - 1:
        first_position = 0
    return [summarize(measured, first_position=first_position) for measured in errors]
