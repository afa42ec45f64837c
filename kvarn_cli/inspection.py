"""`kvarn inspect-errors`: what quantized caches do to one model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvarn_cli.checkpoint.checkpoint import loadable_folder, open_checkpoint
from kvarn_cli.checkpoint.source import fetch_weights, resolve_source
from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.metrics import MethodErrors
from kvarn_cli.evaluation.rehearsal import rehearse
from kvarn_cli.metadata import Rotation
from kvarn_cli.model.loading import check_token_ids, load_config, load_model, load_tokenizer
from kvarn_cli.progress import Report, silent
from kvarn_cli.quantization.hadamard import rotation_matrix
from kvarn_cli.quantization.methods import KIVI, Exact, KVarN, Method, QuaRot, parse_method
from kvarn_cli.runtime.coverage import attention_head_dim, covered_layers
from kvarn_cli.runtime.description import described_cache
from kvarn_cli.settings import DEFAULT_PRESET, KVarNSettings

SCHEMA = "kvarn.errors/1"


@dataclass(frozen=True)
class ErrorReport:
    """Errors of several methods on one model and one text.

    Attributes:
        model: Hub id or folder name.
        revision: commit on the Hub, when it is known.
        fused: whether V's rotation is fused into the model's weights.
        dataset: name of the text.
        num_samples: windows.
        sequence_length: tokens of a window.
        seed: that chose the windows.
        compute_dtype: of the model's arithmetic.
        results: one entry per method.
    """

    model: str
    revision: str | None
    fused: bool
    dataset: str
    num_samples: int
    sequence_length: int
    seed: int
    compute_dtype: str
    results: tuple[MethodErrors, ...]

    def document(self) -> dict[str, object]:
        """The report as JSON-ready data."""
        return {"schema": SCHEMA} | asdict(self)


def inspect_model(
    model_name: str,
    specs: Sequence[str],
    text: CalibrationText,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    report: Report = silent,
) -> ErrorReport:
    """Measure methods on a model, original or converted.

    Args:
        model_name: local folder or Hub id.
        specs: methods, see `parse_method`; empty for a default set around the model's own preset.
        text: windows to measure on.
        device: where the model runs.
        dtype: of the model's arithmetic; None is the stored one.
        revision: branch, tag or commit on the Hub.
        token: Hub token.
        cache_dir: where downloads are kept.
        trust_remote_code: whether code from the checkpoint may run.
        report: told about progress.

    Raises:
        UsageError: a spec is wrong, or the text or its windows are too short.
        UnsupportedModelError: the model's cache cannot be measured.
        CheckpointError: a file is broken, or describes another model.
        HubError: the download failed.
    """
    methods = [parse_method(spec) for spec in specs]
    source = resolve_source(
        model_name, revision=revision, token=token, cache_dir=cache_dir, weights=False
    )
    config = load_config(source.folder, trust_remote_code=trust_remote_code)
    block = described_cache(config)
    _refuse_nothing_to_measure(config)
    fused = block is not None and block.fused
    if not methods:
        settings = block.cache.settings if block else KVarNSettings.from_name(DEFAULT_PRESET)
        methods = [method.from_settings(settings) for method in (KVarN, QuaRot, KIVI)]
    for method in methods:
        if not isinstance(method, Exact):
            text.check_length(method.settings)
    windows = text.windows(load_tokenizer(source.folder, trust_remote_code=trust_remote_code))
    rehearse(config, trust_remote_code=trust_remote_code)
    fetch_weights(source, token=token, cache_dir=cache_dir)
    with loadable_folder(open_checkpoint(source.folder)) as folder:
        model = load_model(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    check_token_ids(model, windows)
    results = measure_methods(
        model,
        windows,
        [_on_this_model(method, fused=fused) for method in methods],
        fused_rotation=_matrix(block.rotations.value) if block and fused else None,
        covered=block.layers.covered if block else None,
        report=report,
    )
    return ErrorReport(
        model=source.name,
        revision=source.revision,
        fused=fused,
        dataset=text.name,
        num_samples=text.num_samples,
        sequence_length=text.sequence_length,
        seed=text.seed,
        compute_dtype=str(model.dtype).removeprefix("torch."),
        results=tuple(
            replace(result, method=method.label)
            for method, result in zip(methods, results, strict=True)
        ),
    )


def _refuse_nothing_to_measure(config: PreTrainedConfig) -> None:
    if not covered_layers(config):
        raise UnsupportedModelError(
            f"no layer of {config.model_type} keeps a cache that grows with the sequence"
        )
    attention_head_dim(config)


def _matrix(rotation: Rotation) -> Tensor:
    return rotation_matrix(rotation.head_dim, rotation.signs)


def _on_this_model(method: Method, *, fused: bool) -> Method:
    """Let `kvarn` take V as the model caches it, unless the spec says otherwise."""
    if isinstance(method, KVarN) and method.value_rotation is None and fused:
        return replace(method, value_rotation="fused")
    return method
