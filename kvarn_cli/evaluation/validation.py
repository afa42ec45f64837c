"""Does the converted model still say what the original says? Measured on calibration windows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.error_report import MethodResult
from kvarn_cli.evaluation.metrics import summarize
from kvarn_cli.evaluation.pseudo_decode import WindowErrors, pseudo_decode, record_exact
from kvarn_cli.metadata import EngineErrors
from kvarn_cli.progress import Report
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import KVarN
from kvarn_cli.runtime.coverage import attention_head_dim
from kvarn_cli.settings import KVarNSettings

Engine = Literal["honours_marker", "rotates_again", "online"]

_STAGE = "validating"


def validate(
    model: PreTrainedModel,
    windows: Tensor,
    settings: KVarNSettings,
    fused_weights: Mapping[str, Tensor],
    report: Report,
) -> list[EngineErrors]:
    """Measure the converted model on each kind of engine against the original.

    Args:
        model: the original, in evaluation mode.
        windows: int64 [windows, tokens].
        settings: of the quantizer.
        fused_weights: the converted model's parameters that differ from the original's, by name;
            empty when V is rotated online.
        report: told about progress.

    Returns:
        Errors on an engine that honours the marker and on one that rotates V again; or, without
        fused weights, on an engine that rotates V online.
    """
    methods = _engine_methods(settings, fused=bool(fused_weights))
    rotation = fused_rotation(attention_head_dim(model.config)) if fused_weights else None
    measured: dict[Engine, list[WindowErrors]] = {engine: [] for engine in methods}
    runs = 1 + len(methods)
    report(_STAGE, 0, len(windows) * runs)
    for number, window in enumerate(windows.to(model.device).split(1)):
        exact = record_exact(model, window)
        report(_STAGE, number * runs + 1, len(windows) * runs)
        with _swapped(model, fused_weights):
            for offset, (engine, method) in enumerate(methods.items(), start=2):
                errors = pseudo_decode(model, exact, method, fused_rotation=rotation)
                measured[engine].append(errors)
                report(_STAGE, number * runs + offset, len(windows) * runs)
    return [
        _engine_errors(engine, summarize(errors, first_position=errors[0].first_affected))
        for engine, errors in measured.items()
    ]


def _engine_methods(settings: KVarNSettings, *, fused: bool) -> dict[Engine, KVarN]:
    def method(value_rotation: Literal["online", "fused"]) -> KVarN:
        return replace(KVarN.from_settings(settings), value_rotation=value_rotation)

    if not fused:
        return {"online": method("online")}
    return {"honours_marker": method("fused"), "rotates_again": method("online")}


@contextmanager
def _swapped(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the model other weights for a while; nothing is copied twice."""
    originals = {}
    try:
        for name, weight in weights.items():
            parameter = model.get_parameter(name)
            originals[name] = parameter.data
            parameter.data = weight.to(device=parameter.device, dtype=parameter.dtype)
        yield
    finally:
        for name, original in originals.items():
            model.get_parameter(name).data = original


def _engine_errors(engine: Engine, errors: MethodResult) -> EngineErrors:
    logits, attention = errors.logits, errors.attention.accumulated
    return EngineErrors(
        engine=engine,
        kl_mean=logits.kl.mean,
        top1_agreement=logits.top1,
        loss_original=logits.loss_exact,
        loss_quantized=logits.loss,
        attention_mae=attention.mae,
        attention_mae_by_layer=dict(zip(attention.layers, attention.by_layer, strict=True)),
    )
