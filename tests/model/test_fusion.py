import pytest
import torch
from fused_models import layout_of
from tiny_models import tiny_config, tiny_model

from kvarn_cli.errors import CheckpointError, UnsupportedModelError
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.quantization.hadamard import fused_rotation


def test_logits_agree_and_the_transpose_undoes_the_fusion(model, tokens):
    layout = layout_of(model)
    weights = model.state_dict()
    original = {name: weight.clone() for name, weight in weights.items()}
    with torch.no_grad():
        before = model(tokens).logits
        for name, rotated in tensor_rotations(layout).items():
            weights[name].copy_(rotated(weights[name]))
            assert not torch.allclose(weights[name], original[name], atol=1e-2)
        after = model(tokens).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)

    rotation = fused_rotation(layout.head_dim)
    for name, restored in tensor_rotations(layout, [rotation.T]).items():
        torch.testing.assert_close(restored(weights[name]), original[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotates_in_float32_and_rounds_once(dtype):
    model = tiny_model(tiny_config("qwen2"), dtype=dtype)
    for name, rotated in tensor_rotations(layout_of(model)).items():
        weight = model.state_dict()[name]
        exact = rotated(weight.double())
        result = rotated(weight)
        assert result.dtype == dtype
        assert result.is_contiguous()
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((result.double() - exact).abs() <= rounding * 1.001 + 1e-6).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_refuses_nan_and_infinity_by_name(value):
    model = tiny_model(tiny_config("llama"))
    name = "model.layers.1.self_attn.o_proj.weight"
    weight = model.state_dict()[name].clone()
    weight[3, 5] = value
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        tensor_rotations(layout_of(model))[name](weight)


def test_refuses_float16_overflow_by_name():
    model = tiny_model(tiny_config("llama"))
    name = "model.layers.0.self_attn.v_proj.weight"
    weight = torch.full((64, 128), 6e4, dtype=torch.float16)
    with pytest.raises(UnsupportedModelError, match=f"{name} overflows torch.float16"):
        tensor_rotations(layout_of(model))[name](weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_refuses_quantized_dtypes_by_name(dtype):
    model = tiny_model(tiny_config("llama"))
    name = "model.layers.0.self_attn.v_proj.weight"
    with pytest.raises(UnsupportedModelError, match=f"{name} has dtype {dtype}"):
        tensor_rotations(layout_of(model))[name](torch.zeros(64, 128, dtype=dtype))
