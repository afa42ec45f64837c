"""Conversions by the core, in the process of the test."""

from dataclasses import dataclass
from pathlib import Path

from kvarn_cli.conversion.plan import RotationPlace, Validation, plan_conversion
from kvarn_cli.conversion.run import Conversion, run_conversion
from kvarn_cli.progress import Report, silent
from kvarn_cli.settings import Encoder, KVarNSettings


@dataclass(frozen=True)
class Converted:
    """A checkpoint before and after."""

    source: Path
    output: Path
    conversion: Conversion


def convert(
    source: Path,
    output: Path,
    *,
    preset: str = "k4v4_g32",
    encoder: Encoder = "reference",
    rotation: RotationPlace = "fused",
    dtype: str | None = None,
    validation: Validation | None = None,
    overwrite: bool = False,
    force: bool = False,
    report: Report = silent,
) -> Converted:
    """Plan and run a conversion, without validation unless asked for."""
    plan = plan_conversion(
        str(source),
        settings=KVarNSettings.from_name(preset).with_(encoder=encoder),
        rotation=rotation,
        dtype=dtype,
        output=output,
        validation=validation,
        overwrite=overwrite,
    )
    return Converted(source, output, run_conversion(plan, force=force, report=report))
