"""`kvarn inspect-errors`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import INTERRUPTED, Console
from kvarn_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvarn_cli.evaluation.error_report import ErrorReport, MethodResult


def inspect_errors(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Local folder or Hub id of the checkpoint; none with --from.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="METHOD",
            help="NAME[:PRESET][,key=value...] with NAME exact, kvarn, ablation, quarot, kivi, "
            "kvquant, turboquant, fp8, q8_0 or q4_0; repeatable. "
            "E.g. kvarn:k2v2_g128,iterations=16. Default: kvarn at the model's preset, kvarn, "
            "quarot and kivi at two bits, q4_0 and fp8.",
            show_default=False,
        ),
    ] = None,
    no_window: Annotated[
        bool,
        typer.Option("--no-window", help="Leave no token exact: no sink and no tail, any method."),
    ] = False,
    oracle: Annotated[
        list[float] | None,
        typer.Option(
            metavar="PERCENT",
            min=0.1,
            max=99.9,
            help="Also restore the worst PERCENT of tokens exactly, and all others; repeatable.",
            show_default=False,
        ),
    ] = None,
    greedy: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Also write N tokens with KVarNCache until they depart."
        ),
    ] = 0,
    retrieval: Annotated[
        int,
        typer.Option(metavar="LINES", min=0, help="Also look numbers up in a text of LINES lines."),
    ] = 0,
    memory_at: Annotated[
        list[int] | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Context length to state the cache's bytes at; repeatable. "
            "Default: 8192, 32768, 131072.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write an HTML page that needs nothing else.", show_default=False
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the error against context length into a .png, .svg or .pdf.",
            show_default=False,
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write every figure as PNG and SVG into DIR.", show_default=False
        ),
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Show a report that --json wrote, without running anything.",
            show_default=False,
        ),
    ] = None,
    dataset: options.Dataset = None,
    dataset_field: options.DatasetField = "text",
    num_samples: options.NumSamples = 4,
    sequence_length: options.SequenceLength = 1024,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.ComputeDtype = "float32",
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how cache errors accumulate.

    Ctrl-C ends the measurement and shows what is finished, marked partial (exit code 130).
    """
    with Console(as_json=as_json, quiet=quiet) as console:
        if (model is None) == (from_file is None):
            raise UsageError("name a model or --from FILE, one of the two")
        _check_outputs(report, figure, figures)
        if from_file is not None:
            from kvarn_cli.evaluation.error_report import ErrorReport

            errors = ErrorReport.read(from_file)
        else:
            assert model is not None
            console.reading(model)

            from kvarn_cli.evaluation.calibration import CalibrationText
            from kvarn_cli.evaluation.metrics import MEMORY_LENGTHS
            from kvarn_cli.inspection import Extras, inspect_model
            from kvarn_cli.model.loading import parse_device, parse_dtype

            torch_device = parse_device(device)
            with console.progress() as progress:
                errors = inspect_model(
                    model,
                    method or (),
                    CalibrationText(dataset, dataset_field, num_samples, sequence_length, seed),
                    device=torch_device,
                    dtype=parse_dtype(dtype, torch_device),
                    no_window=no_window,
                    extras=Extras(
                        oracle_shares=tuple(percent / 100 for percent in oracle or ()),
                        greedy_tokens=greedy,
                        retrieval_lines=retrieval,
                        memory_lengths=tuple(memory_at or MEMORY_LENGTHS),
                    ),
                    revision=revision,
                    token=token,
                    cache_dir=cache_dir,
                    trust_remote_code=trust_remote_code,
                    report=progress,
                )
        _show(console, errors)
        _draw(console, errors, report, figure, figures)
        console.document(errors.document())
        if errors.partial and from_file is None:
            console.note("interrupted: the report is partial")
            raise typer.Exit(INTERRUPTED)


def _check_outputs(report: Path | None, figure: Path | None, figures: Path | None) -> None:
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise UsageError(f"cannot write {report}", hint="name a file in a folder that exists")
    if figure is not None:
        from kvarn_cli.evaluation.figures import check_figure

        check_figure(figure)
    if figures is not None:
        from kvarn_cli.evaluation.figures import check_folder

        check_folder(figures)


def _draw(
    console: Console,
    errors: "ErrorReport",
    report: Path | None,
    figure: Path | None,
    figures: Path | None,
) -> None:
    if report is None and figure is None and figures is None:
        return
    from kvarn_cli.evaluation.figures import MAIN_FIGURE, draw_figures, save_figure, save_figures
    from kvarn_cli.evaluation.html_report import write_html

    drawn = draw_figures(errors)
    if figure is not None:
        save_figure(drawn[MAIN_FIGURE], figure)
        console.note(f"Drew {figure}")
    if figures is not None:
        save_figures(drawn, figures)
        console.note(f"Drew {len(drawn)} figures into {figures}")
    if report is not None:
        write_html(errors, drawn, report)
        console.note(f"Wrote {report}")


def _show(console: Console, errors: "ErrorReport") -> None:
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
    value: "Callable[[MethodResult], float | None]",
    form: str,
    best: "Callable[[list[float]], float] | None",
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
                f"{values.magnitude:.5f}",
                f"{values.direction:.5f}",
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
