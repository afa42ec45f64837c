"""`kvarn convert`."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import Console
from kvarn_cli.errors import UsageError
from kvarn_cli.settings import DEFAULT_PRESET, KVarNSettings

if TYPE_CHECKING:
    from kvarn_cli.conversion.plan import ConversionPlan
    from kvarn_cli.conversion.run import Conversion
    from kvarn_cli.metadata import Calibration, ProofRecord, Thresholds
    from kvarn_cli.model.cache_layout import CacheLayout


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
            _show_plan(console, plan, summary)
            console.document(summary)
            return
        with console.progress() as report:
            conversion = run_conversion(plan, force=force, report=report)
        _show_conversion(console, conversion)
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


def _show_plan(console: Console, plan: "ConversionPlan", summary: dict[str, Any]) -> None:
    settings, cache = plan.settings, plan.cache
    where = f"fused into {len(plan.rotated_tensors)} tensors" if plan.layout else "online"
    if plan.not_fused is not None:
        where += f", not fused: {plan.not_fused}"
    per_token = summary["cache_bytes_per_token"]
    lines = {
        "model": f"{plan.source.name} ({summary['architecture']})",
        "cache": f"{settings.cache_dtype}, {summary['record_bytes']:,} bytes a record, "
        f"{summary['bits_per_element']:.4g} bits an element, {settings.encoder} encoder",
        "layers": f"{len(cache.covered)} of {len(cache.covered) + len(cache.left_out)} covered, "
        + _cached(cache),
        "rotation" if plan.cache.rope_dim is not None else "rotation of V": where,
        "weights": f"{len(plan.checkpoint.shards)} files, {plan.checkpoint.shard_bytes:,} bytes; "
        f"{summary['bytes_rotated']:,} of them change",
        "read, written": f"{summary['bytes_read']:,} and {summary['bytes_written']:,} bytes",
        "cache a token": f"{per_token['packed']:,.0f} bytes, float16 takes "
        f"{per_token['float16']:,}",
    }
    if plan.proof is not None:
        lines["proof"] = (
            f"fusion moves {_proven_outputs(plan.proof.checked)} by "
            f"{plan.proof.largest_difference:.1e} of the largest (allowed "
            f"{plan.proof.tolerance:.0e})"
        )
    for length, sizes in summary["cache_bytes"].items():
        lines[f"cache at {int(length) // 1024}k"] = (
            f"{sizes['packed'] / 2**20:,.1f} MiB, float16 takes {sizes['float16'] / 2**20:,.1f} MiB"
        )
    if summary["tensors_cast"]:
        lines["cast"] = f"{len(summary['tensors_cast'])} more tensors to {plan.torch_dtype}"
    if summary["seconds_at_that_speed"] is not None:
        lines["writing"] = (
            f"about {summary['seconds_at_that_speed']:,.0f} s at the "
            f"{summary['disk_bytes_per_second'] / 1e6:,.0f} MB/s that this disk took just now"
        )
    if plan.header_requests:
        lines["headers"] = (
            f"{plan.header_requests} range requests, {plan.header_bytes_received:,} bytes"
        )
    for name, text in lines.items():
        console.result(f"{name:14} {text}")
    for layer in cache.left_out:
        console.result(f"left out       layer {layer.index}: {layer.reason}")
    for path, reason in plan.checkpoint.left_out:
        console.result(f"not copied     {path}: {reason}")
    console.result("How engines are told, as their public sources say (none was run here):")
    for backend in summary["backends"]:
        told = backend["command"] or f"does not take this; it {backend['note']}"
        console.result(f"  {backend['backend']}: {told}")


def _cached(cache: "CacheLayout") -> str:
    if cache.rope_dim is not None:
        return f"a latent of {cache.head_dim} and a RoPE key of {cache.rope_dim} channels"
    heads = " or ".join(map(str, sorted(set(cache.kv_heads.values()))))
    return f"{heads} KV heads of {cache.head_dim}"


def _show_conversion(console: Console, conversion: "Conversion") -> None:
    metadata = conversion.metadata
    for warning in conversion.warnings:
        console.result(f"warning: {warning}")
    if metadata.proof is not None:
        console.result(_proof_line(metadata.proof))
    if metadata.calibration is not None:
        _show_calibration(console, metadata.calibration)
    value = metadata.rotations.value
    if value.not_fused is not None:
        console.result(
            f"The rotation of {metadata.rotated} is left to the engine: {value.not_fused}"
        )
    console.result(f"Wrote {conversion.output} ({metadata.cache.dtype})")
    folder = shlex.quote(str(conversion.output))
    console.note(f'Try it: kvarn generate {folder} "Why is the sky blue?"')


def _proven_outputs(checked: str) -> str:
    if checked == "model":
        return "the logits of a random float64 instance"
    return "the outputs of the attention modules alone, random and in float64,"


def _proof_line(proof: "ProofRecord") -> str:
    return (
        f"Proof: fusion moves {_proven_outputs(proof.checked)} by "
        f"{proof.instance_difference:.1e} of the largest (allowed {proof.instance_tolerance:.0e}); "
        f"any one tensor left out, by {proof.smallest_control:.2f} or more. "
        f"Rounding changes the real attention output by {proof.weight_change:.1e}."
    )


def _show_calibration(console: Console, calibration: "Calibration") -> None:
    console.table(
        ["engine", "encoder", "KL", "top-1", "loss", "original", "attention MAE"],
        [
            [
                errors.engine,
                errors.encoder,
                f"{errors.kl_mean:.4f}",
                f"{errors.top1_agreement:.2%}",
                f"{errors.loss_quantized:.4f}",
                f"{errors.loss_original:.4f}",
                f"{errors.attention_mae:.4f}",
            ]
            for errors in calibration.engines
        ],
        title=f"Against the original: {calibration.num_samples} windows of "
        f"{calibration.sequence_length} tokens, {calibration.dataset}",
    )
    for miss in calibration.misses:
        console.result(f"missed: {miss}")
