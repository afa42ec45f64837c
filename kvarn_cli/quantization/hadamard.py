"""The orthonormal Hadamard rotation and the signs that make it safe to apply twice.

`H` is Sylvester's matrix in natural order divided by √order, so it is symmetric and its own
inverse. A checkpoint fused with plain `H` would therefore be *un*rotated by an engine that rotates
V again. Fusing `R = H · diag(s)` instead, with the signs `s` of a bent function, leaves
`R · H = H · diag(s) · H`, a matrix whose non-zero entries all have the same magnitude: V stays
spread over the channels whether the engine rotates again or not.
"""

import torch
from torch import Tensor

from kvarn_cli.errors import SettingsError

_CHUNK_BYTES = 4 << 20


def hadamard_matrix(
    order: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Sylvester's Hadamard matrix in natural order, divided by √order.

    Args:
        order: a power of two.
        dtype: dtype of the result; the entries are rounded from float64.
        device: device of the result.

    Returns:
        [order, order], symmetric and orthonormal: entry (i, j) is (−1)^(popcount(i & j)) / √order.

    Raises:
        SettingsError: order is no power of two.
    """
    if order < 1 or order & (order - 1):
        raise SettingsError(f"a Hadamard matrix of order {order} needs a power of two")
    matrix: Tensor = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    matrix /= order**0.5
    return matrix.to(device=device, dtype=dtype)


def bent_signs(
    order: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Signs of the bent function x₀x₁ ⊕ x₂x₃ ⊕ … over the bits of the channel index.

    With an odd number of bits the highest bit stays unpaired.

    Returns:
        [order] of ±1.
    """
    index = torch.arange(order)
    parity = torch.zeros_like(index)
    for low_bit in range(0, (order - 1).bit_length() - 1, 2):
        parity ^= (index >> low_bit) & (index >> (low_bit + 1)) & 1
    return (1 - 2 * parity).to(device=device, dtype=dtype)


def fused_rotation(
    head_dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """The rotation `R = H · diag(bent signs)` that is fused into W_V and undone in W_O.

    Returns:
        [head_dim, head_dim], orthonormal; its inverse is its transpose.
    """
    matrix = torch.kron(*fused_rotation_factors(head_dim))
    return matrix.to(device=device, dtype=dtype)


def fused_rotation_factors(head_dim: int) -> tuple[Tensor, Tensor]:
    """Two small matrices A and B with `R = A ⊗ B`, for a product at a fraction of R's cost.

    Both H and the bent signs are Kronecker products over pairs of the channel index's bits. With
    16 columns in B a product with A and B takes 24 operations for an entry of 128 channels, one
    with R 128.

    Returns:
        A of signs divided by √head_dim, so that what it makes stays small, and B of signs; float64.
    """
    columns = min(16, 4 ** ((head_dim.bit_length() - 1) // 2))
    left, right = (
        hadamard_matrix(order, dtype=torch.float64).sign() * bent_signs(order)
        for order in (head_dim // columns, columns)
    )
    return left / head_dim**0.5, right


def rotation_matrix(
    head_dim: int,
    signs: str | None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The rotation `R = H · diag(signs)` that a `kvarn_config` block describes.

    Args:
        head_dim: order of H.
        signs: one + or - per column of H; None for H itself.
        dtype: dtype of the result.
        device: device of the result.

    Returns:
        [head_dim, head_dim], orthonormal.

    Raises:
        SettingsError: head_dim is no power of two.
    """
    matrix = hadamard_matrix(head_dim, dtype=torch.float64)
    if signs is not None:
        matrix *= torch.tensor([1 if sign == "+" else -1 for sign in signs])
    return matrix.to(device=device, dtype=dtype)


def rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply the last dimension by a matrix, in float32 or better and in chunks of a few MB.

    Half-precision products lose the accuracy that the codes need, and products of a few MB stay
    in cache, which makes them faster than a fast Walsh-Hadamard transform.

    Args:
        x: [..., order], any float dtype.
        matrix: [order, order].

    Returns:
        x @ matrix, [..., order], float64 if x is float64 and float32 otherwise.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    matrix = matrix.to(device=x.device, dtype=dtype)
    rows = x.reshape(-1, x.shape[-1])
    step = max(_CHUNK_BYTES // (rows.shape[-1] * dtype.itemsize), 1)
    rotated = torch.empty(rows.shape, dtype=dtype, device=x.device)
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        torch.matmul(rows[chunk].to(dtype), matrix, out=rotated[chunk])
    return rotated.view(x.shape)
