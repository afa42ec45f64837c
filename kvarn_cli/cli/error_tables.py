"""An error report as tables of at most 100 columns, and its verdict."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarn_cli.cli.console import Console

if TYPE_CHECKING:
    from kvarn_cli.evaluation.error_report import ErrorReport, MethodResult


def show_report(console: Console, errors: "ErrorReport") -> None:
    """Print what was measured, the tables and the verdict."""
    from kvarn_cli.evaluation.verdict import thresholds, verdict

    windows, results = errors.windows, errors.results
    rotation = "V's rotation fused" if errors.fused else "V not rotated"
    done = results[0].num_windows
    count = f"{done} of {windows.num_samples}" if done < windows.num_samples else f"{done}"
    console.result(
        f"{errors.model} ({rotation}), {count} windows of {windows.sequence_length} tokens, "
        f"{windows.dataset}, {errors.compute_dtype}"
    )
    _show_summary(console, results)
    _show_context(console, results)
    _show_tokens(console, results)
    _show_memory(console, results)
    _show_extras(console, errors)
    for sentence in verdict(errors):
        console.result(f"- {sentence}")
    console.result(thresholds(errors))


def _show_summary(console: Console, results: "tuple[MethodResult, ...]") -> None:
    rows = [
        ("bits", lambda r: r.bits_per_element, "{:.2f}", min),
        ("KL", lambda r: r.logits.kl.mean, "{:.4f}", min),
        ("top-1", lambda r: r.logits.top1, "{:.2%}", max),
        ("loss +", lambda r: r.logits.loss - r.logits.loss_exact, "{:.4f}", min),
        ("MAE", lambda r: r.attention.accumulated.mae, "{:.4f}", min),
        ("static", lambda r: r.attention.static.mae if r.attention.static else None, "{:.4f}", min),
        ("gap", lambda r: r.attention.gap, "{:+.0%}", None),
        ("s", lambda r: r.elapsed_seconds, "{:.1f}", None),
    ]
    columns = [_marked(results, value, form, best) for _, value, form, best in rows]
    names = [result.method for result in results]
    console.table(
        ["method", *(name for name, *_ in rows)],
        list(zip(names, *columns, strict=True)),
        title=f"Predictions and attention (* best; {_window_note(results)})",
    )


def _marked(
    results: "tuple[MethodResult, ...]",
    value: Callable[["MethodResult"], float | None],
    form: str,
    best: Callable[[list[float]], float] | None,
) -> list[str]:
    """Formatted values, the best of the quantizing methods marked."""
    values = [value(result) for result in results]
    rivals = [
        found
        for result, found in zip(results, values, strict=True)
        if found is not None and result.method != "exact"
    ]
    top = best(rivals) if best and len(rivals) > 1 else None
    return [
        "" if found is None else form.format(found) + ("*" if found == top else "")
        for found in values
    ]


def _window_note(results: "tuple[MethodResult, ...]") -> str:
    """Which tokens the methods leave exact."""
    kinds = {(r.sink_tokens, r.residual_tokens, r.tail) for r in results if r.method != "exact"}
    if len(kinds) != 1:
        return "sink and tail differ, see the names"
    sink, residual, tail = kinds.pop()
    if tail == "packed":
        return f"{sink} tokens exact, no tail"
    newest = f", the newest {residual}" if residual else ""
    return f"exact with all: the first {sink} tokens{newest}, the incomplete group"


def _show_context(console: Console, results: "tuple[MethodResult, ...]") -> None:
    """Attention error at doubling context lengths; blocks of one group."""
    blocks = {r.method: r.attention.accumulated.by_context for r in results}
    longest = max(blocks.values(), key=len)
    ends = [block.end for block in longest if block.affected] or [block.end for block in longest]
    shown = [end for end in ends if end == ends[-1] or (end & (end - 1)) == 0][-5:]
    rows = []
    for method, own in blocks.items():
        by_end = {block.end: block for block in own}
        cells = []
        for block in map(by_end.get, shown):
            half = ""
            if block and block.interval:
                half = f" ±{(block.interval[1] - block.interval[0]) / 2:.3f}"
            cells.append(f"{block.mae:.4f}{half}" if block else "")
        rows.append([method, *cells])
    console.table(
        ["method", *(f"≤{end}" for end in shown)],
        rows,
        title="Attention MAE, accumulated, of the block ending here (±: 95 % over windows)",
    )


def _show_tokens(console: Console, results: "tuple[MethodResult, ...]") -> None:
    rows = []
    for result in results:
        if result.tokens is None:
            continue
        keys, values = result.tokens.keys, result.tokens.values
        worst = keys.worst[1]
        rows.append(
            [
                result.method,
                f"{keys.magnitude:.5f}",
                f"{keys.direction:.5f}",
                f"{values.magnitude:.5f}" if values else "",
                f"{values.direction:.5f}" if values else "",
                f"{worst.total_share:.1%}",
                f"{worst.magnitude_share:.1%}",
                f"{result.tokens.key_drift.mean:.4f}",
            ]
        )
    console.table(
        ["method", "K magn.", "K dir.", "V magn.", "V dir.", "worst 5%", "magn.", "drift"],
        rows,
        title="Packed tokens, error / squared norm (worst 5 %: share of K's, magnitude there)",
    )


def _show_memory(console: Console, results: "tuple[MethodResult, ...]") -> None:
    rows = [
        [result.method, *(f"{entry.bytes / 2**20:,.1f}" for entry in result.memory)]
        for result in results
    ]
    full = results[0].memory
    rows.append(["16 bits", *(f"{entry.sixteen_bit_bytes / 2**20:,.1f}" for entry in full)])
    console.table(
        ["method", *(f"{entry.tokens:,} tokens" for entry in full)],
        rows,
        title="Cache of the covered layers, MiB",
    )


def _show_extras(console: Console, errors: "ErrorReport") -> None:
    oracle = [
        [result.method, f"{entry.share:.1%}", f"{result.logits.kl.mean:.4f}"]
        + [f"{kl:.4f}" for kl in (entry.kl_mean, control.kl_mean)]
        for result in errors.results
        if result.oracle
        for entry, control in zip(result.oracle[::2], result.oracle[1::2], strict=False)
    ]
    if oracle:
        console.table(
            ["method", "worst", "KL", "those exact", "all others exact"],
            oracle,
            title="Mean KL with tokens of the cache restored exactly",
        )
    for result in errors.results:
        if result.greedy:
            counts = ", ".join(map(str, result.greedy.same_tokens))
            console.result(
                f"{result.method}: greedy text equals for {counts} of {result.greedy.num_tokens} "
                "tokens (one number a window)"
            )
    if errors.retrieval_exact:
        asked = errors.retrieval_exact
        rows = [["full precision", str(asked.num_correct)]]
        rows += [
            [result.method, str(result.retrieval.num_correct)]
            for result in errors.results
            if result.retrieval
        ]
        console.table(
            ["method", f"right of {asked.num_questions}"],
            rows,
            title=f"Look-up in {asked.num_lines} lines ({asked.num_tokens} tokens)",
        )
