import dataclasses
import json
import math
import shutil

import pytest
import torch
from awkward_checkpoint import CALIBRATION_TEXT, edit_config
from conversions import convert
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_checkpoint, tiny_tokenizer
from transformers import Gemma2Config

from kvarn_cli.errors import CheckpointError, SettingsError, UnsupportedModelError, UsageError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.inspection import inspect_model
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.layout import find_layout
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.hadamard import fused_rotation, hadamard_matrix
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


def edit_block(folder, copy, **changes):
    """A copy of a converted folder with another description."""
    shutil.copytree(folder, copy)
    block = json.loads((copy / "config.json").read_text())["kvarn_config"]
    for path, value in changes.items():
        *parents, key = path.split("__")
        part = block
        for parent in parents:
            part = part[parent]
        part[key] = value
    edit_config(copy, kvarn_config=block)
    return copy


def test_the_default_methods_take_the_settings_of_the_conversion(converted, tmp_path, text):
    other = {"cache__iterations": 2, "cache__sink_tokens": 64, "cache__std_min": 0.5}
    folder = edit_block(converted, tmp_path / "other", **other)
    labels = [result.method for result in inspect(folder, text).results]
    assert labels == [
        "kvarn:k2v2_g32,sink_tokens=64,iterations=2,std_min=0.5",
        "quarot:k2v2_g32,sink_tokens=64",
        "kivi:k2v2_g32,sink_tokens=64",
    ]


def test_the_rotation_is_the_one_that_is_described(llama, tmp_path, text):
    """A model fused with plain H costs KIVI as much as the original does."""
    folder = convert(llama, tmp_path / "plain", preset="k2v2_g32").output
    model = load_model(llama, dtype=torch.float32, device=CPU)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    rotations = tensor_rotations(find_layout(model.config, shapes), hadamard_matrix(32))
    tensors = load_file(llama / "model.safetensors")
    for name, rotate in rotations.items():
        tensors[name] = rotate(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    plain = edit_block(folder, tmp_path / "described", rotations__value__signs=None)
    spec = "kivi:k2v2_g32"
    original, honoured, mistaken = (
        inspect(it, text, spec).results[0].values.direction for it in (llama, plain, folder)
    )
    assert honoured == pytest.approx(original, rel=1e-3)
    assert mistaken != pytest.approx(original, rel=1e-2)


def test_only_the_described_layers_are_quantized(converted, tmp_path, text):
    folder = edit_block(converted, tmp_path / "second", layers__covered=[1])
    (errors,) = inspect(folder, text, "kivi:k2v2_g32").results
    assert errors.attention_mae_by_layer[0] == 0
    assert errors.attention_mae_by_layer[1] > 0


def test_the_description_of_another_model_is_refused(converted, tmp_path, text):
    folder = edit_block(converted, tmp_path / "wide")
    edit_config(folder, head_dim=64)
    with pytest.raises(CheckpointError, match="describes heads 32 wide, the model's are 64"):
        inspect(folder, text, "exact")


def test_attention_that_cannot_be_measured_is_refused_before_the_weights_are_read(tmp_path, text):
    config = Gemma2Config(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=300,
    )
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Gemma2Attention uses softcap"):
        inspect(tmp_path, text, "exact")
