"""The channels of heads before and after a fusion, a block of rows at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvarn_cli.model.fusion import TensorRotation
from kvarn_cli.model.heads import take_heads
from kvarn_cli.model.layout import HeadSlices

RowReader = Callable[[str], Iterable[Tensor]]
"""From a tensor's name to its rows, in blocks that start and end between two heads."""


@dataclass(frozen=True)
class HeadBlock:
    """Some heads' channels, before and after the fusion.

    Attributes:
        heads: which heads, by their place in the tensor's slices.
        first: index of the first row of `before` along the tensor's other axis.
        before: [heads, other axis, head_dim], in the stored dtype.
        after: the same, fused.
    """

    heads: list[int]
    first: int
    before: Tensor
    after: Tensor


def head_blocks(
    part: HeadSlices, read: RowReader, rotations: Mapping[str, TensorRotation]
) -> Iterator[HeadBlock]:
    """Read a tensor and fuse it, block by block.

    Args:
        part: the heads to look at, of one tensor.
        read: the original rows.
        rotations: what the fusion makes of them.
    """
    first_row = 0
    for rows in read(part.tensor):
        vectors, fused = (
            take_heads(each, part, first_row)
            for each in (rows, rotations[part.tensor](rows, first_row))
        )
        inside = range(first_row, first_row + len(rows))
        heads = [i for i, start in enumerate(part.starts) if part.axis or start in inside]
        if rows.ndim == 1:
            vectors, fused = vectors[:, None], fused[:, None]
        if heads:
            yield HeadBlock(heads, first_row if part.axis else 0, vectors, fused)
        first_row += len(rows)
