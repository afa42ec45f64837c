import dataclasses
import json
import math
import shutil

import pytest
import torch
from awkward_checkpoint import CALIBRATION_TEXT, edit_config
from conversions import convert
from fused_models import layout_of
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_checkpoint, tiny_tokenizer
from transformers import BloomConfig

from kvarn_cli.errors import CheckpointError, SettingsError, UnsupportedModelError, UsageError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.inspection import Extras, default_methods, inspect_model
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.hadamard import fused_rotation, hadamard_matrix
from kvarn_cli.quantization.methods import parse_method
from kvarn_cli.settings import KVarNSettings

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


def inspect(model, text, *specs, **options):
    return inspect_model(str(model), specs, text, device=CPU, dtype=torch.float32, **options)


def numbers(errors):
    """Everything but the time it took."""
    return errors.model_copy(update={"elapsed_seconds": 0, "method": ""})


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
    assert list(map(numbers, report.results)) == list(map(numbers, measured.results))
    assert report.fused


def test_the_document_is_json_and_says_what_was_measured(llama, text):
    document = inspect(llama, text, "exact").document()
    document = json.loads(json.dumps(document, allow_nan=False))
    assert document["schema"] == "kvarn.errors/1"
    assert (document["model"], document["revision"], document["fused"]) == ("llama", None, False)
    assert document["windows"] == {
        "dataset": "text.txt",
        "num_samples": 2,
        "sequence_length": 200,
        "seed": 1,
    }
    assert (document["compute_dtype"], document["partial"]) == ("float32", False)
    assert (document["num_layers"], document["covered_layers"]) == (2, [0, 1])
    assert [document[key] for key in ("num_heads", "num_kv_heads", "head_dim")] == [4, 2, 32]
    (exact,) = document["results"]
    assert exact["num_windows"] == 2
    assert exact["attention"]["accumulated"]["mae"] == 0
    assert exact["logits"]["top1"] == 1
    assert exact["logits"]["loss"] == exact["logits"]["loss_exact"]


def test_without_a_method_rivals_are_measured_with_the_groups_of_the_models_preset(
    llama, converted, text
):
    labels = [result.method for result in inspect(converted, text).results]
    two_bits = [f"{name}:k2v2_g32" for name in ("kvarn", "quarot", "kivi")]
    assert labels == [*two_bits, "q4_0,group_size=32", "fp8,group_size=32"]
    labels = [method.label for method in default_methods(KVarNSettings())]
    two_bits = [f"{name}:k2v2_g128" for name in ("kvarn", "quarot", "kivi")]
    assert labels == ["kvarn:k4v2_g128", *two_bits, "q4_0", "fp8"]


def test_without_a_window_no_token_is_exact(llama, text):
    report = inspect(llama, text, "exact", "kvarn:k2v2_g32", no_window=True)
    exact, kvarn = report.results
    assert exact.method == "exact"
    assert kvarn.method == "kvarn:k2v2_g32,sink_tokens=0,tail=packed"
    with_window = inspect(llama, text, "kvarn:k2v2_g32").results[0]
    assert kvarn.bits_per_element < with_window.bits_per_element
    assert kvarn.logits.kl.mean > with_window.logits.kl.mean


def test_a_method_is_fitted_on_text_that_is_not_measured(llama, text):
    report = inspect(llama, text, "kvquant:k4v4_g32", "kvarn:k4v4_g32")
    alone = inspect(llama, text, "kvarn:k4v4_g32")
    assert report.results[0].num_windows == 2
    assert numbers(report.results[1]) == numbers(alone.results[0])


def test_extras_add_their_results(llama, text):
    extras = Extras(oracle_shares=(0.05,), greedy_tokens=3, retrieval_lines=2)
    report = inspect(llama, text, "kvarn:k2v2_g32", "kivi:k2v2_g32", extras=extras)
    kvarn, kivi = report.results
    assert [entry.restored for entry in kvarn.oracle] == ["worst", "others"]
    assert len(kvarn.greedy.same_tokens) == 2
    assert kivi.greedy is None
    assert kivi.retrieval.num_questions == report.retrieval_exact.num_questions == 2


@pytest.mark.parametrize("stage", ["measuring", "continuing", "looking up"])
def test_an_interrupt_gives_what_is_finished(llama, text, stage):
    def interrupt(name, done, total):
        if name == stage and done == (1 if name == "looking up" else 2):
            raise KeyboardInterrupt

    extras = Extras(greedy_tokens=2, retrieval_lines=2)
    report = inspect(
        llama, text, "kvarn:k2v2_g32", "kvarn:k4v4_g32", extras=extras, report=interrupt
    )
    assert report.partial
    assert len(report.results) == (1 if stage == "measuring" else 2)
    assert (report.results[0].greedy is not None) == (stage == "looking up")
    assert (report.retrieval_exact is not None) == (stage == "looking up")
    answered = [result.retrieval is not None for result in report.results]
    assert answered == ([True, False] if stage == "looking up" else [False] * len(answered))


def test_v_said_to_be_rotated_in_a_model_where_it_is_not_is_caught(llama, text):
    with pytest.raises(UsageError, match="takes V as rotated already, and this model's is not"):
        inspect(llama, text, "kvarn:k2v2_g32,value_rotation=fused")


def test_other_methods_cost_the_same_on_the_original_and_on_the_converted_model(
    llama, converted, text
):
    """They are given V in the original's basis, so only float noise differs."""
    (original,) = inspect(llama, text, "kivi:k2v2_g32").results
    (fused,) = inspect(converted, text, "kivi:k2v2_g32").results
    assert fused.logits.kl.mean == pytest.approx(original.logits.kl.mean, rel=0.05)
    assert fused.logits.loss_exact == pytest.approx(original.logits.loss_exact, rel=1e-4)


def test_the_rotation_can_be_chosen(converted, text):
    again = inspect(converted, text, "kvarn:k2v2_g32,value_rotation=online").results[0]
    honoured = inspect(converted, text, "kvarn:k2v2_g32").results[0]
    assert again.method == "kvarn:k2v2_g32,value_rotation=online"
    assert again.logits.kl.mean != honoured.logits.kl.mean


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
    assert math.isclose(inspect(llama, short, "exact").results[0].logits.kl.mean, 0, abs_tol=1e-6)


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
        "q4_0,group_size=32,sink_tokens=64",
        "fp8,group_size=32,sink_tokens=64",
    ]


def test_the_rotation_is_the_one_that_is_described(llama, tmp_path, text):
    """A model fused with plain H costs KIVI as much as the original does."""
    folder = convert(llama, tmp_path / "plain", preset="k2v2_g32").output
    model = load_model(llama, dtype=torch.float32, device=CPU)
    rotations = tensor_rotations(layout_of(model), [hadamard_matrix(32)])
    tensors = load_file(llama / "model.safetensors")
    for name, rotate in rotations.items():
        tensors[name] = rotate(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    plain = edit_block(folder, tmp_path / "described", rotations__value__signs=None)
    spec = "kivi:k2v2_g32"
    original, honoured, mistaken = (
        inspect(it, text, spec).results[0].tokens.values.direction for it in (llama, plain, folder)
    )
    assert honoured == pytest.approx(original, rel=1e-3)
    assert mistaken != pytest.approx(original, rel=1e-2)


def test_only_the_described_layers_are_quantized(converted, tmp_path, text):
    folder = edit_block(converted, tmp_path / "second", layers__covered=[1])
    (errors,) = inspect(folder, text, "kivi:k2v2_g32").results
    first, second = errors.attention.accumulated.by_layer
    assert first == 0
    assert second > 0
    assert len(errors.tokens.key_drift.by_layer) == 1


def test_the_description_of_another_model_is_refused(converted, tmp_path, text):
    folder = edit_block(converted, tmp_path / "wide")
    edit_config(folder, head_dim=64)
    with pytest.raises(CheckpointError, match="describes heads 32 wide, the model's are 64"):
        inspect(folder, text, "exact")


def test_attention_that_cannot_be_measured_is_refused_before_the_weights_are_read(tmp_path, text):
    config = BloomConfig(vocab_size=300, hidden_size=64, n_layer=1, n_head=2)
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM does not use"):
        inspect(tmp_path, text, "exact")


def test_layers_with_a_sliding_window_are_quantized_when_asked(folder, text):
    sliding = build_tiny_checkpoint(folder / "sliding", "mistral-sliding", sliding_window=128)
    with pytest.raises(UnsupportedModelError, match="has no layer whose cache grows") as caught:
        inspect(sliding, text, "kvarn:k2v2_g32")
    assert "--sliding" in caught.value.hint
    report = inspect(sliding, text, "kvarn:k2v2_g32,sink_tokens=32", sliding=True)
    assert report.covered_layers == (0, 1)
    assert report.results[0].logits.kl.mean > 0
    with pytest.raises(UsageError, match="KVarNCache keeps layers with a sliding window exact"):
        inspect(sliding, text, "kvarn:k2v2_g32", sliding=True, extras=Extras(greedy_tokens=4))
