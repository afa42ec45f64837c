"""`kvarn inspect-errors`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import Console

if TYPE_CHECKING:
    from kvarn_cli.evaluation.metrics import MethodErrors
    from kvarn_cli.inspection import ErrorReport


def inspect_errors(
    model: options.Model,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="METHOD",
            help="NAME[:PRESET][,key=value...] with NAME exact, kvarn, quarot or kivi; repeatable. "
            "E.g. kvarn:k2v2_g128,iterations=16. Default: kvarn, quarot and kivi at the model's "
            "own preset.",
            show_default=False,
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the errors into this file (.png, .svg, .pdf).",
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
    """Measure how cache errors accumulate."""
    with Console(as_json=as_json, quiet=quiet) as console:
        from kvarn_cli.evaluation.figures import check_figure_path, draw_errors

        if figure is not None:
            check_figure_path(figure)
        console.reading(model)

        from kvarn_cli.evaluation.calibration import CalibrationText
        from kvarn_cli.inspection import inspect_model
        from kvarn_cli.model.loading import parse_device, parse_dtype

        torch_device = parse_device(device)
        with console.progress() as report:
            errors = inspect_model(
                model,
                method or (),
                CalibrationText(dataset, dataset_field, num_samples, sequence_length, seed),
                device=torch_device,
                dtype=parse_dtype(dtype, torch_device),
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                trust_remote_code=trust_remote_code,
                report=report,
            )
        _show_errors(console, errors)
        if figure is not None:
            draw_errors(errors.results, figure)
            console.note(f"Drew {figure}")
        console.document(errors.document())


def _show_errors(console: Console, errors: "ErrorReport") -> None:
    rotation = "V's rotation fused" if errors.fused else "V not rotated"
    console.result(
        f"{errors.model} ({rotation}), {errors.num_samples} windows of {errors.sequence_length} "
        f"tokens, {errors.dataset}, {errors.compute_dtype}"
    )
    console.table(
        ["method", "bits", "KL", "top-1", "loss", "exact"],
        [
            [
                result.method,
                f"{result.bits_per_element:.2f}",
                f"{result.kl_mean:.4f}",
                f"{result.top1_agreement:.2%}",
                f"{result.loss_method:.4f}",
                f"{result.loss_exact:.4f}",
            ]
            for result in errors.results
        ],
        title="Logits (bits: per element at this length, exact sink and tail included)",
    )
    _show_context(console, errors.results)
    console.table(
        ["method", "K magn.", "K dir.", "V magn.", "V dir.", "K worst 5 %", "magn. there"],
        [
            [
                result.method,
                f"{result.keys.magnitude:.5f}",
                f"{result.keys.direction:.5f}",
                f"{result.values.magnitude:.5f}",
                f"{result.values.direction:.5f}",
                f"{result.keys.worst_total_share:.1%}",
                f"{result.keys.worst_magnitude_share:.1%}",
            ]
            for result in errors.results
            if result.keys is not None and result.values is not None
        ],
        title="Packed tokens: error over squared norm; the worst 5 % of tokens' share of K's error",
    )


def _show_context(console: Console, results: "tuple[MethodErrors, ...]") -> None:
    """Attention error at doubling context lengths; blocks of one tile."""
    longest = max(results, key=lambda result: len(result.attention_mae_by_context))
    ends = [block.end for block in longest.attention_mae_by_context]
    shown = [end for end in ends if end == ends[-1] or (end & (end - 1)) == 0]
    rows = []
    for result in results:
        by_end = {block.end: block.attention_mae for block in result.attention_mae_by_context}
        rows.append(
            [result.method, *(f"{by_end[end]:.4f}" if end in by_end else "" for end in shown)]
        )
    console.table(
        ["method", *(f"≤{end}" for end in shown)],
        rows,
        title="Attention MAE of the block of tokens that ends at this context length",
    )
