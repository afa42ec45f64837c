"""Between the bytes of a safetensors file and torch tensors."""

import torch
from torch import Tensor

from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.model.layout import FUSIBLE_DTYPES


def to_tensor(data: bytearray, info: TensorInfo) -> Tensor:
    """View the bytes of a float tensor as one; they are shared, not copied."""
    return torch.frombuffer(data, dtype=FUSIBLE_DTYPES[info.dtype]).reshape(info.shape)


def to_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
