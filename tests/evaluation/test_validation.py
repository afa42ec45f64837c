import contextlib

import pytest
import torch
from fused_models import fuse
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.validation import validate
from kvarn_cli.progress import silent
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import parse_method
from kvarn_cli.settings import KVarNSettings

SETTINGS = KVarNSettings(key_bits=4, value_bits=4, group_size=32, sink_tokens=32, iterations=4)
SPEC = "kvarn:k4v4_g32,sink_tokens=32,iterations=4"
ROTATION = fused_rotation(32)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(300, (2, 140), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def fused_weights(llama: PreTrainedModel) -> dict[str, Tensor]:
    fused = dict(fuse(llama).named_parameters())
    return {
        name: fused[name].detach()
        for name, weight in llama.named_parameters()
        if not torch.equal(weight, fused[name])
    }


def test_a_fused_model_is_measured_on_both_kinds_of_engine(
    llama: PreTrainedModel, windows: Tensor, fused_weights: dict[str, Tensor]
) -> None:
    engines = validate(llama, windows, SETTINGS, fused_weights, silent, fused_rotation=ROTATION)
    measured = measure_methods(
        fuse(llama),
        windows,
        [parse_method(f"{SPEC},value_rotation={where}") for where in ("fused", "online")],
        fused_rotation=ROTATION,
        static=False,
    )
    assert [errors.engine for errors in engines] == ["honours_marker", "rotates_again"]
    assert engines[0].kl_mean != engines[1].kl_mean
    for errors, expected in zip(engines, measured.results, strict=True):
        logits, attention = expected.logits, expected.attention.accumulated
        assert errors.kl_mean == pytest.approx(logits.kl.mean, rel=1e-6)
        assert errors.loss_quantized == pytest.approx(logits.loss, rel=1e-6)
        assert errors.loss_original == pytest.approx(logits.loss_exact, rel=1e-6)
        by_layer = dict(zip(attention.layers, attention.by_layer, strict=True))
        assert errors.attention_mae_by_layer == pytest.approx(by_layer)


def test_without_fused_weights_the_engine_rotates(llama: PreTrainedModel, windows: Tensor) -> None:
    (errors,) = validate(llama, windows, SETTINGS, {}, silent)
    (expected,) = measure_methods(llama, windows, [parse_method(SPEC)], static=False).results
    assert errors.engine == "online"
    assert errors.kl_mean == expected.logits.kl.mean
    assert errors.attention_mae == expected.attention.accumulated.mae


def test_every_setting_is_measured(llama: PreTrainedModel, windows: Tensor) -> None:
    plain, clipped = (
        validate(llama, windows, settings, {}, silent)[0].kl_mean
        for settings in (SETTINGS, SETTINGS.with_(log_scale_max=0.0, log_scale_min=-0.01))
    )
    assert plain != clipped


def test_public_engines_are_measured_with_the_reference_encoder(
    llama: PreTrainedModel, windows: Tensor, fused_weights: dict[str, Tensor]
) -> None:
    refined = SETTINGS.with_(encoder="refined")
    fused = validate(llama, windows, refined, fused_weights, silent, fused_rotation=ROTATION)
    online = validate(llama, windows, refined, {}, silent)
    by_engine = [
        [(errors.engine, errors.encoder) for errors in engines] for engines in (fused, online)
    ]
    assert by_engine == [
        [("honours_marker", "refined"), ("rotates_again", "reference")],
        [("online", "refined"), ("online", "reference")],
    ]
    method = parse_method(f"{SPEC},encoder=refined")
    (expected,) = measure_methods(llama, windows, [method], static=False).results
    assert online[0].kl_mean == expected.logits.kl.mean != online[1].kl_mean


def test_the_original_gets_its_weights_back(
    llama: PreTrainedModel, windows: Tensor, fused_weights: dict[str, Tensor]
) -> None:
    before = {name: llama.get_parameter(name).clone() for name in fused_weights}

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    for report in (silent, interrupt):
        with contextlib.suppress(KeyboardInterrupt):
            validate(llama, windows, SETTINGS, fused_weights, report, fused_rotation=ROTATION)
        for name, weight in before.items():
            assert torch.equal(llama.get_parameter(name), weight)


def test_every_pass_is_reported(
    llama: PreTrainedModel, windows: Tensor, fused_weights: dict[str, Tensor]
) -> None:
    seen: list[tuple[str, int, int]] = []
    validate(
        llama,
        windows,
        SETTINGS,
        fused_weights,
        lambda *progress: seen.append(progress),
        fused_rotation=ROTATION,
    )
    assert seen == [("validating", done, 6) for done in range(7)]
