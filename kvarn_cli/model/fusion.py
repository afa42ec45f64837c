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

and no other tensor changes: b_O is added after W_O, Q and K do not meet V. It holds only while
nothing but a mixing of rows happens between V and W_O. A gate or a norm over channels there does
not commute with R; `layout` refuses what it does not know and `proof` tests the rest.

Source: QuaRot (arXiv 2404.00456), section 4; KVarN (arXiv 2606.03458) for the cache.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvarn_cli.errors import CheckpointError, UnsupportedModelError
from kvarn_cli.model.layout import FUSIBLE_DTYPES, ONLINE_HINT, ModelLayout
from kvarn_cli.quantization.hadamard import fused_rotation, rotate

TensorRotation = Callable[[Tensor], Tensor]

_OUTPUT_ROWS = 1024


def rotate_value_weight(
    weight: Tensor, rotation: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """W_V'[h] = Rᵀ W_V[h] for every KV head h.

    Args:
        weight: [num_kv_heads * head_dim, hidden_size], any float dtype.
        rotation: R, [head_dim, head_dim].
        dtype: of the result; None is that of `weight`.

    Returns:
        Shape of `weight`; computed in float32 (float64 stays) and rounded once.
    """
    heads = weight.unflatten(0, (-1, len(rotation)))
    return torch.cat([rotate(head.T, rotation).T.to(dtype or weight.dtype) for head in heads])


def rotate_value_bias(bias: Tensor, rotation: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """b_V'[h] = Rᵀ b_V[h] for every KV head h.

    Args:
        bias: [num_kv_heads * head_dim], any float dtype.
        rotation: R, [head_dim, head_dim].
        dtype: of the result; None is that of `bias`.

    Returns:
        Shape of `bias`; computed in float32 (float64 stays) and rounded once.
    """
    heads = bias.unflatten(0, (-1, len(rotation)))
    return rotate(heads, rotation).flatten().to(dtype or bias.dtype)


def rotate_output_weight(
    weight: Tensor, rotation: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """W_O'[:, q] = W_O[:, q] R for every query head q.

    Args:
        weight: [hidden_size, num_heads * head_dim], any float dtype.
        rotation: R, [head_dim, head_dim].
        dtype: of the result; None is that of `weight`.

    Returns:
        Shape of `weight`; computed in float32 (float64 stays) and rounded once.
    """
    dtype = dtype or weight.dtype
    blocks = weight.unflatten(1, (-1, len(rotation))).split(_OUTPUT_ROWS)
    return torch.cat([rotate(block, rotation).flatten(1).to(dtype) for block in blocks])


def tensor_rotations(
    layout: ModelLayout, rotation: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> dict[str, TensorRotation]:
    """What happens to each tensor that the fused rotation changes.

    A tensor may also be rotated in blocks: V's of whole KV heads, O's of any rows.

    Args:
        layout: where V and O live.
        rotation: R, [head_dim, head_dim]; default `fused_rotation(head_dim)`. Its transpose
            undoes a fusion, up to the rounding of the stored dtype.
        dtype: of the rotated tensors, rounded to it once; None is each tensor's own.

    Returns:
        By tensor name, a function from the tensor to its rotated copy of the same shape. It
        raises `CheckpointError` for NaN or infinity in the tensor and `UnsupportedModelError`
        when its dtype is no plain float or the rotated values overflow it.
    """
    if rotation is None:
        rotation = fused_rotation(layout.cache.head_dim, dtype=torch.float64)
    rotations: dict[str, TensorRotation] = {}
    for layer in layout.layers:
        turns = (
            (layer.value_weight, rotate_value_weight),
            (layer.value_bias, rotate_value_bias),
            (layer.output_weight, rotate_output_weight),
        )
        for name, turn in turns:
            if name is not None:
                rotations[name] = partial(_checked, name, turn, rotation, dtype)
    return rotations


def _checked(
    name: str,
    turn: Callable[[Tensor, Tensor, torch.dtype | None], Tensor],
    rotation: Tensor,
    dtype: torch.dtype | None,
    tensor: Tensor,
) -> Tensor:
    if tensor.dtype not in FUSIBLE_DTYPES.values():
        raise UnsupportedModelError(
            f"{name} has dtype {tensor.dtype}; only float16, bfloat16, float32 and float64 "
            "weights can be rotated",
            hint=f"fuse the checkpoint before quantizing it, or {ONLINE_HINT}",
        )
    if not _all_finite(tensor):
        raise CheckpointError(f"{name} holds NaN or infinity")
    rotated = turn(tensor, rotation, dtype)
    if not _all_finite(rotated):
        raise UnsupportedModelError(
            f"{name} overflows {rotated.dtype} when rotated: its largest magnitude is "
            f"{tensor.abs().max().item():.4g}",
            hint=f"pass --dtype bfloat16, or {ONLINE_HINT}",
        )
    return rotated


def _all_finite(tensor: Tensor) -> bool:
    """A sum tells it ten times sooner: NaN and infinity stay in it, and float64 holds the rest."""
    return bool(tensor.sum(dtype=torch.float64).isfinite() or tensor.isfinite().all())
