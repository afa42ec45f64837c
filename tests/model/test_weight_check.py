from dataclasses import replace

import pytest
import torch

from kvarn_cli.errors import CheckpointError, UnsupportedModelError
from kvarn_cli.model import weight_check
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.layout import AttentionLayer, HeadSlices, ModelLayout
from kvarn_cli.model.weight_check import check_weights
from kvarn_cli.quantization.hadamard import fused_rotation

HEAD_DIMS = (32, 64, 128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Checkpoint:
    """V and O of one layer in memory: 4 query heads, 2 KV heads, a small bias."""

    def __init__(self, *, dtype=torch.bfloat16, head_dim=32, hidden_size=96, seed=0):
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "v_proj.weight": (2 * head_dim, hidden_size),
            "v_proj.bias": (2 * head_dim,),
            "o_proj.weight": (hidden_size, 4 * head_dim),
        }
        self.tensors = {
            f"model.layers.0.self_attn.{name}": 0.02 * torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
        }
        self.value_weight, self.value_bias, self.output_weight = (
            f"model.layers.0.self_attn.{name}"
            for name in ("v_proj.weight", "v_proj.bias", "o_proj.weight")
        )
        self.tensors[self.value_bias] *= 1e-3
        self.dtype = dtype
        values, queries = (tuple(range(0, n * head_dim, head_dim)) for n in (2, 4))
        layer = AttentionLayer(
            index=0,
            module="model.layers.0.self_attn",
            value=tuple(
                HeadSlices(name, 0, values, head_dim)
                for name in (self.value_weight, self.value_bias)
            ),
            output=HeadSlices(self.output_weight, 1, queries, head_dim),
        )
        self.layout = ModelLayout(head_dim, (layer,))

    def tensor(self, name):
        return self.tensors[name].to(self.dtype)

    def read(self, name):
        """In blocks of unequal length."""
        step = self.layout.row_step(name)
        yield from self.tensor(name).split([step, len(self.tensors[name]) - step])

    def fused(self, rotation=None):
        factors = None if rotation is None else [rotation]
        rotations = tensor_rotations(self.layout, factors)
        return {name: rotated(self.tensor(name)) for name, rotated in rotations.items()}


def as_fused(tensors):
    """A fusion that makes these tensors of the original ones, right or wrong."""
    return {
        name: lambda rows, first_row=0, tensor=tensor: tensor[first_row : first_row + len(rows)]
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_accepts_right_fusions(dtype, head_dim, monkeypatch):
    """They use less than a quarter of what is allowed."""
    monkeypatch.setattr(weight_check, "ALLOWED_ROUNDING", weight_check.ALLOWED_ROUNDING / 4)
    checkpoint = Checkpoint(dtype=dtype, head_dim=head_dim)
    check = check_weights(checkpoint.layout, checkpoint.read)
    roundoff = torch.finfo(dtype).eps / 2
    assert 0.1 * roundoff < check.largest_change < 50 * roundoff
    assert check.layer == 0
    assert check.warnings == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["constant", "rank 1", "heavy tails", "outliers"])
def test_accepts_right_fusions_of_odd_weights(dtype, shape):
    checkpoint = Checkpoint(dtype=dtype, head_dim=128)
    for name, weight in checkpoint.tensors.items():
        if shape == "constant":
            weight.fill_(0.02)
        elif shape == "rank 1" and weight.ndim == 2:
            weight.copy_(weight[:, :1] * weight[:1] * 50)
        elif shape == "heavy tails":
            weight.copy_((weight * 50) ** 5)
        elif shape == "outliers" and "bias" not in name:
            weight[0] *= 100
            weight[:, 0] *= 100
    check_weights(checkpoint.layout, checkpoint.read)


def interleaved(weight, rotation):
    channels_first = weight.unflatten(1, (len(rotation), -1)).double()
    return torch.einsum("kdh,de->keh", channels_first, rotation).flatten(1).to(weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_refuses_wrong_fusions(dtype, head_dim):
    checkpoint = Checkpoint(dtype=dtype, head_dim=head_dim)
    rotation = fused_rotation(head_dim, dtype=torch.float64)
    one_wrong_sign = rotation.clone()
    one_wrong_sign[:, 3] *= -1
    value, bias, output = (
        checkpoint.value_weight,
        checkpoint.value_bias,
        checkpoint.output_weight,
    )
    right = checkpoint.fused()
    sabotaged = {
        "bias left out": {bias: checkpoint.tensor(bias)},
        "V left out": {value: checkpoint.tensor(value)},
        "O left out": {output: checkpoint.tensor(output)},
        "V takes R": {value: checkpoint.fused(rotation.T)[value]},
        "O takes its inverse": {output: checkpoint.fused(rotation.T)[output]},
        "one wrong sign": {value: checkpoint.fused(one_wrong_sign)[value]},
        "KV heads swapped": {value: right[value].roll(head_dim, 0)},
        "query heads interleaved": {output: interleaved(checkpoint.tensor(output), rotation)},
    }
    for sabotage, tensors in sabotaged.items():
        with pytest.raises(UnsupportedModelError, match=r"layer 0: .* query head 0"):
            check_weights(checkpoint.layout, checkpoint.read, as_fused(right | tensors))
            pytest.fail(sabotage)


def test_a_single_wrong_head_is_named():
    checkpoint = Checkpoint()
    fused = checkpoint.fused()
    fused[checkpoint.output_weight][:, 3 * 32 :] *= -1
    with pytest.raises(UnsupportedModelError, match="query head 3"):
        check_weights(checkpoint.layout, checkpoint.read, as_fused(fused))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_may_be_stored_transposed(dtype):
    """As in GPT-2: V's channels are columns, W_O's are rows."""
    checkpoint = Checkpoint(dtype=dtype)
    (layer,) = checkpoint.layout.layers
    weight, bias = layer.value
    checkpoint.layout = ModelLayout(
        checkpoint.layout.head_dim,
        (
            replace(
                layer,
                value=(replace(weight, axis=1), bias),
                output=replace(layer.output, axis=0),
            ),
        ),
    )
    for name in (checkpoint.value_weight, checkpoint.output_weight):
        checkpoint.tensors[name] = checkpoint.tensors[name].T.contiguous()
    roundoff = torch.finfo(dtype).eps / 2
    check = check_weights(checkpoint.layout, checkpoint.read)
    assert 0.1 * roundoff < check.largest_change < 50 * roundoff
    wrong = checkpoint.fused()
    wrong[checkpoint.output_weight][3 * 32 :] *= -1
    with pytest.raises(UnsupportedModelError, match="query head 3"):
        check_weights(checkpoint.layout, checkpoint.read, as_fused(wrong))


def test_names_heads_that_are_all_zero():
    checkpoint = Checkpoint()
    checkpoint.tensors[checkpoint.value_weight][32:] = 0
    checkpoint.tensors[checkpoint.value_bias][32:] = 0
    checkpoint.tensors[checkpoint.output_weight][:, :32] = 0
    check = check_weights(checkpoint.layout, checkpoint.read)
    assert check.warnings == (
        "layer 0: V of KV head 1 is all zero",
        "layer 0: W_O of query head 0 is all zero",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dead", "num_warnings"), [(("v_proj",), 2), (("o_proj",), 4), (("v_proj", "o_proj"), 6)]
)
def test_all_zero_layers_change_nothing(dtype, dead, num_warnings):
    checkpoint = Checkpoint(dtype=dtype)
    for name, weight in checkpoint.tensors.items():
        if any(part in name for part in dead):
            weight.zero_()
    check = check_weights(checkpoint.layout, checkpoint.read)
    assert check.largest_change == 0
    assert len(check.warnings) == num_warnings


@pytest.mark.parametrize("scale", [1e-5, 2e-6])
def test_refuses_weights_that_float16_cannot_hold_rotated(scale):
    checkpoint = Checkpoint(dtype=torch.float16)
    for weight in checkpoint.tensors.values():
        weight.mul_(scale)
    with pytest.raises(UnsupportedModelError, match=r"layer 0: .* so small that rounding"):
        check_weights(checkpoint.layout, checkpoint.read)


def test_nan_is_refused_by_name():
    checkpoint = Checkpoint()
    checkpoint.tensors[checkpoint.value_bias][5] = float("nan")
    with pytest.raises(CheckpointError, match=r"v_proj\.bias holds NaN"):
        check_weights(checkpoint.layout, checkpoint.read)


def test_each_layer_is_reported():
    checkpoint = Checkpoint(dtype=torch.float32)
    seen = []
    check_weights(
        checkpoint.layout, checkpoint.read, report=lambda stage, *count: seen.append((stage, count))
    )
    layers = len(checkpoint.layout.layers)
    assert seen == [("checking the weights", (done, layers)) for done in range(layers + 1)]
