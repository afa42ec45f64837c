"""On trained weights, each part of the method earns its place."""

import pytest
import torch

from kvarn_cli.conversion.plan import plan_conversion
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.validation import validate
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.progress import silent
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import parse_method
from kvarn_cli.settings import KVarNSettings

pytestmark = pytest.mark.real_model

SPECS = (
    "kvarn:k2v2_g128",
    "quarot:k2v2_g128",
    "kivi:k2v2_g128",
    "kvarn:k2v2_g128,sink_tokens=0",
)
PLAIN_H_TWICE = "kvarn:k4v2_g128,value_rotation=fused"


@pytest.fixture(scope="module")
def errors(smollm2_model, calibration_windows):
    methods = [parse_method(spec) for spec in SPECS]
    measured = measure_methods(smollm2_model, calibration_windows, methods)
    return dict(zip(SPECS, measured.results, strict=True))


@pytest.fixture(scope="module")
def plain_h_twice(smollm2_model, calibration_windows):
    """On the original model, `fused` leaves V in the plain basis: H, and H again."""
    return measure_methods(
        smollm2_model, calibration_windows, [parse_method(PLAIN_H_TWICE)]
    ).results[0]


@pytest.fixture(scope="module")
def engines(smollm2, smollm2_model, calibration_windows):
    plan = plan_conversion(str(smollm2), settings=KVarNSettings(), rotation="fused")
    fused = {
        name: rotate(plan.read(name)) for name, rotate in tensor_rotations(plan.layout).items()
    }
    before = {name: smollm2_model.get_parameter(name).clone() for name in fused}
    measured = validate(
        smollm2_model,
        calibration_windows,
        plan.settings,
        fused,
        silent,
        fused_rotation=fused_rotation(plan.layout.head_dim),
    )
    for name, weight in before.items():
        assert torch.equal(smollm2_model.get_parameter(name), weight)
    return {engine.engine: engine for engine in measured}


def test_rotation_and_normalization_each_lower_the_divergence_at_two_bits(errors):
    kvarn, rotation, rtn = (errors[spec].logits.kl.mean for spec in SPECS[:3])
    assert kvarn < 0.95 * rotation
    assert rotation < 0.8 * rtn


def test_the_sink_lowers_the_divergence(errors):
    with_sink, without = errors["kvarn:k2v2_g128"], errors["kvarn:k2v2_g128,sink_tokens=0"]
    assert with_sink.logits.kl.mean < 0.9 * without.logits.kl.mean


def test_bent_signs_survive_a_second_rotation_and_plain_h_does_not(plain_h_twice, engines):
    bent_twice = engines["rotates_again"].kl_mean
    honoured = engines["honours_marker"].kl_mean
    assert bent_twice < 0.9 * plain_h_twice.logits.kl.mean
    assert bent_twice == pytest.approx(honoured, rel=0.2)


def test_the_published_preset_passes_the_default_thresholds(engines):
    for engine in engines.values():
        assert engine.kl_mean < 0.05
        assert engine.top1_agreement > 0.9
        assert abs(engine.loss_quantized - engine.loss_original) < 0.05
