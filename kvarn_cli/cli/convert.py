"""`kvarn convert`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import Console
from kvarn_cli.cli.conversion_text import show_conversion, show_plan
from kvarn_cli.errors import UsageError
from kvarn_cli.settings import DEFAULT_PRESET, KVarNSettings

if TYPE_CHECKING:
    from kvarn_cli.metadata import Thresholds


class OutputDtype(StrEnum):
    """Dtype of the written weights."""

    keep = "keep"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class RotationPlace(StrEnum):
    """Where V's rotation happens."""

    auto = "auto"
    fused = "fused"
    online = "online"


def convert(
    model: options.Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default=False),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Cache settings: k{2,4}v{2,4}_g{32,64,128,256}; of models that cache a latent "
            "(MLA) mla_k{2,4}_g{32,64,128,256}.",
        ),
    ] = DEFAULT_PRESET,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Passes of the variance normalization. Default: 8, with a latent 16.",
            show_default=False,
        ),
    ] = None,
    encoder: Annotated[
        options.EncoderName,
        typer.Option(help="How tiles are packed: as public backends do, or with less error."),
    ] = options.EncoderName.reference,
    rotation: Annotated[
        RotationPlace,
        typer.Option(
            help="fused: V's rotation goes into W_V and W_O, or the model is refused; online: no "
            "weight changes; auto: fused where that is proven to change nothing, else online."
        ),
    ] = RotationPlace.auto,
    dtype: Annotated[
        OutputDtype,
        typer.Option(help="Of the written weights: float16 for engines that want it."),
    ] = OutputDtype.keep,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all that can be checked, print the plan and stop."),
    ] = False,
    no_validate: Annotated[
        bool, typer.Option("--no-validate", help="Leave the calibration run out.")
    ] = False,
    dataset: options.Dataset = None,
    dataset_field: options.DatasetField = "text",
    num_samples: options.NumSamples = 4,
    sequence_length: options.SequenceLength = 1024,
    seed: options.Seed = 0,
    max_kl: Annotated[
        float, typer.Option(metavar="X", help="Most mean KL divergence to the original, nats.")
    ] = 0.05,
    min_top1: Annotated[
        float, typer.Option(metavar="X", help="Least share of unchanged first choices, 0 to 1.")
    ] = 0.9,
    max_loss_increase: Annotated[
        float, typer.Option(metavar="X", help="Most increase of the next-token loss, nats.")
    ] = 0.05,
    force: Annotated[
        bool, typer.Option("--force", help="Write although a threshold is missed; recorded.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier checkpoint at --output.")
    ] = False,
    device: options.Device = "auto",
    compute_dtype: options.ComputeDtype = "float32",
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Convert a checkpoint for the KVarN cache.

    Nothing is written before the fusion is proven and the result validated against the original.
    """
    after_interrupt = "run the same command again"
    if output is not None:
        after_interrupt += f"; it continues with what is finished in {output}.incomplete"
    with Console(as_json=as_json, quiet=quiet, after_interrupt=after_interrupt) as console:
        settings = KVarNSettings.from_name(preset).with_(encoder=encoder.value)
        if iterations is not None:
            settings = settings.with_(iterations=iterations)
        thresholds = _thresholds(
            max_kl=max_kl, min_top1=min_top1, max_loss_increase=max_loss_increase
        )
        if output is None and not dry_run:
            raise UsageError(
                "no folder to write", hint="pass --output DIR, or --dry-run to see the plan"
            )
        console.reading(model)

        from kvarn_cli.conversion.plan import Validation, plan_conversion
        from kvarn_cli.conversion.run import run_conversion
        from kvarn_cli.evaluation.calibration import CalibrationText
        from kvarn_cli.model.loading import parse_device, parse_dtype

        validation = None
        if not no_validate:
            torch_device = parse_device(device)
            validation = Validation(
                CalibrationText(dataset, dataset_field, num_samples, sequence_length, seed),
                thresholds,
                torch_device,
                parse_dtype(compute_dtype, torch_device),
            )
        plan = plan_conversion(
            model,
            settings=settings,
            rotation=rotation.value,
            dtype=None if dtype is OutputDtype.keep else dtype.value,
            output=output,
            overwrite=overwrite,
            validation=validation,
            headers_only=dry_run,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            note=console.note,
        )
        if dry_run:
            from kvarn_cli.conversion.dry_run import plan_summary

            summary = plan_summary(plan, output)
            show_plan(console, plan, summary)
            console.document(summary)
            return
        with console.progress() as report:
            conversion = run_conversion(plan, force=force, report=report)
        show_conversion(console, conversion)
        console.document(
            {
                "output": str(conversion.output),
                "warnings": list(conversion.warnings),
                "elapsed_seconds": conversion.elapsed_seconds,
                "kvarn_config": conversion.metadata.model_dump(mode="json"),
            }
        )


def _thresholds(**limits: float) -> "Thresholds":
    from pydantic import ValidationError

    from kvarn_cli.metadata import Thresholds

    try:
        return Thresholds(**limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = f"--{first['loc'][0]}".replace("_", "-")
        raise UsageError(f"{option} is {first['input']}: {first['msg']}") from error
