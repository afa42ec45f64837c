"""`kvarn inspect-errors`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import INTERRUPTED, Console
from kvarn_cli.cli.error_tables import show_report
from kvarn_cli.errors import UsageError

if TYPE_CHECKING:
    from kvarn_cli.evaluation.error_report import ErrorReport


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
            "quarot and kivi at two bits, q4_0 and fp8; with a latent cache (MLA) those without "
            "q4_0 and fp8.",
            show_default=False,
        ),
    ] = None,
    no_window: Annotated[
        bool,
        typer.Option("--no-window", help="Leave no token exact: no sink and no tail, any method."),
    ] = False,
    sliding: Annotated[
        bool,
        typer.Option("--sliding", help="Quantize layers with a sliding window too."),
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
                    sliding=sliding,
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
        show_report(console, errors)
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
