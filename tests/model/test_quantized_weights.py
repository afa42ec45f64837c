import pytest

from kvarn_cli.model.quantized_weights import quantized_format

V = "model.layers.0.self_attn.v_proj"
PLAIN = {f"{V}.weight": "BF16", "model.norm.weight": "F32", "lm_head.weight": "F16"}


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_plain_weights_have_no_format(config):
    assert quantized_format(config, PLAIN) is None


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "FP8 e4m3"),
        ({"quant_method": "fbgemm_fp8"}, "FBGEMM FP8"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "awq"}, "AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt NVFP4"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quant_method": "something new"}, "something new"),
        ({"bits": 4}, "unnamed"),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_description_names_the_format(described, name, key):
    for config in ({key: described}, {"text_config": {key: described}}):
        found = quantized_format(config, PLAIN)
        assert found.startswith(name)
        assert found.endswith(f"({key})")


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({f"{V}.qweight": "I32", f"{V}.qzeros": "I32", f"{V}.scales": "F16"}, "GPTQ or AWQ"),
        ({f"{V}.weight_packed": "I32", f"{V}.weight_scale": "BF16"}, "compressed-tensors"),
        (
            {f"{V}.weight": "U8", f"{V}.weight.quant_state.bitsandbytes__nf4": "U8"},
            "bitsandbytes",
        ),
        ({f"{V}.weight": "I8", f"{V}.SCB": "F32"}, "bitsandbytes"),
        (
            {f"{V}.weight": "U8", f"{V}.weight_scale": "F8_E4M3", f"{V}.weight_scale_2": "F32"},
            "ModelOpt NVFP4",
        ),
        ({"model.layers.0.mlp.experts.gate_up_proj_blocks": "U8"}, "MXFP4"),
        ({f"{V}.weight": "F8_E4M3", f"{V}.weight_scale": "F32"}, "F8_E4M3"),
        ({f"{V}.weight": "I8"}, "I8"),
        ({f"{V}.weight": "U32", f"{V}.scales": "BF16", f"{V}.biases": "BF16"}, "U32"),
    ],
)
def test_tensors_alone_name_the_format(tensors, name):
    found = quantized_format({}, PLAIN | tensors)
    assert found.startswith(f"{name} (")
    assert found[len(name) + 2 : -1] in tensors


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.embed_positions.ids": "I64", "model.mask": "BOOL"},
        {"model.res_blocks": "BF16", "model.attn.bias": "U8"},
    ],
)
def test_other_tensors_are_no_sign(tensors):
    assert quantized_format({}, PLAIN | tensors) is None
