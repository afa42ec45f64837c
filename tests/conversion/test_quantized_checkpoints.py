"""Weights that are quantized already are recognised, named and left alone, byte for byte."""

import json

import pytest
import torch
from awkward_checkpoint import edit_config
from checkpoint_files import contents
from conversions import convert
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_checkpoint

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.verification.folder import verify_folder

INT32 = torch.ones(16, 64, dtype=torch.int32)
HALF = torch.ones(1, 64, dtype=torch.float16)
BYTES = torch.ones(64, 64, dtype=torch.uint8)
FLOAT8 = torch.ones(64, 128).to(torch.float8_e4m3fn)
ONE = torch.ones(1)
NVFP4 = {"weight": BYTES, "weight_scale": FLOAT8[:, :8].clone(), "weight_scale_2": ONE}

FORMATS = {
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"weight_packed": INT32, "weight_scale": HALF},
        "compressed-tensors pack-quantized (quantization_config)",
    ),
    "FP8": (
        {"quant_method": "fp8", "fmt": "e4m3"},
        {"weight": FLOAT8, "weight_scale_inv": ONE},
        "FP8 e4m3 (quantization_config)",
    ),
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"qweight": INT32, "qzeros": INT32, "scales": HALF},
        "GPTQ (quantization_config)",
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4},
        {"qweight": INT32, "qzeros": INT32, "scales": HALF},
        "AWQ (quantization_config)",
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"weight": BYTES, "weight.quant_state.bitsandbytes__nf4": BYTES[0].clone()},
        "bitsandbytes (quantization_config)",
    ),
    "ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        NVFP4,
        "ModelOpt NVFP4 (quantization_config)",
    ),
    "MXFP4": ({"quant_method": "mxfp4"}, {}, "MXFP4 (quantization_config)"),
    "undescribed GPTQ or AWQ": (None, {"qweight": INT32, "scales": HALF}, "GPTQ or AWQ ("),
    "undescribed FP8": (None, {"weight": FLOAT8, "weight_scale": ONE}, "F8_E4M3 ("),
    "undescribed NVFP4": (None, NVFP4, "ModelOpt NVFP4 ("),
    "undescribed bitsandbytes": (
        None,
        {"weight": torch.ones(64, 128, dtype=torch.int8), "SCB": torch.ones(64)},
        "bitsandbytes (",
    ),
}


@pytest.fixture
def quantized(tmp_path):
    """From a description and the tensors of each V to a checkpoint."""

    def quantized(description, parts):
        folder = build_tiny_checkpoint(tmp_path / "model", "llama")
        tensors = load_file(folder / "model.safetensors")
        for layer in (0, 1) if parts else ():
            module = f"model.layers.{layer}.self_attn.v_proj"
            del tensors[f"{module}.weight"]
            tensors |= {f"{module}.{part}": tensor.clone() for part, tensor in parts.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        if description is not None:
            edit_config(folder, quantization_config=description)
        return folder

    return quantized


def rotation_without_fusion(model, output, rotation):
    converted = convert(model, output, rotation=rotation)
    before, after = contents(model), contents(output)
    assert before["model.safetensors"] == after["model.safetensors"]
    assert not any(problem for check in verify_folder(output) for problem in check.problems)
    config = json.loads(after["config.json"])
    del config["kvarn_config"]
    assert config == json.loads(before["config.json"])
    assert not converted.conversion.metadata.fused
    return converted.conversion.metadata.rotations.value


@pytest.mark.parametrize("name", FORMATS)
def test_the_rotation_is_left_to_the_engine_and_the_format_named(name, quantized, tmp_path):
    description, parts, named = FORMATS[name]
    model = quantized(description, parts)
    value = rotation_without_fusion(model, tmp_path / "auto", "auto")
    assert value.not_fused.startswith(f"the weights are quantized already: {named}")
    assert rotation_without_fusion(model, tmp_path / "online", "online").not_fused is None
    with pytest.raises(UnsupportedModelError) as refused:
        convert(model, tmp_path / "fused", rotation="fused")
    assert refused.value.exit_code == 3
    assert str(refused.value) == value.not_fused
    assert "--rotation online" in refused.value.hint
    assert not (tmp_path / "fused").exists()


def test_modelopts_own_file_describes_the_weights_too(quantized, tmp_path):
    model = quantized(None, {})
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (model / "hf_quant_config.json").write_text(json.dumps(described))
    value = rotation_without_fusion(model, tmp_path / "out", "auto")
    assert value.not_fused == "the weights are quantized already: ModelOpt (hf_quant_config.json)"


def test_experts_in_mxfp4_are_recognised(quantized, tmp_path):
    """As in gpt-oss, where attention itself is not quantized."""
    model = quantized(None, {})
    tensors = load_file(model / "model.safetensors")
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    tensors |= {f"{experts}_blocks": BYTES, f"{experts}_scales": BYTES[:, :2].clone()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    value = rotation_without_fusion(model, tmp_path / "out", "auto")
    assert f"MXFP4 ({experts}_blocks)" in value.not_fused


def test_another_dtype_is_refused_for_scales_and_codes(quantized, tmp_path):
    model = quantized({"quant_method": "awq", "bits": 4}, {})
    with pytest.raises(UnsupportedModelError, match="quantized weights, whose scales") as refused:
        convert(model, tmp_path / "out", dtype="float16", rotation="auto")
    assert refused.value.hint == "leave out --dtype"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model-Q4_K_M.gguf", "make the GGUF file from the result"),
        ("pytorch_model.bin", "pickle files can run code"),
    ],
)
def test_other_containers_are_refused_by_name(name, advice, quantized, tmp_path):
    model = quantized(None, {})
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(UnsupportedModelError, match=name) as refused:
        convert(model, tmp_path / "out", rotation="auto")
    assert refused.value.exit_code == 3
    assert "safetensors" in refused.value.hint
    assert advice in refused.value.hint
    assert not (tmp_path / "out").exists()
