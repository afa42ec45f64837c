import hashlib
import json
import subprocess
import sys

import pytest
import torch
import xxhash
from awkward_checkpoint import edit_config, marker_of
from checkpoint_files import contents
from conversions import convert
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_checkpoint

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.errors import CheckpointError, ThresholdError, UsageError

WRITTEN = {"config.json", "kvarn_manifest.json"}
_LOGITS = """
import json, sys, torch
from transformers import AutoModelForCausalLM

tokens = torch.arange(3, 99).remainder(300)[None]
answer = {}
for family, *folders in json.loads(sys.argv[1]):
    original, converted = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in folders
    )
    answer[family] = [(original - converted).abs().max().item(), original.std().item()]
print(json.dumps({"modules": sorted(sys.modules), "differences": answer}))
"""


@pytest.fixture(scope="module")
def plainly_loaded(fused_models):
    """Logit differences seen by a process that knows nothing of kvarn."""
    folders = [[name, str(it.source), str(it.output)] for name, it in fused_models.items()]
    done = subprocess.run(
        [sys.executable, "-c", _LOGITS, json.dumps(folders)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def rotated(name):
    return name.endswith(("v_proj.weight", "v_proj.bias", "o_proj.weight"))


def test_plain_transformers_loads_it_and_says_what_the_original_says(plainly_loaded):
    assert not any(name.startswith("kvarn") for name in plainly_loaded["modules"])
    for family, (difference, spread) in plainly_loaded["differences"].items():
        assert difference < (0.1 if family == "mistral" else 1e-4), family
        assert spread > 1


def test_v_and_o_change_and_every_other_byte_stays(fused):
    before, after = open_checkpoint(fused.source), open_checkpoint(fused.output)
    assert after.weight_map == before.weight_map
    assert after.shards == before.shards
    assert sum(map(rotated, before.weight_map)) >= 4
    for name in before.weight_map:
        assert (after.read(name) == before.read(name)) is not rotated(name), name


def test_every_other_file_is_copied_byte_for_byte(fused):
    before, after = contents(fused.source), contents(fused.output)
    copied = {name for name in before if not name.endswith(".safetensors")} - WRITTEN
    assert {"generation_config.json", "custom.py", "notes/café.txt", "tokenizer.json"} < copied
    assert after.keys() == before.keys() | WRITTEN
    assert all(after[name] == before[name] for name in copied)
    assert not marker_of(fused.source).exists()


def test_config_keeps_its_keys_in_their_order_and_gains_one(fused):
    before = json.loads((fused.source / "config.json").read_text())
    after = json.loads((fused.output / "config.json").read_text())
    assert list(after) == [*before, "kvarn_config"]
    assert after.pop("kvarn_config") == fused.conversion.metadata.model_dump(mode="json")
    assert after == before


def test_the_manifest_holds_every_file_but_the_card_and_itself(fused):
    files = json.loads((fused.output / "kvarn_manifest.json").read_text())["files"]
    after = contents(fused.output)
    assert files.keys() == after.keys() - {"kvarn_manifest.json", "README.md"}
    for name, record in files.items():
        assert record["size_bytes"] == len(after[name])
        if name.endswith(".safetensors"):
            assert record["xxh3_128"] == xxhash.xxh3_128(after[name]).hexdigest()
        else:
            assert record["sha256"] == hashlib.sha256(after[name]).hexdigest()


def test_the_proof_is_recorded(fused):
    proof = fused.conversion.metadata.proof
    assert proof.instance_difference <= proof.instance_tolerance == 1e-9
    assert proof.smallest_control > 0.01
    rounding = 4e-3 if "mistral" in fused.source.name else 1e-6
    assert 0 < proof.weight_change < rounding


def test_online_changes_no_byte_of_the_weights(llama, tmp_path):
    converted = convert(llama, tmp_path / "out", rotation="online")
    before, after = contents(llama), contents(converted.output)
    assert {name for name in after if after[name] != before.get(name)} == WRITTEN
    metadata = converted.conversion.metadata
    assert not metadata.fused
    assert metadata.proof is None


def test_quantized_weights_stay_as_they_are_online(llama, tmp_path):
    edit_config(llama, quantization_config={"quant_method": "gptq", "bits": 4})
    converted = convert(llama, tmp_path / "out", rotation="online")
    config = json.loads((converted.output / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "gptq", "bits": 4}


def test_the_validation_is_recorded(llama, tmp_path, short_validation):
    converted = convert(llama, tmp_path / "out", validation=short_validation())
    calibration = converted.conversion.metadata.calibration
    assert calibration.dataset == "text.txt"
    assert (calibration.num_samples, calibration.sequence_length) == (2, 192)
    assert calibration.compute_dtype == "float32"
    assert calibration.misses == []
    assert [errors.engine for errors in calibration.engines] == ["honours_marker", "rotates_again"]
    for errors in calibration.engines:
        assert 1e-4 < errors.kl_mean < 0.1
        assert errors.attention_mae_by_layer.keys() == {0, 1}


def test_fewer_bits_cost_more(llama, tmp_path, short_validation):
    def divergence(rotation, preset):
        output = tmp_path / f"{rotation}-{preset}"
        options = {"rotation": rotation, "preset": preset, "validation": short_validation()}
        calibration = convert(llama, output, **options).conversion.metadata.calibration
        return calibration.engines[0].kl_mean

    four_bits = divergence("online", "k4v4_g32")
    assert divergence("fused", "k4v4_g32") == pytest.approx(four_bits, rel=1)
    assert divergence("fused", "k2v2_g32") > 5 * four_bits


def test_a_missed_threshold_stops_before_the_first_byte(llama, tmp_path, short_validation):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ThresholdError, match="honours_marker: KL") as raised:
        convert(llama, tmp_path / "out", validation=short_validation(max_kl=1e-6))
    assert len(raised.value.details["calibration"]["engines"]) == 2
    assert sorted(tmp_path.iterdir()) == before


def test_force_writes_and_records_the_miss(llama, tmp_path, short_validation):
    strict = short_validation(max_kl=1e-6)
    converted = convert(llama, tmp_path / "out", validation=strict, force=True)
    assert len(converted.conversion.metadata.calibration.misses) == 2
    assert (tmp_path / "out" / "config.json").exists()


def test_only_engines_with_the_encoder_asked_for_are_held_to_the_thresholds(
    llama, tmp_path, short_validation
):
    def refined(name, max_kl):
        options = {"preset": "k2v2_g32", "encoder": "refined"}
        validation = short_validation(max_kl=max_kl)
        return convert(llama, tmp_path / name, validation=validation, **options).conversion

    own, public = refined("loose", 1.0).metadata.calibration.engines
    assert (own.encoder, public.encoder) == ("refined", "reference")
    assert own.kl_mean < public.kl_mean
    between = refined("between", (own.kl_mean + public.kl_mean) / 2)
    assert between.metadata.calibration.misses == []
    (warning,) = between.warnings
    assert warning.startswith("public engines pack with the reference encoder, which would miss: ")
    assert f"rotates_again: KL {public.kl_mean:.4f} > " in warning
    with pytest.raises(ThresholdError, match="honours_marker with the refined encoder") as raised:
        refined("strict", own.kl_mean / 2)
    assert "rotates_again" not in str(raised.value)


def test_scales_that_do_not_fit_into_the_record_are_told(llama, tmp_path, short_validation):
    layer = "model.layers.1.self_attn"

    def enlarge_v(tensors):
        tensors[f"{layer}.v_proj.weight"] *= 1e12
        tensors[f"{layer}.o_proj.weight"] *= 1e-12

    edit_tensors(llama, enlarge_v)
    converted = convert(
        llama, tmp_path / "out", validation=short_validation(max_kl=100.0), force=True
    )
    for errors in converted.conversion.metadata.calibration.engines:
        assert errors.saturated_scales.keys() == {1}
        warning = f"{errors.engine}: numbers larger than the record holds were clamped"
        assert any(each.startswith(warning) for each in converted.conversion.warnings)


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.1.self_attn.o_proj.weight", "o_proj.weight holds NaN or infinity"),
        ("model.layers.1.mlp.up_proj.weight", "the model's logits are no numbers at"),
    ],
)
def test_weights_that_are_no_numbers_are_found(llama, tmp_path, short_validation, tensor, message):
    edit_tensors(llama, lambda tensors: tensors[tensor].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=message):
        convert(llama, tmp_path / "out", validation=short_validation())
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_is_found_by_the_validation(llama, tmp_path, short_validation):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(llama, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors of the model, first {name}"):
        convert(llama, tmp_path / "out", validation=short_validation())


def test_an_all_zero_head_is_converted_with_a_warning(llama, tmp_path):
    name = "model.layers.1.self_attn.v_proj.weight"
    edit_tensors(llama, lambda tensors: tensors[name][:32].zero_())
    warnings = convert(llama, tmp_path / "out").conversion.warnings
    assert warnings == ("layer 1: V of KV head 0 is all zero",)


@pytest.mark.parametrize(("part", "named"), [("v_proj", "V"), ("o_proj", "W_O")])
def test_a_layer_that_is_all_zero_is_converted_with_warnings(llama, tmp_path, part, named):
    edit_tensors(llama, lambda tensors: tensors[f"model.layers.1.self_attn.{part}.weight"].zero_())
    warnings = convert(llama, tmp_path / "out").conversion.warnings
    assert len(warnings) == (2 if part == "v_proj" else 4)
    assert all(warning.startswith(f"layer 1: {named} of ") for warning in warnings)


def test_a_checkpoint_of_the_base_model_is_validated_and_converted(tmp_path, short_validation):
    """Its names lack the prefix; transformers adds it while loading."""
    model = build_tiny_checkpoint(tmp_path / "whole", "llama", tie_word_embeddings=True)
    base = build_tiny_checkpoint(tmp_path / "base", "llama", tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, base / "model.safetensors", {"format": "pt"})
    validation = short_validation()
    ours, expected = (
        convert(it, tmp_path / f"{it.name}-out", validation=validation).conversion.metadata
        for it in (base, model)
    )
    assert ours.calibration.engines == expected.calibration.engines
    assert ours.rotations.value.apply[0].targets[0] == "layers.0.self_attn.v_proj"


def test_an_output_that_was_filled_meanwhile_is_left_alone(llama, tmp_path):
    output = tmp_path / "out"

    def fill_output(stage, done, total):
        output.mkdir(exist_ok=True)
        (output / "kept").touch()

    with pytest.raises(UsageError, match="is not empty"):
        convert(llama, output, report=fill_output)
    assert [path.name for path in output.iterdir()] == ["kept"]


def test_overwrite_replaces_an_earlier_conversion(llama, tmp_path):
    output = tmp_path / "out"
    convert(llama, output, preset="k2v2_g32")
    with pytest.raises(UsageError, match="is not empty"):
        convert(llama, output)
    convert(llama, output, overwrite=True)
    config = json.loads((output / "config.json").read_text())
    assert config["kvarn_config"]["cache"]["dtype"] == "kvarn_k4v4_g32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]
