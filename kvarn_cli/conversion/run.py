"""Carry a plan out: check the weights, validate, write."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvarn_cli import __version__
from kvarn_cli.checkpoint.writer import CheckpointWriter
from kvarn_cli.conversion.description import describe
from kvarn_cli.conversion.output import write_output
from kvarn_cli.conversion.patches import conversion_patches
from kvarn_cli.conversion.plan import ConversionPlan
from kvarn_cli.errors import ThresholdError
from kvarn_cli.evaluation.validation import validate
from kvarn_cli.metadata import Calibration, KVarNConfig, ProofRecord
from kvarn_cli.model.fusion import TensorRotation, tensor_rotations
from kvarn_cli.model.loading import check_token_ids, load_model
from kvarn_cli.model.weight_check import check_weights
from kvarn_cli.progress import Report, silent
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.saturation import saturation_sentence
from kvarn_cli.settings import Encoder
from kvarn_cli.verification.folder import read_metadata

_SHOWN = "checks and validation"


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        output: the converted folder.
        metadata: what its config.json now says about it.
        warnings: what the user should know about the weights.
        elapsed_seconds: time that each stage of this run took.
    """

    output: Path
    metadata: KVarNConfig
    warnings: tuple[str, ...]
    elapsed_seconds: dict[str, float]


def run_conversion(
    plan: ConversionPlan, *, force: bool = False, report: Report = silent
) -> Conversion:
    """Check the plan on the real weights, validate it, and write the converted checkpoint.

    A run that was killed is continued: what it checked, validated and wrote is not done again.

    Args:
        plan: what to convert, and how; with an output.
        force: write although a threshold was missed, and record that.
        report: told about progress.

    Raises:
        UnsupportedModelError: the fusion changes more than rounding explains.
        ThresholdError: validation missed a threshold, and `force` is not set.
        CheckpointError: a tensor is broken.
        UsageError: the output can no longer be used, or another conversion uses it.
        DiskFullError: the disk has no room.
    """
    if plan.output is None:
        raise ValueError("the plan names no output")
    checkpoint = plan.checkpoint
    with CheckpointWriter(
        checkpoint,
        plan.output,
        patches=conversion_patches(checkpoint, plan.layout, plan.dtype),
        plan=_identity(plan, force),
        overwrite=plan.overwrite,
        progress=lambda done: report("writing", done, checkpoint.shard_bytes),
    ) as writer:
        if writer.committed:
            return Conversion(plan.output, read_metadata(writer.folder), (), {})
        start = time.perf_counter()
        if _SHOWN not in writer.notes:
            metadata, warnings = _check(plan, force, report)
            found = {"metadata": metadata.model_dump(mode="json"), "warnings": warnings}
            writer.note(_SHOWN, found)
        shown = writer.notes[_SHOWN]
        metadata = KVarNConfig.model_validate(shown["metadata"])
        checked = time.perf_counter()
        report("writing", 0, checkpoint.shard_bytes)
        write_output(writer, checkpoint, metadata, plan.dtype)
        elapsed = {"checks": checked - start, "writing": time.perf_counter() - checked}
        if plan.proof is not None:
            elapsed["proof"] = plan.proof.elapsed_seconds
    return Conversion(plan.output, metadata, tuple(shown["warnings"]), elapsed)


def _identity(plan: ConversionPlan, force: bool) -> dict[str, object]:
    """What decides the result, by the names that the user knows."""
    return {
        "kvarn version": __version__,
        "model": [plan.source.name, plan.source.revision],
        "preset or iterations": asdict(plan.settings),
        "rotation": "fused" if plan.layout else "online",
        "dtype": plan.dtype,
        "validation": plan.validation and plan.validation.identity | {"force": force},
    }


def _check(
    plan: ConversionPlan, force: bool, report: Report
) -> tuple[KVarNConfig, tuple[str, ...]]:
    """Look at the real weights and validate; what was found, as metadata, and warnings."""
    rotations: Mapping[str, TensorRotation] = {}
    if plan.layout is not None:
        rotations = tensor_rotations(plan.layout, read=plan.read, dtype=plan.torch_dtype)
    proof, warnings = _check_fusion(plan, rotations, report)
    calibration = _validate(plan, rotations, report)
    if calibration is not None and calibration.misses and not force:
        raise ThresholdError(
            f"{plan.settings.name} misses a threshold on {plan.source.name}: "
            + "; ".join(calibration.misses),
            hint="choose a preset with more bits, allow more (--max-kl, --min-top1, "
            "--max-loss-increase), or pass --force to write it and record the miss",
            details={"calibration": calibration.model_dump(mode="json")},
        )
    if calibration is not None:
        warnings += _warnings(calibration, plan.settings.encoder)
    return describe(plan, proof, calibration), warnings


def _warnings(calibration: Calibration, encoder: Encoder) -> tuple[str, ...]:
    """What is worth knowing of a validation that passed."""
    others = [errors for errors in calibration.engines if errors.encoder != encoder]
    return (
        *(
            f"public engines pack with the reference encoder, which would miss: {miss}"
            for miss in calibration.thresholds.misses(others)
        ),
        *(
            f"{errors.engine}: {saturation_sentence(errors.saturated_scales)}"
            for errors in calibration.engines
            if errors.saturated_scales
        ),
    )


def _check_fusion(
    plan: ConversionPlan, rotations: Mapping[str, TensorRotation], report: Report
) -> tuple[ProofRecord | None, tuple[str, ...]]:
    if plan.layout is None or plan.proof is None:
        return None, ()
    check = check_weights(plan.layout, plan.rows, rotations, report=report)
    record = ProofRecord(
        checked=plan.proof.checked,
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
    report("loading the model", 0, 1)
    model = load_model(
        plan.checkpoint.folder,
        dtype=validation.dtype,
        device=validation.device,
        trust_remote_code=plan.trust_remote_code,
    )
    report("loading the model", 1, 1)
    check_token_ids(model, plan.windows)
    fused_weights = {
        plan.parameters[name]: rotate(plan.read(name)) for name, rotate in rotations.items()
    }
    engines = validate(
        model,
        plan.windows,
        plan.settings,
        fused_weights,
        report,
        fused_rotation=fused_rotation(plan.layout.head_dim) if plan.layout else None,
    )
    return Calibration(
        dataset=validation.text.name,
        num_samples=validation.text.num_samples,
        sequence_length=validation.text.sequence_length,
        seed=validation.text.seed,
        compute_dtype=str(model.dtype).removeprefix("torch."),
        engines=engines,
        thresholds=validation.thresholds,
        misses=validation.thresholds.misses(
            errors for errors in engines if errors.encoder == plan.settings.encoder
        ),
    )
