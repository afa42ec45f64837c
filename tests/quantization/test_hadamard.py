import pytest
import torch
from loop_reference import bent_sign, hadamard

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.hadamard import (
    bent_signs,
    fused_rotation,
    fused_rotation_factors,
    hadamard_matrix,
    rotate,
    rotation_matrix,
)
from kvarn_cli.settings import HEAD_DIMS


@pytest.mark.parametrize("order", [1, 2, 32, 64])
def test_matrix_equals_the_loop_reference(order):
    expected = torch.tensor(hadamard(order), dtype=torch.float64)
    assert torch.allclose(hadamard_matrix(order, dtype=torch.float64), expected, atol=1e-15)


@pytest.mark.parametrize("order", HEAD_DIMS)
def test_signs_equal_the_loop_reference(order):
    expected = [bent_sign(index, order.bit_length() - 1) for index in range(order)]
    assert bent_signs(order).tolist() == expected


@pytest.mark.parametrize("order", HEAD_DIMS)
def test_rotations_are_orthonormal(order):
    identity = torch.eye(order, dtype=torch.float64)
    for matrix in (hadamard_matrix, fused_rotation):
        built = matrix(order, dtype=torch.float64)
        assert torch.allclose(built @ built.T, identity, atol=1e-14)


@pytest.mark.parametrize("order", [1, 2, 4, 8, *HEAD_DIMS, 1024])
def test_the_fused_rotation_is_h_with_bent_signs_and_has_small_factors(order):
    signs = bent_signs(order, dtype=torch.float64)
    expected = hadamard_matrix(order, dtype=torch.float64) * signs
    assert torch.equal(fused_rotation(order, dtype=torch.float64), expected)
    left, right = fused_rotation_factors(order)
    assert set(right.flatten().tolist()) <= {1.0, -1.0}
    assert max(len(left), len(right)) <= max(16, order // 16)


@pytest.mark.parametrize("order", HEAD_DIMS)
def test_rotating_a_fused_v_again_keeps_it_spread(order):
    twice = fused_rotation(order, dtype=torch.float64) @ hadamard_matrix(order, dtype=torch.float64)
    magnitudes = twice.abs() * order**0.5
    even_bits = (order.bit_length() - 1) % 2 == 0
    expected = {1.0} if even_bits else {0.0, 1.4142}
    assert set((magnitudes * 1e4).round().div(1e4).unique().tolist()) == expected


@pytest.mark.parametrize("order", [0, 3, 80, 96])
def test_other_orders_are_refused(order):
    with pytest.raises(SettingsError, match="power of two"):
        hadamard_matrix(order)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rotate_works_in_float32_or_better(dtype):
    x = torch.randn(3, 5, 64).to(dtype)
    rotated = rotate(x, hadamard_matrix(64))
    assert rotated.dtype == torch.promote_types(dtype, torch.float32)
    expected = x.double() @ hadamard_matrix(64, dtype=torch.float64)
    assert torch.allclose(rotated.double(), expected, atol=1e-6)


def test_rotate_in_many_chunks_equals_one_product():
    x = torch.randn(40_000, 64)
    assert torch.allclose(rotate(x, hadamard_matrix(64)), x @ hadamard_matrix(64), atol=1e-6)


def test_a_described_rotation_is_rebuilt():
    assert torch.equal(rotation_matrix(64, None), hadamard_matrix(64))
    signs = "".join("+" if sign > 0 else "-" for sign in bent_signs(64).tolist())
    rebuilt = rotation_matrix(64, signs, dtype=torch.float64)
    assert torch.equal(rebuilt, fused_rotation(64, dtype=torch.float64))
    flipped = rotation_matrix(64, "-" + "+" * 63)
    assert torch.equal(flipped[:, 0], -hadamard_matrix(64)[:, 0])
    assert torch.equal(flipped[:, 1:], hadamard_matrix(64)[:, 1:])
