"""Several methods on several windows, with one exact run in memory at a time."""

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.error_report import MethodResult, OracleKL
from kvarn_cli.evaluation.intervals import median
from kvarn_cli.evaluation.metrics import MEMORY_LENGTHS, MethodSums
from kvarn_cli.evaluation.pseudo_decode import (
    ExactRun,
    WindowErrors,
    first_affected,
    pseudo_decode,
    record_exact,
)
from kvarn_cli.evaluation.quantized_attention import Restoration
from kvarn_cli.progress import Report, silent
from kvarn_cli.quantization.methods import Exact, Method

_STAGE = "measuring"


@dataclass(frozen=True)
class Measurement:
    """What was measured.

    Attributes:
        results: one entry per method, in their order; on interruption those that have one.
        plain_seconds: time of a full-precision pass over one window, median.
        interrupted: the user stopped; results are of the windows that every method finished, or
            of the first window.
    """

    results: tuple[MethodResult, ...]
    plain_seconds: float
    interrupted: bool


@dataclass
class _OneMethod:
    """A method, and what its windows add up to."""

    method: Method
    sums: MethodSums
    oracle_kl: dict[Restoration, list[float]] = field(default_factory=dict)

    def result(self) -> MethodResult:
        """Of the windows so far; at least one."""
        oracle = tuple(
            OracleKL(
                restored=restoration.restored,
                share=restoration.share,
                kl_mean=sum(values) / len(values),
            )
            for restoration, values in self.oracle_kl.items()
            if len(values) == self.sums.num_windows
        )
        return self.sums.summary().model_copy(update={"oracle": oracle or None})


def measure_methods(
    model: PreTrainedModel,
    windows: Tensor,
    methods: Sequence[Method],
    *,
    fused_rotation: Tensor | None = None,
    step_tokens: int | None = None,
    covered: Collection[int] | None = None,
    static: bool = True,
    oracle_shares: Sequence[float] = (),
    memory_lengths: Sequence[int] = MEMORY_LENGTHS,
    report: Report = silent,
) -> Measurement:
    """Pseudo-decode every window with every method, against the same model in full precision.

    All methods are judged on the same predictions: those from the first on that sees a packed
    tile under any of them. Before it all are exact and would only thin the errors out.

    An interrupt ends the measurement early; what is finished is returned.

    Args:
        model: in evaluation mode.
        windows: int64 [windows, tokens].
        methods: what to measure, at least one, fitted.
        fused_rotation: R [head_dim, head_dim] if V of the model is fused with it.
        step_tokens: tokens of one forward step; None means one tile a step.
        covered: layers to quantize; None means every full-attention layer.
        static: measure the static regime as well.
        oracle_shares: for each, two further passes per method: the worst tokens restored exactly,
            and all but those.
        memory_lengths: context lengths to state the cache's bytes at.
        report: told about progress.

    Raises:
        UnsupportedModelError: see `pseudo_decode`.
        KeyboardInterrupt: nothing was finished yet.
    """
    restorations = [
        restoration
        for share in oracle_shares
        for restoration in (Restoration(share, "worst"), Restoration(share, "others"))
    ]
    first_position = _first_position(methods, windows.shape[1], step_tokens)
    measured = [
        _OneMethod(method, MethodSums(first_position, memory_lengths)) for method in methods
    ]
    passes = [1 if isinstance(method, Exact) else 1 + len(restorations) for method in methods]
    total, done = len(windows) * (1 + sum(passes)), 0
    plain_seconds: list[float] = []

    def run(exact: ExactRun, method: Method, restoration: Restoration | None) -> WindowErrors:
        return pseudo_decode(
            model,
            exact,
            method,
            step_tokens=step_tokens,
            fused_rotation=fused_rotation,
            covered=covered,
            restoration=restoration,
        )

    def passed() -> None:
        nonlocal done
        done += 1
        report(_STAGE, done, total)

    report(_STAGE, 0, total)
    interrupted, finished = False, measured
    try:
        for tokens in windows.to(model.device).split(1):
            finished = deepcopy(measured)
            exact = record_exact(
                model,
                tokens,
                fused_rotation=fused_rotation,
                static_methods=methods if static else (),
                step_tokens=step_tokens,
                covered=covered,
            )
            plain_seconds.append(exact.elapsed_seconds)
            passed()
            for index, one in enumerate(measured):
                one.sums.add(run(exact, one.method, None), exact.static[index] if static else None)
                passed()
                for restoration in () if isinstance(one.method, Exact) else restorations:
                    restored = run(exact, one.method, restoration)
                    kl = restored.logits.kl[first_position:].mean().item()
                    one.oracle_kl.setdefault(restoration, []).append(kl)
                    del restored
                    passed()
            del exact
    except KeyboardInterrupt:
        interrupted = True
        if finished[0].sums.num_windows:
            measured = finished
        if not measured[0].sums.num_windows:
            raise
    return Measurement(
        results=tuple(one.result() for one in measured if one.sums.num_windows),
        plain_seconds=median(plain_seconds),
        interrupted=interrupted,
    )


def _first_position(methods: Sequence[Method], num_tokens: int, step_tokens: int | None) -> int:
    """Where the predictions start that count; 0 if none sees a packed tile."""
    quantizing = [method for method in methods if not isinstance(method, Exact)] or methods
    first = min(first_affected(num_tokens, method, step_tokens) for method in quantizing)
    return first if first < num_tokens - 1 else 0
