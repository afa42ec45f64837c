"""Where V and O live in a checkpoint: tensors, axes and slices, no mathematics."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvarn_cli.errors import UnsupportedModelError

FUSIBLE_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes whose tensors can be rotated, by their name in safetensors."""

ONLINE_HINT = "use --rotation online, which changes no weight"


@dataclass(frozen=True)
class HeadSlices:
    """The channels of attention heads along one axis of a tensor.

    Attributes:
        tensor: its name.
        axis: 0 where rows are channels of heads, 1 where columns are.
        starts: first channel of each head, multiples of `head_dim`.
        head_dim: channels of a head.
    """

    tensor: str
    axis: Literal[0, 1]
    starts: tuple[int, ...]
    head_dim: int


@dataclass(frozen=True)
class FoldedNorm:
    """A norm between the latent and what reads it, whose weight moves into the latter.

    Attributes:
        tensor: name of its weight w.
        unit: the weight with which it scales nothing; it multiplies by w + 1 - unit.
    """

    tensor: str
    unit: Literal[0, 1]

    def gain(self, weight: Tensor) -> Tensor:
        """What it multiplies the channels of the latent by, float64 [width]."""
        return weight.double() + (1 - self.unit)


@dataclass(frozen=True)
class AttentionLayer:
    """The tensors of one attention module that the fused rotation changes.

    Of an MLA module the latent stands in V's place, as one head: `value` makes it and `output`
    reads it.

    Attributes:
        index: its first layer in the cache, or the one that it reads.
        module: its path; in a checkpoint's layout, as the checkpoint spells it.
        value: V's heads in W_V and, where there is one, in b_V.
        output: the heads that W_O reads; its bias is never changed.
        norm: between the latent and `output`; None of V.
    """

    index: int
    module: str
    value: tuple[HeadSlices, ...]
    output: HeadSlices
    norm: FoldedNorm | None = None

    @property
    def slices(self) -> tuple[HeadSlices, ...]:
        """All that is rotated."""
        return (*self.value, self.output)

    @property
    def rotated(self) -> str:
        """What is rotated, in words."""
        return "V" if self.norm is None else "the latent"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that change."""
        names = tuple(part.tensor for part in self.slices)
        return names if self.norm is None else (*names, self.norm.tensor)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return len(self.output.starts)

    @property
    def num_kv_heads(self) -> int:
        """Heads of V in the weights; a class may cache more."""
        return len(self.value[0].starts)


@dataclass(frozen=True)
class ModelLayout:
    """V and O of each attention module whose heads are `head_dim` wide.

    Layers outside the quantized cache are listed too, so that all of them hold V in one basis.
    """

    head_dim: int
    layers: tuple[AttentionLayer, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that change."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.tensors))

    def row_step(self, tensor: str) -> int:
        """Rows of a tensor that can only be rotated together: those of a head, or any."""
        by_rows = {part.tensor for layer in self.layers for part in layer.slices if part.axis == 0}
        return self.head_dim if tensor in by_rows else 1

    def renamed(self, names: Mapping[str, str]) -> "ModelLayout":
        """The same layout with other tensor names.

        Args:
            names: the new name of each tensor.
        """

        def rename(part: HeadSlices) -> HeadSlices:
            return replace(part, tensor=names[part.tensor])

        return ModelLayout(
            self.head_dim,
            tuple(
                replace(
                    layer,
                    module=rename(layer.output).tensor.rpartition(".")[0].rpartition(".")[0],
                    value=tuple(map(rename, layer.value)),
                    output=rename(layer.output),
                    norm=layer.norm and replace(layer.norm, tensor=names[layer.norm.tensor]),
                )
                for layer in self.layers
            ),
        )


def check_dtypes(layout: ModelLayout, dtypes: Mapping[str, str]) -> None:
    """Refuse V and O that are not stored as plain floating-point numbers.

    Args:
        layout: where V and O live.
        dtypes: safetensors' name of each tensor's dtype, such as `BF16`, by tensor name.

    Raises:
        UnsupportedModelError: a tensor to be fused has another dtype than `FUSIBLE_DTYPES`.
    """
    for name in layout.tensors:
        if dtypes[name] not in FUSIBLE_DTYPES:
            raise UnsupportedModelError(
                f"{name} is stored as {dtypes[name]}; a rotation needs {', '.join(FUSIBLE_DTYPES)}",
                hint=f"fuse the checkpoint before quantizing it, or {ONLINE_HINT}",
            )
