"""An error report as tables of at most 100 columns, and its verdict."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarn_cli.cli.console import Console

if TYPE_CHECKING:
    from kvarn_cli.evaluation.error_report import ContextError, ErrorReport, MethodResult

_MOST_LENGTHS = 3


def show_report(console: Console, errors: "ErrorReport") -> None:
    """Print what was measured, the tables and the verdict."""
    from kvarn_cli.evaluation.verdict import thresholds, verdict

    windows, results = errors.windows, errors.results
    done = results[0].num_windows
    count = f"{done} of {windows.num_samples}" if done < windows.num_samples else f"{done}"
    console.result(
        f"{errors.model} ({errors.basis}), {count} {'window' if count == '1' else 'windows'} of "
        f"{windows.sequence_length:,} tokens, {windows.dataset}, {errors.compute_dtype}"
    )
    if errors.rope_dim is not None:
        console.result(
            f"The cache holds latents (MLA): their {errors.head_dim} channels are quantized, the "
            f"{errors.rope_dim} of the RoPE key stay exact; K in the tables is the latent."
        )
    _show_predictions(console, results)
    _show_attention(console, results)
    _show_tokens(console, results)
    _show_memory(console, results)
    _show_extras(console, errors)
    for sentence in verdict(errors):
        console.result(f"- {sentence}")
    console.result(thresholds(errors))


def _show_predictions(console: Console, results: "tuple[MethodResult, ...]") -> None:
    rows = [
        ("bits", lambda r: r.bits_per_element, "{:.2f}", min),
        ("KL", lambda r: r.logits.kl.mean, "{:.4f}", min),
        ("±", lambda r: _half_width(r.logits.kl.interval), "{:.4f}", None),
        ("top-1", lambda r: r.logits.top1, "{:.1%}", max),
        ("loss +", lambda r: r.logits.loss - r.logits.loss_exact, "{:.4f}", min),
        ("perplexity", lambda r: r.logits.perplexity, "{:.3f}", min),
        ("s", lambda r: r.elapsed_seconds, "{:.1f}", None),
    ]
    columns = [_marked(results, value, form, best) for _, value, form, best in rows]
    logits = results[0].logits
    console.table(
        ["method", *(name for name, *_ in rows)],
        list(zip(map(_name, results), *columns, strict=True)),
        title=f"Predictions from token {logits.first_position} on (full precision: loss "
        f"{logits.loss_exact:.4f}, perplexity {logits.perplexity_exact:.3f})\n"
        f"(* best; ±: 95 % over windows; {_window_note(results)})",
    )


def _name(result: "MethodResult") -> str:
    """The spec, in lines where it has options."""
    return result.method.replace(",", ",\n")


def _half_width(interval: tuple[float, float] | None) -> float | None:
    return None if interval is None else (interval[1] - interval[0]) / 2


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
    if not kinds:
        return "nothing is quantized"
    if len(kinds) > 1:
        return "sink and tail differ, see the names"
    sink, residual, tail = kinds.pop()
    if tail == "packed":
        return f"{sink} tokens exact, no tail"
    newest = f", the newest {residual}" if residual else ""
    return f"exact with all: the first {sink} tokens{newest}, the incomplete group"


def _show_attention(console: Console, results: "tuple[MethodResult, ...]") -> None:
    """Both regimes, and the accumulated one at doubling context lengths; blocks of one group."""
    blocks = [{b.end: b for b in r.attention.accumulated.by_context} for r in results]
    longest = max(blocks, key=len)
    ends = [end for end, block in longest.items() if block.affected] or list(longest)
    shown = [end for end in ends if end == ends[-1] or (end & (end - 1)) == 0][-_MOST_LENGTHS:]
    columns = [
        _marked(results, lambda r: r.attention.accumulated.mae, "{:.4f}", min),
        _marked(results, _static_mae, "{:.4f}", min),
        _marked(results, lambda r: r.attention.gap, "{:+.0%}", None),
    ]
    at_lengths = [[_with_half_width(own.get(end)) for end in shown] for own in blocks]
    console.table(
        ["method", "accum.", "static", "gap", *(f"≤{end}" for end in shown)],
        [
            [_name(result), *means, *cells]
            for result, *means, cells in zip(results, *columns, at_lengths, strict=True)
        ],
        title="Attention MAE (≤N: accumulated, of the block that ends at N)",
    )


def _static_mae(result: "MethodResult") -> float | None:
    static = result.attention.static
    return None if static is None else static.mae


def _with_half_width(block: "ContextError | None") -> str:
    if block is None:
        return ""
    half = _half_width(block.interval)
    return f"{block.mae:.4f}" + ("" if half is None else f"±{half:.3f}")


def _show_tokens(console: Console, results: "tuple[MethodResult, ...]") -> None:
    rows = []
    for result in results:
        if result.tokens is None:
            continue
        keys, values = result.tokens.keys, result.tokens.values
        worst = keys.worst[1]
        rows.append(
            [
                _name(result),
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
        [_name(result), *(f"{entry.bytes / 2**20:,.1f}" for entry in result.memory)]
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
        [_name(result), f"{entry.share:.1%}", f"{result.logits.kl.mean:.4f}"]
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
            [_name(result), str(result.retrieval.num_correct)]
            for result in errors.results
            if result.retrieval
        ]
        console.table(
            ["method", f"right of {asked.num_questions}"],
            rows,
            title=f"Look-up in {asked.num_lines} lines ({asked.num_tokens} tokens)",
        )
