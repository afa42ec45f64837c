"""`kvarn inspect-errors`: what quantized caches do to one model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvarn_cli import __version__
from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.source import fetch_weights, resolve_source
from kvarn_cli.errors import CheckpointError, UsageError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.error_report import (
    ErrorReport,
    Windows,
)
from kvarn_cli.evaluation.fitting import fit_methods
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.metrics import MEMORY_LENGTHS
from kvarn_cli.evaluation.rehearsal import rehearse
from kvarn_cli.evaluation.retrieval import look_up, lookup_task
from kvarn_cli.evaluation.tasks import add_greedy, add_retrieval
from kvarn_cli.metadata import CONFIG_KEY, Rotation
from kvarn_cli.model.cache_layout import find_cache_layout
from kvarn_cli.model.cache_trace import build_without_weights, trace_cache
from kvarn_cli.model.loading import check_token_ids, load_config, load_model, load_tokenizer
from kvarn_cli.progress import Report, silent
from kvarn_cli.quantization.hadamard import rotation_matrix
from kvarn_cli.quantization.methods import (
    FP8,
    KIVI,
    Q40,
    Exact,
    KVarN,
    Method,
    QuaRot,
    parse_method,
)
from kvarn_cli.runtime.coverage import (
    architecture_of,
    check_fit,
    rope_key_dim,
)
from kvarn_cli.runtime.description import described_cache
from kvarn_cli.settings import DEFAULT_LATENT_PRESET, DEFAULT_PRESET, KVarNSettings

_FIT_WINDOWS = 1


@dataclass(frozen=True)
class Extras:
    """Measurements beyond the usual ones.

    Attributes:
        oracle_shares: shares of worst tokens to restore exactly, each below 1.
        greedy_tokens: tokens to continue each window by; 0 leaves it out.
        retrieval_lines: lines of the look-up task; 0 leaves it out.
        memory_lengths: context lengths to state the cache's bytes at.
    """

    oracle_shares: tuple[float, ...] = ()
    greedy_tokens: int = 0
    retrieval_lines: int = 0
    memory_lengths: tuple[int, ...] = MEMORY_LENGTHS


def inspect_model(
    model_name: str,
    specs: Sequence[str],
    text: CalibrationText,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    no_window: bool = False,
    sliding: bool = False,
    extras: Extras = Extras(),
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    report: Report = silent,
) -> ErrorReport:
    """Measure methods on a model, original or converted.

    An interrupt ends the measurement early; the report of what is finished is marked partial.

    Args:
        model_name: local folder or Hub id.
        specs: methods, see `parse_method`; empty for a default set around the model's own preset.
        text: windows to measure on.
        device: where the model runs.
        dtype: of the model's arithmetic; None is the stored one.
        no_window: leave no token exact, neither sink nor tail, with any method.
        sliding: quantize layers with a sliding window too, which engines keep exact.
        extras: measurements beyond the usual ones.
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
        KeyboardInterrupt: nothing was finished yet.
    """
    methods = [parse_method(spec) for spec in specs]
    source = resolve_source(
        model_name, revision=revision, token=token, cache_dir=cache_dir, weights=False
    )
    config = load_config(source.folder, trust_remote_code=trust_remote_code)
    block = described_cache(config)
    model_class = build_without_weights(config, trust_remote_code=trust_remote_code)
    cache = find_cache_layout(config, trace_cache(model_class), cover_sliding=sliding)
    if block is not None and block.cache.head_dim != cache.head_dim:
        raise CheckpointError(
            f"config.json: {CONFIG_KEY} describes heads {block.cache.head_dim} wide, the model's "
            f"are {cache.head_dim}"
        )
    covered = cache.covered if block is None or sliding else tuple(block.layers.covered)
    if sliding and extras.greedy_tokens:
        raise UsageError(
            "KVarNCache keeps layers with a sliding window exact, so it cannot write with them",
            hint="leave out --greedy or --sliding",
        )
    fused = block is not None and block.fused
    if not methods:
        preset = DEFAULT_PRESET if cache.rope_dim is None else DEFAULT_LATENT_PRESET
        methods = default_methods(
            block.cache.settings if block else KVarNSettings.from_name(preset)
        )
    if no_window:
        methods = [_without_window(method) for method in methods]
    for method in methods:
        _check_value_rotation(method, fused=fused)
        if not isinstance(method, Exact):
            _check_cache(method, config)
            text.check_length(method.settings)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    windows = text.windows(tokenizer, further=_FIT_WINDOWS * any(m.needs_fit for m in methods))
    rehearse(config, trust_remote_code=trust_remote_code)
    lookup = None
    if extras.retrieval_lines:
        lookup = lookup_task(config, tokenizer, extras.retrieval_lines, text.seed)
    fetch_weights(source, token=token, cache_dir=cache_dir)
    report("loading the model", 0, 1)
    folder = open_checkpoint(source.folder).folder
    model = load_model(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    report("loading the model", 1, 1)
    check_token_ids(model, windows)
    rotation = _matrix(block.rotations.value) if block and fused else None
    own_methods = fit_methods(
        model,
        windows[text.num_samples :],
        [_on_this_model(method, fused=fused) for method in methods],
        fused_rotation=rotation,
        covered=covered,
    )
    windows = windows[: text.num_samples]
    measurement = measure_methods(
        model,
        windows,
        own_methods,
        fused_rotation=rotation,
        covered=covered,
        oracle_shares=extras.oracle_shares,
        memory_lengths=extras.memory_lengths,
        report=report,
    )
    results = [
        result.model_copy(update={"method": method.label})
        for method, result in zip(methods, measurement.results, strict=False)
    ]
    retrieval_exact, interrupted = None, measurement.interrupted
    if not interrupted:
        try:
            if extras.greedy_tokens:
                add_greedy(results, model, windows, own_methods, extras.greedy_tokens, report)
            if lookup is not None:
                retrieval_exact = look_up(model, lookup)
                add_retrieval(results, model, lookup, own_methods, rotation, covered, report)
        except KeyboardInterrupt:
            interrupted = True
    return ErrorReport(
        kvarn_version=__version__,
        model=source.name,
        revision=source.revision,
        fused=fused,
        compute_dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(cache.covered) + len(cache.left_out),
        covered_layers=covered,
        num_heads=max(len(row) for row in results[0].attention.accumulated.by_head),
        num_kv_heads=max(cache.kv_heads.values()),
        head_dim=cache.head_dim,
        rope_dim=cache.rope_dim,
        windows=Windows(
            dataset=text.name,
            num_samples=text.num_samples,
            sequence_length=text.sequence_length,
            seed=text.seed,
        ),
        partial=interrupted,
        retrieval_exact=retrieval_exact,
        plain_seconds=measurement.plain_seconds,
        results=tuple(results),
    )


def default_methods(settings: KVarNSettings) -> list[Method]:
    """The methods to compare when none is named, on the tokens that the settings quantize.

    KVarN with the settings and at two bits, its rivals at two bits, and what engines offer at four
    and eight. Of a latent those that quantize it a channel at a time.
    """
    if settings.latent:
        two_bits = settings.with_(key_bits=2)
        latents: list[Method] = [KVarN.from_settings(settings), KVarN.from_settings(two_bits)]
        latents += [QuaRot.from_settings(two_bits), KIVI.from_settings(two_bits)]
        return list(dict.fromkeys(latents))
    two_bits = settings.with_(key_bits=2, value_bits=2)
    methods = [
        KVarN.from_settings(settings),
        KVarN.from_settings(two_bits),
        QuaRot.from_settings(two_bits),
        KIVI.from_settings(two_bits),
        Q40.from_settings(settings),
        FP8.from_settings(settings),
    ]
    return list(dict.fromkeys(methods))


def _check_cache(method: Method, config: PreTrainedConfig) -> None:
    """Refuse a method that quantizes what this model does not cache."""
    if rope_key_dim(config) is not None and not method.takes_latents:
        raise UsageError(
            f"{method.name} quantizes K and V, and {architecture_of(config)} caches a latent (MLA)",
            hint=f"use kvarn:{DEFAULT_LATENT_PRESET}, or quarot, kivi or ablation with a preset "
            "like it",
        )
    check_fit(config, method.settings)


def _matrix(rotation: Rotation) -> Tensor:
    return rotation_matrix(rotation.head_dim, rotation.signs)


def _without_window(method: Method) -> Method:
    if isinstance(method, Exact):
        return method
    return replace(method, sink_tokens=0, residual_tokens=0, tail="packed")


def _check_value_rotation(method: Method, *, fused: bool) -> None:
    if isinstance(method, KVarN) and method.value_rotation == "fused" and not fused:
        raise UsageError(
            f"{method.label} takes V as rotated already, and this model's is not",
            hint="convert the model, or leave value_rotation out",
        )


def _on_this_model(method: Method, *, fused: bool) -> Method:
    """Let `kvarn` take V as the model caches it, unless the spec says otherwise."""
    if isinstance(method, KVarN) and method.value_rotation is None and fused:
        return replace(method, value_rotation="fused")
    return method
