import dataclasses
import json
import math

import pytest
import torch
from awkward_checkpoint import CALIBRATION_TEXT, edit_config
from conversions import convert
from tiny_models import build_tiny_checkpoint

from kvarn_cli.errors import CheckpointError, SettingsError, UnsupportedModelError, UsageError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.inspection import inspect_model
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.quantization.methods import parse_method

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder):
    return build_tiny_checkpoint(folder / "llama", "llama")


@pytest.fixture(scope="module")
def converted(llama, folder):
    return convert(llama, folder / "converted", preset="k2v2_g32").output


@pytest.fixture(scope="module")
def text(folder):
    path = folder / "text.txt"
    path.write_text(CALIBRATION_TEXT)
    return CalibrationText(path, "text", num_samples=2, sequence_length=200, seed=1)


def inspect(model, text, *specs):
    return inspect_model(str(model), specs, text, device=CPU, dtype=torch.float32)


def numbers(errors):
    """Everything but the time it took."""
    return dataclasses.replace(errors, elapsed_seconds=0, method="")


def test_the_numbers_are_those_of_the_measurement(converted, text):
    specs = ["kvarn:k2v2_g32", "kivi:k4v4_g32"]
    report = inspect(converted, text, *specs)
    measured = measure_methods(
        load_model(converted, dtype=torch.float32, device=CPU),
        text.windows(load_tokenizer(converted)),
        [parse_method("kvarn:k2v2_g32,value_rotation=fused"), parse_method("kivi:k4v4_g32")],
        fused_rotation=fused_rotation(32),
    )
    assert [result.method for result in report.results] == specs
    assert list(map(numbers, report.results)) == list(map(numbers, measured))
    assert report.fused


def test_the_document_is_json_and_says_what_was_measured(llama, text):
    document = inspect(llama, text, "exact").document()
    document = json.loads(json.dumps(document, allow_nan=False))
    assert document["schema"] == "kvarn.errors/1"
    assert (document["model"], document["revision"], document["fused"]) == ("llama", None, False)
    assert (document["dataset"], document["seed"]) == ("text.txt", 1)
    assert (document["num_samples"], document["sequence_length"]) == (2, 200)
    assert document["compute_dtype"] == "float32"
    (exact,) = document["results"]
    assert exact["num_windows"] == 2
    assert exact["attention_mae"] == 0
    assert exact["top1_agreement"] == 1
    assert exact["loss_method"] == exact["loss_exact"]


def test_without_a_method_three_are_measured_at_the_models_own_preset(llama, converted, text):
    labels = [result.method for result in inspect(converted, text).results]
    assert labels == ["kvarn:k2v2_g32", "quarot:k2v2_g32", "kivi:k2v2_g32"]
    long = dataclasses.replace(text, sequence_length=400)
    labels = [result.method for result in inspect(llama, long).results]
    assert labels == ["kvarn:k4v2_g128", "quarot:k4v2_g128", "kivi:k4v2_g128"]


def test_other_methods_cost_the_same_on_the_original_and_on_the_converted_model(
    llama, converted, text
):
    """They are given V in the original's basis, so only float noise differs."""
    (original,) = inspect(llama, text, "kivi:k2v2_g32").results
    (fused,) = inspect(converted, text, "kivi:k2v2_g32").results
    assert fused.kl_mean == pytest.approx(original.kl_mean, rel=0.05)
    assert fused.loss_exact == pytest.approx(original.loss_exact, rel=1e-4)


def test_the_rotation_can_be_chosen(converted, text):
    again = inspect(converted, text, "kvarn:k2v2_g32,value_rotation=online").results[0]
    honoured = inspect(converted, text, "kvarn:k2v2_g32").results[0]
    assert again.method == "kvarn:k2v2_g32,value_rotation=online"
    assert again.kl_mean != honoured.kl_mean


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("magic", "unknown method 'magic'"),
        ("kvarn:k3v2_g32", "key_bits is 3"),
        ("kvarn,iterations=two", "whole number"),
    ],
)
def test_a_wrong_method_is_refused_before_the_model_is_looked_for(text, spec, message):
    with pytest.raises(SettingsError, match=message):
        inspect("./nowhere", text, spec)


def test_windows_that_pack_nothing_are_refused_unless_the_method_is_exact(llama, text):
    short = dataclasses.replace(text, sequence_length=150)
    with pytest.raises(UsageError, match="measure too little"):
        inspect(llama, short, "exact", "kvarn:k2v2_g32")
    assert math.isclose(inspect(llama, short, "exact").results[0].kl_mean, 0, abs_tol=1e-6)


def test_a_model_without_a_cache_to_quantize_is_refused(tmp_path, text):
    sliding = build_tiny_checkpoint(tmp_path / "sliding", "mistral-sliding")
    with pytest.raises(UnsupportedModelError, match="no layer"):
        inspect(sliding, text, "kvarn:k2v2_g32")
    edit_config(sliding, sliding_window=None, head_dim=80)
    with pytest.raises(UnsupportedModelError, match="head_dim is 80"):
        inspect(sliding, text, "kvarn:k2v2_g32")


def test_a_broken_description_is_refused(tmp_path, text):
    llama = build_tiny_checkpoint(tmp_path / "llama", "llama")
    edit_config(llama, kvarn_config={"format_version": 1})
    with pytest.raises(CheckpointError, match="kvarn_config is broken"):
        inspect(llama, text, "exact")
