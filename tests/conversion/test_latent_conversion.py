"""Converted models with MLA: the latent's rotation in the weights, its norm folded."""

import json

import pytest
import torch
from conversions import convert
from latent_models import build_latent_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.hashing import hash_file
from kvarn_cli.conversion.backends import backend_commands
from kvarn_cli.conversion.dry_run import plan_summary
from kvarn_cli.conversion.plan import plan_conversion
from kvarn_cli.errors import CheckpointError, UnsupportedModelError, UsageError
from kvarn_cli.metadata import KVarNConfig
from kvarn_cli.quantization.hadamard import fused_rotation
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.settings import KVarNSettings
from kvarn_cli.verification.against_source import verify_against
from kvarn_cli.verification.folder import verify_folder

FAMILIES = ("deepseek_v3", "minicpm3", "kimi_linear")
BLOCK = "model.layers.1.self_attn."
TENSORS = {f"{BLOCK}{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_b_proj")}
NORM = f"{BLOCK}kv_a_layernorm.weight"


def convert_latent(source, output, **options):
    return convert(source, output, **({"preset": "mla_k4_g32"} | options))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return convert_latent(
        build_latent_checkpoint(folder / "model", request.param, attention_bias=True),
        folder / "out",
    )


@pytest.fixture
def deepseek(tmp_path):
    return build_latent_checkpoint(tmp_path / "model", "deepseek_v3")


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def logits_of(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    tokens = torch.randint(3, 300, (1, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=tokens, **options).logits


def problems(checks):
    return [problem for check in checks for problem in check.problems]


def test_the_model_computes_the_same_function(pair):
    before, after = logits_of(pair.source), logits_of(pair.output)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


def test_the_latents_makers_and_readers_change_and_nothing_else(pair):
    before, after = tensors_of(pair.source), tensors_of(pair.output)
    rotation = fused_rotation(32, dtype=torch.float64)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    value = pair.conversion.metadata.rotations.value
    assert changed == value.changed_tensors
    assert TENSORS | {NORM} <= changed
    makes, reads = (f"{BLOCK}{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_b_proj"))
    assert torch.equal(after[NORM], torch.ones(32))
    assert torch.equal(after[makes][32:], before[makes][32:])
    expected = rotation.T @ before[makes][:32].double()
    assert torch.allclose(after[makes][:32].double(), expected, atol=1e-6)
    expected = before[reads].double() * before[NORM].double() @ rotation
    assert torch.allclose(after[reads].double(), expected, atol=1e-6)
    bias = f"{BLOCK}kv_a_proj_with_mqa.bias"
    if bias in before:
        assert torch.equal(after[bias][32:], before[bias][32:])
        expected = before[bias][:32].double() @ rotation
        assert torch.allclose(after[bias][:32].double(), expected, atol=1e-6)


def test_the_metadata_tells_it(pair):
    config = json.loads((pair.output / "config.json").read_text())
    block = KVarNConfig.from_config_dict(config)
    assert block == pair.conversion.metadata
    assert (block.cache.dtype, block.cache.value_bits) == ("kvarn_mla_k4_g32", 16)
    assert (block.cache.head_dim, block.cache.rope_dim) == (32, 16)
    assert block.cache.iterations == 16
    assert block.rotations.key is None
    value = block.rotations.value
    assert value.where == "fused"
    assert value.folded_norms[NORM].into == f"{BLOCK}kv_b_proj.weight"
    made, read = value.apply
    assert made.targets[-1] == f"{BLOCK}kv_a_proj_with_mqa"
    assert (read.targets[-1], read.inverse) == (f"{BLOCK}kv_b_proj", True)
    assert block.proof.instance_difference < 1e-12
    assert block.proof.smallest_control > 0.01


def test_it_verifies(pair):
    assert problems(verify_folder(pair.output)) == []
    checks = verify_against(open_checkpoint(pair.output), open_checkpoint(pair.source))
    assert problems(checks) == []
    assert "norms folded" in checks[1].result


def test_the_cache_takes_the_latent_as_it_is(pair):
    model = AutoModelForCausalLM.from_pretrained(pair.output)
    cache = KVarNCache.from_model(model)
    assert cache.settings.name == "mla_k4_g32"
    with torch.no_grad():
        model(input_ids=torch.arange(3, 10)[None], cache=cache, use_cache=True)
    layer = cache.layers[-1]
    assert layer.codec.widths == (32, 16)
    assert not layer.codec.rotate_latents


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_verify_too(dtype, deepseek, tmp_path):
    output = convert_latent(deepseek, tmp_path / "out", dtype=dtype).output
    assert tensors_of(output)[NORM].dtype == getattr(torch, dtype)
    checks = verify_against(open_checkpoint(output), open_checkpoint(deepseek))
    assert problems(checks) == []


def test_validation_measures_both_kinds_of_engine(deepseek, tmp_path, short_validation):
    done = convert_latent(deepseek, tmp_path / "out", validation=short_validation()).conversion
    honours, again = done.metadata.calibration.engines
    assert (honours.engine, again.engine) == ("honours_marker", "rotates_again")
    assert 0 < honours.kl_mean < 0.1
    assert 0 < again.kl_mean < 0.1


def test_online_changes_no_weight(deepseek, tmp_path):
    output = convert_latent(deepseek, tmp_path / "out", rotation="online").output
    for name, tensor in tensors_of(deepseek).items():
        assert torch.equal(tensor, tensors_of(output)[name])
    block = KVarNConfig.from_config_dict(json.loads((output / "config.json").read_text()))
    cached, read = block.rotations.value.apply
    assert (cached.location, cached.targets[1]) == ("latent_cache", BLOCK.removesuffix("."))
    assert read.targets[1] == f"{BLOCK}kv_b_proj"
    assert problems(verify_folder(output)) == []


def set_tensor(folder, name, tensor):
    """Change a tensor, and the manifest with it."""
    save_file(tensors_of(folder) | {name: tensor}, folder / "model.safetensors", {"format": "pt"})
    manifest = json.loads((folder / "kvarn_manifest.json").read_text())
    manifest["files"]["model.safetensors"] |= hash_file(folder / "model.safetensors", ["xxh3_128"])
    (folder / "kvarn_manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damaged", ["norm", "reader", "rope"])
def test_a_fold_that_is_not_whole_is_noticed(damaged, deepseek, tmp_path):
    output = convert_latent(deepseek, tmp_path / "out").output
    before, after = tensors_of(deepseek), tensors_of(output)
    makes, reads = (f"{BLOCK}{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_b_proj"))
    if damaged == "norm":
        set_tensor(output, NORM, before[NORM])
        expected = f"{NORM} was folded and still scales"
    elif damaged == "reader":
        rotation = fused_rotation(32)
        set_tensor(output, reads, before[reads] @ rotation)
        expected = f"{reads} turned back differs"
    else:
        after[makes][40] *= 2
        set_tensor(output, makes, after[makes])
        expected = f"{makes} differs from the source outside the channels of the latent"
    found = problems(verify_against(open_checkpoint(output), open_checkpoint(deepseek)))
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_tensor_that_is_missing_should_hold_the_latents_rotation(deepseek, tmp_path):
    output = convert_latent(deepseek, tmp_path / "out").output
    config = json.loads((output / "config.json").read_text())
    rotated = config["kvarn_config"]["rotations"]["value"]["tensors"]
    rotated["ghost.weight"] = next(iter(rotated.values()))
    (output / "config.json").write_text(json.dumps(config))
    (problem,) = [found for found in problems(verify_folder(output)) if "no such tensor" in found]
    assert problem.startswith("ghost.weight should hold the rotation of the latent")


def test_layers_that_the_class_does_not_load_stay_as_they_are(deepseek, tmp_path):
    """A layer for multi-token prediction has a latent of its own, whole without the rotation."""
    own = tensors_of(deepseek)
    extra = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in own.items()
        if "layers.1." in name
    }
    save_file(own | extra, deepseek / "model.safetensors", {"format": "pt"})
    done = convert_latent(deepseek, tmp_path / "out")
    after = tensors_of(done.output)
    assert all(torch.equal(after[name], tensor) for name, tensor in extra.items())
    value = done.conversion.metadata.rotations.value
    assert not any("layers.2." in name for name in value.changed_tensors)
    assert problems(verify_against(open_checkpoint(done.output), open_checkpoint(deepseek))) == []


def test_the_plan_is_told_in_bytes_of_latents(deepseek):
    settings = KVarNSettings.from_name("mla_k4_g32")
    plan = plan_conversion(str(deepseek), settings=settings, rotation="auto")
    summary = plan_summary(plan, None)
    assert (summary["rotation"], summary["head_dim"], summary["rope_dim"]) == ("fused", 32, 16)
    assert summary["record_bytes"] == settings.record_bytes(32, 16)
    assert summary["cache_bytes_per_token"]["float16"] == 2 * (32 + 16) * 2
    packed = 2 * settings.record_bytes(32, 16) / 32
    assert summary["cache_bytes_per_token"]["packed"] == packed
    assert NORM in summary["tensors_rotated"]
    refused = {backend["backend"]: backend["command"] for backend in summary["backends"]}
    assert refused["vLLM fork huawei-csl/KVarN"] is None


@pytest.mark.parametrize(
    ("preset", "latent_dim", "taking"),
    [
        ("mla_k4_g128", 512, 3),
        ("mla_k2_g64", 512, 2),
        ("mla_k4_g128", 256, 2),
        ("mla_k4_g32", 512, 1),
    ],
)
def test_engines_are_told_to_quantize_the_latent(preset, latent_dim, taking):
    settings = KVarNSettings.from_name(preset)
    commands = [each.command for each in backend_commands(settings, latent_dim, "DIR")]
    assert len([command for command in commands if command]) == taking
    assert all(f"kvarn_{preset}" in command for command in commands[1:] if command)


def test_a_preset_for_k_and_v_is_refused(deepseek, tmp_path):
    with pytest.raises(UsageError, match="k4v2_g128 does not fit DeepseekV3ForCausalLM") as refused:
        convert_latent(deepseek, tmp_path / "out", preset="k4v2_g128")
    assert "mla_k4_g128" in refused.value.hint


def test_a_latent_without_a_hadamard_matrix_is_refused(tmp_path):
    source = build_latent_checkpoint(tmp_path / "model", "deepseek_v3", kv_lora_rank=48)
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank is 48 .* 32, 64, 128, 256, 512"):
        convert_latent(source, tmp_path / "out")


def test_a_block_of_another_cache_is_refused(deepseek, tmp_path):
    output = convert_latent(deepseek, tmp_path / "out").output
    path = output / "config.json"
    config = json.loads(path.read_text())
    config["qk_rope_head_dim"] = 8
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(
        AutoModelForCausalLM.from_pretrained(deepseek).config.__class__.from_pretrained(output)
    )
    with pytest.raises(CheckpointError, match="RoPE key of 16 channels, the model's is of"):
        KVarNCache.from_model(model)
