"""Between the bytes of a safetensors file and torch tensors."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvarn_cli.checkpoint.checkpoint import Checkpoint
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.tensor_blocks import read_blocks
from kvarn_cli.model.layout import FUSIBLE_DTYPES


def to_tensor(data: bytearray, info: TensorInfo) -> Tensor:
    """View the bytes of a float tensor as one; they are shared, not copied."""
    return torch.frombuffer(data, dtype=FUSIBLE_DTYPES[info.dtype]).reshape(info.shape)


def to_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def read_rows(checkpoint: Checkpoint, name: str, rows: int) -> Iterator[Tensor]:
    """A float tensor, `rows` rows at a time.

    Raises:
        CheckpointError: the file was cut short.
        OSError: reading failed.
    """
    path, info = checkpoint.folder / checkpoint.weight_map[name], checkpoint.info(name)
    for block in read_blocks(path, info, rows):
        flat = replace(info, shape=(len(block) // FUSIBLE_DTYPES[info.dtype].itemsize,))
        yield to_tensor(block, flat).reshape(-1, *info.shape[1:])
