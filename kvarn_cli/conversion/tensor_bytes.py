"""Between the bytes of a safetensors file and torch tensors."""

import torch
from torch import Tensor

from kvarn_cli.checkpoint.safetensors_header import TensorInfo

TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def to_tensor(data: bytearray, info: TensorInfo) -> Tensor:
    """View the bytes of a float tensor as one; they are shared, not copied."""
    return torch.frombuffer(data, dtype=TORCH_DTYPES[info.dtype]).reshape(info.shape)


def to_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
