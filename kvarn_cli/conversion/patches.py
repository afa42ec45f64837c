"""From what a conversion changes in tensors to what the writer changes in bytes."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvarn_cli.checkpoint.checkpoint import Checkpoint
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.tensor_changes import ChangeRows, Patch
from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.fusion import TensorRotation, tensor_rotations
from kvarn_cli.model.layout import FUSIBLE_DTYPES, ModelLayout
from kvarn_cli.tensor_bytes import to_bytes, to_tensor


def conversion_patches(
    checkpoint: Checkpoint, layout: ModelLayout | None, dtype: str | None
) -> dict[str, Patch]:
    """How each tensor changes: V and O are rotated, and plain floats get the output's dtype.

    Args:
        checkpoint: the source.
        layout: where V and O live; None rotates nothing.
        dtype: of the output's plain float tensors, by safetensors' name; None keeps theirs.
    """
    patches = {}
    if dtype is not None:
        for header in checkpoint.shards.values():
            for name, info in header.tensors.items():
                if info.dtype in FUSIBLE_DTYPES and info.dtype != dtype:
                    change = partial(_cast, name, FUSIBLE_DTYPES[dtype])
                    patches[name] = Patch(_on_bytes(change), dtype=dtype, recorded=False)
    if layout is not None:
        torch_dtype = None if dtype is None else FUSIBLE_DTYPES[dtype]

        def read(name: str) -> Tensor:
            return to_tensor(checkpoint.read(name), checkpoint.info(name))

        for name, rotate in tensor_rotations(layout, read=read, dtype=torch_dtype).items():
            whole = checkpoint.info(name)
            patches[name] = Patch(_on_rows(rotate, whole), layout.row_step(name), dtype)
    return patches


def _on_bytes(
    change: Callable[[Tensor], Tensor],
) -> Callable[[bytearray, TensorInfo], memoryview]:
    return lambda data, info: to_bytes(change(to_tensor(data, info)))


def _on_rows(rotate: TensorRotation, whole: TensorInfo) -> ChangeRows:
    row_bytes = whole.size_bytes // whole.shape[0]
    return lambda data, info: to_bytes(
        rotate(to_tensor(data, info), (info.start - whole.start) // row_bytes)
    )


def _cast(name: str, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Round to another dtype.

    Raises:
        UnsupportedModelError: a finite value becomes infinite.
    """
    cast = tensor.to(dtype)
    overflown = cast.isinf() & tensor.isfinite()
    if overflown.any():
        largest = tensor[overflown].abs().max().item()
        raise UnsupportedModelError(
            f"{name} overflows {dtype}: its largest magnitude is {largest:.4g}, "
            f"the dtype's {torch.finfo(dtype).max:.4g}",
            hint="leave out --dtype, or pass --dtype bfloat16",
        )
    return cast
