import json
from dataclasses import replace

import pytest
import torch
from awkward_checkpoint import edit_config
from conversions import convert
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_checkpoint, tiny_model, tiny_tokenizer
from transformers import BloomConfig

from kvarn_cli.conversion.dry_run import plan_summary
from kvarn_cli.conversion.plan import plan_conversion
from kvarn_cli.errors import CheckpointError, UnsupportedModelError, UsageError
from kvarn_cli.model.loading import load_config
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.settings import KVarNSettings


def plan(source, **options):
    options = {"settings": KVarNSettings(), "rotation": "fused"} | options
    return plan_conversion(str(source), **options)


def test_the_summary_tells_the_plan(llama):
    summary = plan_summary(plan(llama, settings=KVarNSettings.from_name("k2v2_g32")), None)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["architecture"] == "LlamaForCausalLM"
    assert summary["cache_dtype"] == "kvarn_k2v2_g32"
    assert summary["layers_covered"] == [0, 1]
    assert len(summary["tensors_rotated"]) == 4
    assert summary["bytes_rotated"] == 2 * (64 * 128 + 128 * 128) * 4
    copied = [path for path in summary["files"] if (llama / path).is_file()]
    assert summary["bytes_read"] == sum((llama / path).stat().st_size for path in copied)
    assert summary["proof"]["head_dim"] == 32
    heads, tokens, head_dim = 4, 32_768, 32
    cache = summary["cache_bytes"]["32768"]
    assert cache["float16"] == heads * tokens * 2 * head_dim * 2
    packed_tokens = tokens - 128
    exact = 128 * 2 * head_dim * 2
    assert cache["packed"] == heads * (packed_tokens // 32 * 896 + exact)


def test_an_online_plan_rotates_no_tensor(llama):
    online = plan(llama, rotation="online")
    assert online.proof is None
    assert online.rotated_tensors == ()
    assert plan_summary(online, None)["rotation"] == "online"


def test_layers_with_a_window_are_left_out_and_still_fused(tmp_path):
    model = build_tiny_checkpoint(
        tmp_path / "qwen2",
        "qwen2",
        use_sliding_window=True,
        sliding_window=64,
        layer_types=["full_attention", "sliding_attention"],
    )
    found = plan(model)
    assert found.cache.covered == (0,)
    assert plan_summary(found, None)["layers_left_out"][0]["layer"] == 1
    assert len(found.rotated_tensors) == 6


def test_what_is_not_copied_is_named(llama):
    (llama / "pytorch_model.bin").write_bytes(b"x")
    (llama / ".env").write_bytes(b"x")
    left_out = {entry["path"] for entry in plan_summary(plan(llama), None)["files_left_out"]}
    assert left_out == {"pytorch_model.bin", ".env"}


def add_gate(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.gate_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def use_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def break_index(weight_map):
    def break_index(folder):
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return break_index


def cut_off(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def with_config(**changes):
    return lambda folder: edit_config(folder, **changes)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (with_config(head_dim=80), UnsupportedModelError, "head_dim is 80"),
        (
            with_config(quantization_config={"quant_method": "awq"}),
            UnsupportedModelError,
            r"quantized already: AWQ \(quantization_config\)",
        ),
        (with_config(model_type="rwkv9", auto_map={}), UnsupportedModelError, "`rwkv9`"),
        (with_config(num_hidden_layers=3), UnsupportedModelError, "layers.2.self_attn.v_proj"),
        (with_config(num_attention_heads="x"), CheckpointError, "num_attention_heads"),
        (with_config(kvarn_config={"format_version": 9}), CheckpointError, "format_version 9"),
        (add_gate, UnsupportedModelError, "layers.1.self_attn.gate_proj.weight may act"),
        (use_pickle, UnsupportedModelError, "only pytorch_model.bin"),
        (
            break_index({"a": "model-00001.safetensors", "b": "model.safetensors"}),
            CheckpointError,
            "model-00001.safetensors.*which is missing",
        ),
        (break_index({"a": "model-00001.safetensors"}), CheckpointError, "names other files"),
        (break_index({"a": "../../x.safetensors"}), CheckpointError, "a .safetensors file beside"),
        (break_index({"a": "model.safetensors"}), CheckpointError, "which does not hold it"),
        (cut_off, CheckpointError, "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), CheckpointError, "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), CheckpointError, "config.json"),
    ],
)
def test_what_cannot_be_fused_is_refused_by_name(llama, tmp_path, damage, error, message):
    damage(llama)
    with pytest.raises(error, match=message):
        plan(llama, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gate_does_not_matter_online(llama):
    add_gate(llama)
    assert plan(llama, rotation="online").layout is None


def test_code_that_is_needed_is_asked_for(llama):
    edit_config(llama, model_type="custom")
    with pytest.raises(UnsupportedModelError, match="needs code") as raised:
        plan(llama)
    assert "--trust-remote-code" in raised.value.hint


def test_a_window_in_every_layer_leaves_nothing_to_convert(tmp_path):
    model = build_tiny_checkpoint(tmp_path / "mistral", "mistral-sliding")
    with pytest.raises(UnsupportedModelError, match="no layer whose cache grows"):
        plan(model, rotation="online")


@pytest.mark.parametrize("rotation", ["fused", "online"])
def test_a_converted_model_is_not_converted_again(llama, tmp_path, rotation):
    convert(llama, tmp_path / "out", rotation=rotation)
    with pytest.raises(UnsupportedModelError, match=f"V's rotation {rotation}") as raised:
        plan(tmp_path / "out", output=tmp_path / "again")
    assert raised.value.hint == "convert the original again: llama"
    assert not (tmp_path / "again").exists()


def test_an_output_in_the_model_is_refused(llama):
    for output in (llama, llama / "out", llama.parent):
        with pytest.raises(UsageError, match="lie in one another"):
            plan(llama, output=output, overwrite=True)


def test_a_layout_that_no_engine_stores_is_refused(llama):
    with pytest.raises(
        UsageError, match="no public engine stores records in .* paper-fp8"
    ) as raised:
        plan(llama, settings=KVarNSettings(layout="paper-fp8"))
    assert "KVarNCache" in raised.value.hint


def test_the_calibration_text_is_checked_with_the_plan(llama, short_validation):
    validation = short_validation()
    windows = plan(llama, settings=KVarNSettings(group_size=32), validation=validation).windows
    assert windows.shape == (2, 192)
    with pytest.raises(UsageError, match="windows of 192 tokens measure too little") as raised:
        plan(llama, validation=validation)
    assert "384" in raised.value.hint
    long = replace(validation, text=replace(validation.text, sequence_length=100_000))
    with pytest.raises(UsageError, match="the calibration text has"):
        plan(llama, validation=long)
    missing = replace(validation, text=replace(validation.text, dataset=llama / "no.txt"))
    with pytest.raises(UsageError, match="no such dataset"):
        plan(llama, settings=KVarNSettings(group_size=32), validation=missing)


def test_a_tokenizer_is_needed_for_the_validation_alone(llama, short_validation):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama / name).unlink()
    settings = KVarNSettings(group_size=32)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded") as raised:
        plan(llama, settings=settings, validation=short_validation())
    assert "--no-validate" in raised.value.hint
    assert plan(llama, settings=settings).windows is None


@pytest.mark.parametrize("kind", ["lines.jsonl", "folder"])
def test_calibration_text_comes_from_lines_and_folders_too(llama, short_validation, kind):
    validation = short_validation()
    text = validation.text.dataset.read_text()
    dataset = llama.parent / kind
    if kind == "folder":
        dataset.mkdir()
        (dataset / "a.txt").write_text(text)
    else:
        dataset.write_text(json.dumps({"body": text}) + "\n")
    changed = replace(validation.text, dataset=dataset, field="body")
    settings = KVarNSettings(group_size=32)
    found = plan(llama, settings=settings, validation=replace(validation, text=changed))
    original = plan(llama, settings=settings, validation=validation)
    assert torch.equal(found.windows, original.windows)


def rename(rename_one):
    def rename(folder):
        tensors = load_file(folder / "model.safetensors")
        renamed = {rename_one(name): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})

    return rename


def test_names_that_the_class_would_not_load_are_refused(llama):
    rename(lambda name: f"language_model.{name}")(llama)
    with pytest.raises(
        UnsupportedModelError, match="no tensor that LlamaForCausalLM loads into"
    ) as raised:
        plan(llama)
    assert raised.value.exit_code == 3


def test_a_window_leaves_nothing_to_convert_whatever_a_switch_says(tmp_path):
    """Mistral's code knows no `use_sliding_window`; its cache and its plan agree on that."""
    model = build_tiny_checkpoint(tmp_path / "mistral", "mistral-sliding", use_sliding_window=False)
    for rotation in ("fused", "online"):
        with pytest.raises(UnsupportedModelError, match="attention through a window"):
            plan(model, rotation=rotation)
    assert KVarNCache(load_config(model), KVarNSettings()).covered == ()


@pytest.mark.parametrize("odd", ["LlamaForCausalLM", 5, [5], {"a": 1}, []])
def test_an_odd_list_of_architectures_is_survived(llama, odd):
    edit_config(llama, architectures=odd)
    assert plan_summary(plan(llama), None)["architecture"] == "llama"


@pytest.fixture
def bloom(tmp_path):
    """Bloom computes its attention itself, where nothing can be measured."""
    config = BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=2)
    tiny_model(config).save_pretrained(tmp_path / "bloom")
    tiny_tokenizer().save_pretrained(tmp_path / "bloom")
    return tmp_path / "bloom"


@pytest.mark.parametrize("rotation", ["fused", "online"])
def test_what_validation_cannot_reproduce_is_refused_before_the_weights_are_read(
    bloom, short_validation, rotation
):
    (bloom / "model.safetensors").write_bytes(b"never read")
    options = {"rotation": rotation, "settings": KVarNSettings(group_size=32)}
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM does not use") as raised:
        plan(bloom, validation=short_validation(), **options)
    assert "--no-validate" in raised.value.hint


def test_what_validation_cannot_reproduce_can_still_be_proven(bloom):
    found = plan(bloom)
    assert found.proof.architecture == "BloomForCausalLM"
    assert found.cache.covered == (0, 1)


def test_an_adapter_beside_the_weights_is_refused(llama):
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="adapter_config.json: an adapter") as caught:
        plan(llama)
    assert "merge" in caught.value.hint
