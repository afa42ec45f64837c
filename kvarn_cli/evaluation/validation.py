"""Does the converted model still say what the original says? Measured on calibration windows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.error_report import MethodResult
from kvarn_cli.evaluation.metrics import MethodSums
from kvarn_cli.evaluation.pseudo_decode import first_affected, pseudo_decode, record_exact
from kvarn_cli.metadata import EngineErrors
from kvarn_cli.progress import Report
from kvarn_cli.quantization.methods import KVarN
from kvarn_cli.settings import Encoder, KVarNSettings

Engine = Literal["honours_marker", "rotates_again", "online"]

_STAGE = "validating"


def validate(
    model: PreTrainedModel,
    windows: Tensor,
    settings: KVarNSettings,
    fused_weights: Mapping[str, Tensor],
    report: Report,
    *,
    fused_rotation: Tensor | None = None,
) -> list[EngineErrors]:
    """Measure the converted model on each kind of engine against the original.

    An engine that knows the conversion packs tiles with the encoder of `settings`. Public engines,
    which rotate V again, do it with the reference encoder.

    Args:
        model: the original, in evaluation mode.
        windows: int64 [windows, tokens].
        settings: of the quantizer.
        fused_weights: the converted model's parameters that differ from the original's, by name;
            empty when V is rotated online.
        report: told about progress.
        fused_rotation: R that these weights hold, [head_dim, head_dim].

    Returns:
        Errors on an engine that honours the marker and on one that rotates V again; or, without
        fused weights, on an engine that rotates V online (with the reference encoder as well, if
        `settings` name another).
    """
    engines = _engines(settings, fused=bool(fused_weights))
    sums = [MethodSums(first_affected(windows.shape[1], method)) for _, method in engines]
    runs = 1 + len(engines)
    report(_STAGE, 0, len(windows) * runs)
    for number, window in enumerate(windows.to(model.device).split(1)):
        exact = record_exact(model, window)
        report(_STAGE, number * runs + 1, len(windows) * runs)
        with _swapped(model, fused_weights):
            for index, (_, method) in enumerate(engines):
                sums[index].add(pseudo_decode(model, exact, method, fused_rotation=fused_rotation))
                report(_STAGE, number * runs + index + 2, len(windows) * runs)
    return [
        _engine_errors(engine, method.encoder, own.summary())
        for (engine, method), own in zip(engines, sums, strict=True)
    ]


def _engines(settings: KVarNSettings, *, fused: bool) -> list[tuple[Engine, KVarN]]:
    own = replace(KVarN.from_settings(settings), value_rotation="fused" if fused else "online")
    public = replace(own, encoder="reference", value_rotation="online")
    if fused:
        return [("honours_marker", own), ("rotates_again", public)]
    return [("online", own)] if own == public else [("online", own), ("online", public)]


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


def _engine_errors(engine: Engine, encoder: Encoder, errors: MethodResult) -> EngineErrors:
    logits, attention = errors.logits, errors.attention.accumulated
    return EngineErrors(
        engine=engine,
        encoder=encoder,
        kl_mean=logits.kl.mean,
        top1_agreement=logits.top1,
        loss_original=logits.loss_exact,
        loss_quantized=logits.loss,
        attention_mae=attention.mae,
        attention_mae_by_layer=dict(zip(attention.layers, attention.by_layer, strict=True)),
        saturated_scales=errors.saturated_scales,
    )
