"""The algebra that moves V's rotation into the weights.

Take one KV head of width d, with the hidden state of each token as a row of X. The model
computes

    V = X W_Vᵀ + b_Vᵀ        V: [tokens, d],  W_V: [d, hidden],  b_V: [d]

caches V, mixes its rows with the attention weights A of each query head q that reads this KV
head, and adds the result to the layer's output through q's columns of W_O:

    Y = Σ_q (A_q V) W_O[:, q]ᵀ        W_O[:, q]: [hidden, d]

Let R be orthonormal, so R Rᵀ = I. Attention mixes rows, R mixes columns, and the two commute:
A (V R) = (A V) R. If the cache holds V' = V R, then Y is unchanged when each query head takes R
back:

    Y = Σ_q (A_q V R) Rᵀ W_O[:, q]ᵀ = Σ_q (A_q V') (W_O[:, q] R)ᵀ

V' = V R = X (Rᵀ W_V)ᵀ + (Rᵀ b_V)ᵀ is itself a linear layer. So, in PyTorch's [out, in] layout,
for each KV head h and each query head q,

    W_V'[h] = Rᵀ W_V[h]        b_V'[h] = Rᵀ b_V[h]        W_O'[:, q] = W_O[:, q] R

and no other tensor changes: b_O is added after W_O, Q and K do not meet V. All three are one
operation: along the axis that holds the channels of heads, each head's channels, as a row
vector, are multiplied by R from the right. So a layer that stores its weights transposed, or V's
rows between those of Q and K, only has its heads in another place.

It holds only while nothing but a mixing of rows happens between V and W_O. A gate or a norm over
channels there does not commute with R; `proof` finds that out.

**The latent of MLA models.** They cache the normalized latent C = N(X W_Aᵀ) diag(g), one row of
width r a token, from which W_B makes K and V of all heads: C W_Bᵀ. N divides each row by its root
mean square and nothing else, and R keeps a row's length, so N(Z R) = N(Z) R. The weight g of the
norm does not commute with R; it moves into W_B first:

    C W_Bᵀ = N(X W_Aᵀ) (W_B diag(g))ᵀ = N(X (Rᵀ W_A)ᵀ) (W_B diag(g) R)ᵀ

So W_A's rows of the latent take Rᵀ (its other rows make the RoPE key, which stays), W_B becomes
W_B diag(g) R, and g becomes 1. The cache then holds N(X W_Aᵀ) R.

Source: QuaRot (arXiv 2404.00456), section 4; KVarN (arXiv 2606.03458) for the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kvarn_cli.errors import CheckpointError, UnsupportedModelError
from kvarn_cli.model.heads import rotate_heads
from kvarn_cli.model.layout import (
    FUSIBLE_DTYPES,
    ONLINE_HINT,
    FoldedNorm,
    HeadSlices,
    ModelLayout,
)
from kvarn_cli.quantization.hadamard import fused_rotation_factors

TensorReader = Callable[[str], Tensor]


class TensorRotation(Protocol):
    """From some rows of a tensor to the same rows, rotated."""

    def __call__(self, rows: Tensor, first_row: int = 0) -> Tensor:
        """Rotate rows.

        Args:
            rows: whole rows of the tensor, in order, starting and ending between two heads.
            first_row: index of the first one in the tensor.

        Returns:
            Shape of `rows`.

        Raises:
            CheckpointError: the rows hold NaN or infinity.
            UnsupportedModelError: their dtype is no plain float, or they overflow it when rotated.
        """
        ...


def tensor_rotations(
    layout: ModelLayout,
    factors: Sequence[Tensor] | None = None,
    *,
    read: TensorReader | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, TensorRotation]:
    """What happens to each tensor that the fused rotation changes.

    Args:
        layout: where V and O live.
        factors: square matrices whose Kronecker product is R; default
            `fused_rotation_factors(head_dim)`. Their transposes undo a fusion, up to the rounding
            of the stored dtype, but for folded norms.
        read: from a tensor's name to the original tensor; needed where a norm is folded, and
            asked when a tensor is rotated.
        dtype: of the rotated tensors, rounded to it once; None is each tensor's own.

    Returns:
        By tensor name.
    """
    if factors is None:
        factors = fused_rotation_factors(layout.head_dim)
    rotations: dict[str, TensorRotation] = {}
    for layer in layout.layers:
        for heads in layer.slices:
            rotations[heads.tensor] = _Checked(heads, factors, dtype)
        if layer.norm is not None:
            assert read is not None, "folding a norm takes its weight"
            gain = _Gain(layer.norm, read)
            rotations[layer.output.tensor] = _Checked(layer.output, factors, dtype, gain)
            rotations[layer.norm.tensor] = _Unit(layer.norm, dtype)
    return rotations


@dataclass(frozen=True)
class _Gain:
    """What a folded norm multiplies by, read once."""

    norm: FoldedNorm
    read: TensorReader

    @cached_property
    def value(self) -> Tensor:
        gain = self.norm.gain(self.read(self.norm.tensor))
        if not _all_finite(gain):
            raise CheckpointError(f"{self.norm.tensor} holds NaN or infinity")
        return gain


@dataclass(frozen=True)
class _Unit:
    """Makes a norm scale nothing."""

    norm: FoldedNorm
    dtype: torch.dtype | None

    def __call__(self, rows: Tensor, first_row: int = 0) -> Tensor:
        return torch.full_like(rows, self.norm.unit, dtype=self.dtype or rows.dtype)


@dataclass(frozen=True)
class _Checked:
    heads: HeadSlices
    factors: Sequence[Tensor]
    dtype: torch.dtype | None
    gain: _Gain | None = None

    def __call__(self, rows: Tensor, first_row: int = 0) -> Tensor:
        name = self.heads.tensor
        if rows.dtype not in FUSIBLE_DTYPES.values():
            raise UnsupportedModelError(
                f"{name} has dtype {rows.dtype}; only float16, bfloat16, float32 and float64 "
                "weights can be rotated",
                hint=f"fuse the checkpoint before quantizing it, or {ONLINE_HINT}",
            )
        scaled = rows
        if self.gain is not None:
            scaled = rows * self.gain.value.to(torch.promote_types(rows.dtype, torch.float32))
        rotated = rotate_heads(
            scaled,
            self.heads,
            self.factors,
            first_row=first_row,
            dtype=self.dtype or rows.dtype,
        )
        if not _all_finite(rotated):
            if not _all_finite(rows):
                raise CheckpointError(f"{name} holds NaN or infinity")
            raise UnsupportedModelError(
                f"{name} overflows {rotated.dtype} when rotated: its largest magnitude is "
                f"{scaled.abs().max().item():.4g}",
                hint=f"pass --dtype bfloat16, or {ONLINE_HINT}",
            )
        return rotated


def _all_finite(tensor: Tensor) -> bool:
    """A sum tells it many times sooner: NaN and infinity stay in it. If it overflows, look."""
    return bool(tensor.sum(dtype=torch.float32).isfinite() or tensor.isfinite().all())
