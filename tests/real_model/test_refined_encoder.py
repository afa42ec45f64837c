"""On trained weights, the refined encoder takes a large part of the divergence away."""

import pytest

from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.quantization.methods import parse_method

pytestmark = pytest.mark.real_model


@pytest.mark.parametrize(("preset", "allowed"), [("k2v2_g128", 0.6), ("k4v2_g128", 0.8)])
def test_the_refined_encoder_lowers_the_divergence_in_every_window(
    smollm2_model, calibration_windows, preset, allowed
):
    methods = [parse_method(f"kvarn:{preset}{options}") for options in ("", ",encoder=refined")]
    divergences = []
    for window in calibration_windows.split(1):
        measured = measure_methods(smollm2_model, window, methods, static=False)
        reference, refined = measured.results
        assert refined.logits.kl.mean < reference.logits.kl.mean
        assert refined.attention.accumulated.mae < reference.attention.accumulated.mae
        assert refined.bits_per_element == reference.bits_per_element
        divergences.append((reference.logits.kl.mean, refined.logits.kl.mean))
    references, refined_ones = zip(*divergences, strict=True)
    assert sum(refined_ones) <= allowed * sum(references)
