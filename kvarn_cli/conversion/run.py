"""Carry a plan out: prove, validate, write."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvarn_cli import __version__
from kvarn_cli.checkpoint.output_folder import check_output
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.writer import CheckpointWriter, Patch
from kvarn_cli.conversion.description import describe
from kvarn_cli.conversion.plan import ConversionPlan
from kvarn_cli.conversion.tensor_bytes import to_bytes, to_tensor
from kvarn_cli.errors import ThresholdError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.validation import validate
from kvarn_cli.metadata import (
    CONFIG_KEY,
    MANIFEST_NAME,
    MODEL_CARD_NAME,
    Calibration,
    KVarNConfig,
    Manifest,
    ProofRecord,
    Thresholds,
)
from kvarn_cli.model.fusion import TensorRotation, tensor_rotations
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.model.proof import prove_fusion
from kvarn_cli.model.weight_check import check_weights
from kvarn_cli.progress import Report, silent

_CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class Validation:
    """How a conversion is validated.

    Attributes:
        text: calibration text and the windows to take from it.
        thresholds: what is allowed.
        device: where the model runs.
        dtype: of the model's arithmetic; None is the stored one.
    """

    text: CalibrationText
    thresholds: Thresholds
    device: torch.device
    dtype: torch.dtype | None


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
    plan: ConversionPlan,
    output: Path,
    *,
    validation: Validation | None,
    overwrite: bool = False,
    force: bool = False,
    report: Report = silent,
) -> Conversion:
    """Prove the plan, validate it, and write the converted checkpoint.

    Args:
        plan: what to convert, and how.
        output: the folder to write; nothing stands there before everything has passed.
        validation: None leaves the validation out.
        overwrite: replace an earlier checkpoint at `output`.
        force: write although a threshold was missed, and record that.
        report: told about progress.

    Raises:
        UsageError: the output cannot be used.
        UnsupportedModelError: the fusion is not proven.
        ThresholdError: validation missed a threshold, and `force` is not set.
        CheckpointError: a tensor is broken.
    """
    check_output(plan.checkpoint.folder, output, overwrite=overwrite)
    rotations = tensor_rotations(plan.layout) if plan.layout else {}
    proof, warnings = _prove(plan, report)
    calibration = None
    if validation is not None:
        calibration = _validate(plan, validation, rotations, report)
        if calibration.misses and not force:
            raise ThresholdError(
                f"{plan.settings.name} misses a threshold on {plan.source.name}: "
                + "; ".join(calibration.misses),
                hint="choose a preset with more bits, allow more (--max-kl, --min-top1, "
                "--max-loss-increase), or pass --force to write it and record the miss",
                details={"calibration": calibration.model_dump(mode="json")},
            )
    metadata = describe(plan, proof, calibration)
    _write(plan, output, metadata, rotations, overwrite, report)
    return Conversion(output, metadata, warnings)


def _prove(plan: ConversionPlan, report: Report) -> tuple[ProofRecord | None, tuple[str, ...]]:
    if plan.layout is None:
        return None, ()
    report("proving the fusion", 0, 2)
    proof = prove_fusion(plan.config, trust_remote_code=plan.trust_remote_code)
    report("proving the fusion", 1, 2)
    check = check_weights(plan.layout, plan.read)
    report("proving the fusion", 2, 2)
    record = ProofRecord(
        instance_difference=proof.largest_difference,
        instance_tolerance=proof.tolerance,
        smallest_control=proof.smallest_control,
        weight_change=check.largest_change,
    )
    return record, check.warnings


def _validate(
    plan: ConversionPlan,
    validation: Validation,
    rotations: Mapping[str, TensorRotation],
    report: Report,
) -> Calibration:
    folder, trust = plan.source.folder, plan.trust_remote_code
    windows = validation.text.windows(load_tokenizer(folder, trust_remote_code=trust))
    model = load_model(
        folder, dtype=validation.dtype, device=validation.device, trust_remote_code=trust
    )
    fused_weights = {name: rotate(plan.read(name)) for name, rotate in rotations.items()}
    engines = validate(model, windows, plan.settings, fused_weights, report)
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
    overwrite: bool,
    report: Report,
) -> None:
    checkpoint = plan.checkpoint
    config = checkpoint.config | {CONFIG_KEY: metadata.model_dump(mode="json")}
    with CheckpointWriter(
        checkpoint,
        output,
        overwrite=overwrite,
        progress=lambda done: report("writing", done, checkpoint.shard_bytes),
    ) as writer:
        writer.copy({name: _patch(rotate) for name, rotate in rotations.items()})
        writer.add_file(_CONFIG_NAME, _json_bytes(config))
        files = {n: record for n, record in writer.files.items() if n != MODEL_CARD_NAME}
        manifest = Manifest(kvarn_version=__version__, files=dict(sorted(files.items())))
        writer.add_file(MANIFEST_NAME, _json_bytes(manifest.model_dump(mode="json")))
        writer.commit()


def _patch(rotate: TensorRotation) -> Patch:
    def patch(data: bytearray, info: TensorInfo) -> memoryview:
        return to_bytes(rotate(to_tensor(data, info)))

    return patch


def _json_bytes(data: Mapping[str, object]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
