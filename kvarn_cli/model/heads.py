"""The channels of heads in a weight or a bias: taken out, put back, and rotated."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvarn_cli.model.layout import HeadSlices

_PART_ENTRIES = 1 << 17
"""What is widened at once: larger temporaries are mapped and zeroed by the system every time."""


def rotate_heads(
    rows: Tensor,
    heads: HeadSlices,
    factors: Sequence[Tensor],
    *,
    first_row: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each head's channels by R from the right; all other entries keep their values.

    Args:
        rows: some rows of the tensor that `heads` describes, [rows, columns] or [rows].
        heads: where the heads lie in the whole tensor.
        factors: square matrices whose Kronecker product is R, [head_dim, head_dim]; R alone too.
        first_row: index of the first row in the whole tensor.
        dtype: of the result; None is that of `rows`.

    Returns:
        Shape of `rows`; computed in float32 (float64 stays) and rounded once.
    """
    rotated = rows.to(dtype or rows.dtype, copy=True)
    wide = torch.promote_types(rows.dtype, torch.float32)
    factors = [factor.to(rows.device, wide) for factor in factors]
    for start, count in _runs(_starts(rows, heads, first_row), heads.head_dim):
        channels = count * heads.head_dim
        both = (tensor.narrow(heads.axis, start, channels) for tensor in (rows, rotated))
        parts = (_parts(tensor, heads.axis, _PART_ENTRIES // channels) for tensor in both)
        for part, target in zip(*parts, strict=True):
            states = part.to(wide, copy=True, memory_format=torch.contiguous_format)
            after = math.prod(part.shape[heads.axis + 1 :])
            product = _times(states.view(-1, heads.head_dim, after), factors)
            target.copy_(product.view_as(part))
    return rotated


def _parts(tensor: Tensor, axis: int, size: int) -> Iterable[Tensor]:
    """All channels, for some indices of the other axis at a time."""
    return tensor.split(max(size, 1), 1 - axis) if tensor.ndim > 1 else [tensor]


def _times(states: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Multiply by the Kronecker product of some matrices from the right, one after the other.

    Args:
        states: [before, channels of a head, after], contiguous; overwritten.
        factors: the matrices.

    Returns:
        As many entries as `states`, in their order.
    """
    product = torch.empty_like(states)
    before, after = len(states), states[:1].numel()
    for factor in factors:
        order = len(factor)
        after //= order
        if after == 1:
            torch.mm(states.view(-1, order), factor, out=product.view(-1, order))
        else:
            shape = (before, order, after)
            torch.matmul(factor.T, states.view(shape), out=product.view(shape))
        before *= order
        states, product = product, states
    return states


def take_heads(rows: Tensor, heads: HeadSlices, first_row: int = 0) -> Tensor:
    """The channels of each head as row vectors.

    Args:
        rows: some rows of the tensor that `heads` describes, [rows, columns] or [rows].
        heads: where the heads lie in the whole tensor.
        first_row: index of the first row in the whole tensor.

    Returns:
        [heads, other axis, head_dim], or [heads, head_dim] of a bias; dtype of `rows`. A view,
        where the heads lie side by side.
    """
    parts = [
        rows.narrow(heads.axis, start, count * heads.head_dim)
        .unflatten(heads.axis, (count, heads.head_dim))
        .movedim((heads.axis, heads.axis + 1), (0, -1))
        for start, count in _runs(_starts(rows, heads, first_row), heads.head_dim)
    ]
    empty = rows.new_empty(0, *rows.movedim(heads.axis, -1).shape[:-1], heads.head_dim)
    return parts[0] if len(parts) == 1 else torch.cat([empty, *parts])


def put_heads(rows: Tensor, heads: HeadSlices, vectors: Tensor, first_row: int = 0) -> Tensor:
    """Write the channels of each head back, in place.

    Args:
        rows: as for `take_heads`; they are changed.
        heads: as for `take_heads`.
        vectors: what `take_heads` gave, or other values for it, in any float dtype.
        first_row: as for `take_heads`.

    Returns:
        `rows`.
    """
    for start, head in zip(_starts(rows, heads, first_row), vectors, strict=True):
        rows.narrow(heads.axis, start, heads.head_dim).copy_(head.movedim(-1, heads.axis))
    return rows


def _starts(rows: Tensor, heads: HeadSlices, first_row: int) -> list[int]:
    """First channels, within these rows, of the heads that lie in them."""
    offset = first_row if heads.axis == 0 else 0
    channels = range(offset, offset + rows.shape[heads.axis])
    return [start - offset for start in heads.starts if start in channels]


def _runs(starts: list[int], head_dim: int) -> list[tuple[int, int]]:
    """First channel and number of heads that lie side by side."""
    runs: list[tuple[int, int]] = []
    for start in starts:
        first, count = runs[-1] if runs else (start, 0)
        if start == first + count * head_dim:
            runs[-1:] = [(first, count + 1)]
        else:
            runs.append((start, 1))
    return runs
