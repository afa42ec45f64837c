"""Carry a plan out: check the weights, validate, write."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvarn_cli import __version__
from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME, loadable_folder
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.writer import CheckpointWriter, Patch
from kvarn_cli.conversion.description import describe
from kvarn_cli.conversion.plan import ConversionPlan
from kvarn_cli.conversion.tensor_bytes import to_bytes, to_tensor
from kvarn_cli.errors import ThresholdError
from kvarn_cli.evaluation.validation import validate
from kvarn_cli.metadata import (
    CONFIG_KEY,
    MANIFEST_NAME,
    MODEL_CARD_NAME,
    Calibration,
    KVarNConfig,
    Manifest,
    ProofRecord,
)
from kvarn_cli.model.fusion import TensorRotation, tensor_rotations
from kvarn_cli.model.loading import check_token_ids, load_model
from kvarn_cli.model.weight_check import check_weights
from kvarn_cli.progress import Report, silent

_UNLISTED = (MANIFEST_NAME, MODEL_CARD_NAME)


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        output: the converted folder.
        metadata: what its config.json now says about it.
        warnings: what the user should know about the weights.
    """

    output: Path
    metadata: KVarNConfig
    warnings: tuple[str, ...]


def run_conversion(
    plan: ConversionPlan, *, force: bool = False, report: Report = silent
) -> Conversion:
    """Check the plan on the real weights, validate it, and write the converted checkpoint.

    Args:
        plan: what to convert, and how; with an output.
        force: write although a threshold was missed, and record that.
        report: told about progress.

    Raises:
        UnsupportedModelError: the fusion changes more than rounding explains.
        ThresholdError: validation missed a threshold, and `force` is not set.
        CheckpointError: a tensor is broken.
        UsageError: the output can no longer be used.
    """
    if plan.output is None:
        raise ValueError("the plan names no output")
    rotations = tensor_rotations(plan.layout) if plan.layout else {}
    proof, warnings = _check_fusion(plan, report)
    calibration = _validate(plan, rotations, report)
    if calibration is not None and calibration.misses and not force:
        raise ThresholdError(
            f"{plan.settings.name} misses a threshold on {plan.source.name}: "
            + "; ".join(calibration.misses),
            hint="choose a preset with more bits, allow more (--max-kl, --min-top1, "
            "--max-loss-increase), or pass --force to write it and record the miss",
            details={"calibration": calibration.model_dump(mode="json")},
        )
    metadata = describe(plan, proof, calibration)
    _write(plan, plan.output, metadata, rotations, report)
    return Conversion(plan.output, metadata, warnings)


def _check_fusion(
    plan: ConversionPlan, report: Report
) -> tuple[ProofRecord | None, tuple[str, ...]]:
    if plan.layout is None or plan.proof is None:
        return None, ()
    report("checking the weights", 0, 1)
    check = check_weights(plan.layout, plan.read)
    report("checking the weights", 1, 1)
    record = ProofRecord(
        instance_difference=plan.proof.largest_difference,
        instance_tolerance=plan.proof.tolerance,
        smallest_control=plan.proof.smallest_control,
        weight_change=check.largest_change,
    )
    return record, check.warnings


def _validate(
    plan: ConversionPlan, rotations: Mapping[str, TensorRotation], report: Report
) -> Calibration | None:
    validation = plan.validation
    if validation is None or plan.windows is None:
        return None
    with loadable_folder(plan.checkpoint) as folder:
        model = load_model(
            folder,
            dtype=validation.dtype,
            device=validation.device,
            trust_remote_code=plan.trust_remote_code,
        )
    check_token_ids(model, plan.windows)
    fused_weights = {
        plan.parameters[name]: rotate(plan.read(name)) for name, rotate in rotations.items()
    }
    engines = validate(model, plan.windows, plan.settings, fused_weights, report)
    return Calibration(
        dataset=validation.text.name,
        num_samples=validation.text.num_samples,
        sequence_length=validation.text.sequence_length,
        seed=validation.text.seed,
        compute_dtype=str(model.dtype).removeprefix("torch."),
        engines=engines,
        thresholds=validation.thresholds,
        misses=validation.thresholds.misses(engines),
    )


def _write(
    plan: ConversionPlan,
    output: Path,
    metadata: KVarNConfig,
    rotations: Mapping[str, TensorRotation],
    report: Report,
) -> None:
    checkpoint = plan.checkpoint
    config = checkpoint.config | {CONFIG_KEY: metadata.model_dump(mode="json")}
    report("writing", 0, checkpoint.shard_bytes)
    with CheckpointWriter(
        checkpoint,
        output,
        overwrite=plan.overwrite,
        progress=lambda done: report("writing", done, checkpoint.shard_bytes),
    ) as writer:
        writer.copy({name: _patch(rotate) for name, rotate in rotations.items()})
        writer.add_file(CONFIG_NAME, _json_bytes(config))
        files = {n: record for n, record in writer.files.items() if n not in _UNLISTED}
        manifest = Manifest(kvarn_version=__version__, files=dict(sorted(files.items())))
        writer.add_file(MANIFEST_NAME, _json_bytes(manifest.model_dump(mode="json")))
        writer.commit()


def _patch(rotate: TensorRotation) -> Patch:
    def patch(data: bytearray, info: TensorInfo) -> memoryview:
        return to_bytes(rotate(to_tensor(data, info)))

    return patch


def _json_bytes(data: Mapping[str, object]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
