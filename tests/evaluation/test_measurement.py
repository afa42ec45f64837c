import torch
from decoding import random_tokens
from fused_models import fuse
from transformers import PreTrainedModel

from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.metrics import summarize
from kvarn_cli.evaluation.pseudo_decode import pseudo_decode, record_exact
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import parse_method

METHODS = [parse_method(spec) for spec in ("kvarn:k2v2_g32", "exact", "kivi:k2v2_g32")]


def test_methods_are_measured_on_every_window_in_their_order(llama: PreTrainedModel) -> None:
    windows = random_tokens(300, batch=3)
    passes: list[tuple[int, int]] = []
    measured = measure_methods(
        llama, windows, METHODS, report=lambda _, done, total: passes.append((done, total))
    )
    assert passes == [(done, 12) for done in range(13)]
    assert [errors.method for errors in measured] == [method.label for method in METHODS]
    kvarn, exact, kivi = measured
    assert exact.kl_mean == exact.attention_mae == 0
    assert min(kvarn.kl_mean, kivi.kl_mean) > 1e-3
    alone = summarize(
        [
            pseudo_decode(llama, record_exact(llama, window), METHODS[0])
            for window in windows.split(1)
        ],
        first_position=160,
    )
    assert {errors.first_position for errors in measured} == {160}
    assert kvarn.kl_mean == alone.kl_mean
    assert kvarn.keys == alone.keys


def test_a_fused_model_is_compared_with_itself_in_the_plain_basis(llama: PreTrainedModel) -> None:
    windows = random_tokens(300, batch=1)
    rotation = fused_rotation(32, dtype=torch.float64)
    original = measure_methods(llama, windows, METHODS[2:])[0]
    fused = measure_methods(fuse(llama), windows, METHODS[2:], fused_rotation=rotation)[0]
    assert abs(fused.attention_mae / original.attention_mae - 1) < 1e-4
