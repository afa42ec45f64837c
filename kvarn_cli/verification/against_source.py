"""Compare a converted folder with its source, tensor by tensor and in blocks.

A rotated tensor is turned back with the matrix that the metadata describes. R is orthonormal, so
turning back keeps the length of each head's vector of errors: if every stored entry w carries at
most one rounding, e(w) (see `model/rounding_error.py`), then the vector turned back differs from
the source's by at most the length of e(w) over its entries. A tensor that was not rotated, or
rotated otherwise, differs by about its own length: hundreds of times as much. What reads a latent
is turned back to the source's columns times the folded norm's gain, and the norm itself must scale
nothing. All other tensors must be equal, bit by bit or, where the conversion changed the dtype,
after the same rounding.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvarn_cli.checkpoint.checkpoint import Checkpoint
from kvarn_cli.checkpoint.tensor_blocks import read_blocks, rows_at_once
from kvarn_cli.metadata import KVarNConfig, Rotation
from kvarn_cli.model.heads import put_heads, take_heads
from kvarn_cli.model.layout import FUSIBLE_DTYPES, FoldedNorm, HeadSlices
from kvarn_cli.model.rounding_error import rounding_error
from kvarn_cli.model.torch_threads import one_thread_per_operation
from kvarn_cli.progress import Report, silent
from kvarn_cli.quantization.hadamard import rotation_matrix
from kvarn_cli.tensor_bytes import read_rows, to_tensor
from kvarn_cli.verification.folder import Check, read_metadata


@one_thread_per_operation()
def verify_against(
    converted: Checkpoint, source: Checkpoint, report: Report = silent
) -> tuple[Check, ...]:
    """Check that the rotation is in the weights, and that nothing else changed.

    Args:
        converted: a folder that passed `verify_folder`.
        source: what it was converted from.
        report: told the bytes compared.
    """
    metadata = read_metadata(converted.folder)
    identity = tuple(_identity_problems(metadata, converted, source))
    checks = [Check("source", f"{len(source.weight_map)} tensors", identity)]
    if identity:
        return tuple(checks)
    rotation = metadata.rotations.value
    rotated = _rotated_parts(rotation)
    gains = {
        norm.into: FoldedNorm(name, norm.unit).gain(_whole(source, name))
        for name, norm in rotation.folded_norms.items()
    }
    matrix = rotation_matrix(rotation.head_dim, rotation.signs, dtype=torch.float64)
    total = sum(source.info(name).size_bytes for name in source.weight_map)
    rotation_problems, other_problems, worst, done = [], [], 0.0, 0
    for name in source.weight_map:
        if name in rotated:
            share, rest_is_equal = _compare_rotated(
                rotated[name], converted, source, matrix, gains.get(name)
            )
            worst = max(worst, share)
            if not share <= 1:
                rotation_problems.append(
                    f"{name} turned back differs from the source by {share:.3g} times what one "
                    "rounding explains"
                )
            if not rest_is_equal:
                other_problems.append(
                    f"{name} differs from the source outside the channels of {metadata.rotated}"
                )
        elif name in rotation.folded_norms:
            if not (_whole(converted, name) == rotation.folded_norms[name].unit).all():
                rotation_problems.append(f"{name} was folded and still scales")
        elif not _same(name, converted, source):
            other_problems.append(f"{name} differs from the source")
        done += source.info(name).size_bytes
        report("comparing with the source", done, total)
    checks.append(
        Check(
            "rotation",
            f"{len(rotated)} tensors turned back{_folded(rotation)}; differences use "
            f"{worst:.0%} of one rounding",
            tuple(rotation_problems),
        )
    )
    unchanged = len(source.weight_map) - len(rotation.changed_tensors)
    checks.append(Check("other tensors", f"{unchanged} unchanged", tuple(other_problems)))
    return tuple(checks)


def _identity_problems(
    metadata: KVarNConfig, converted: Checkpoint, source: Checkpoint
) -> Iterator[str]:
    if metadata.base_model.index_sha256 != source.index_sha256:
        yield (
            f"{source.folder} is not what was converted: its index or header is another than that "
            f"of {metadata.base_model.name}"
        )
        return
    if converted.weight_map != source.weight_map:
        yield "the source has other tensors, or has them in other files"
        return
    for name in source.weight_map:
        if converted.info(name).shape != source.info(name).shape:
            yield f"{name} has another shape than in the source"


def _rotated_parts(rotation: Rotation) -> dict[str, HeadSlices]:
    return {
        name: HeadSlices(name, part.axis, tuple(part.first_channels), rotation.head_dim)
        for name, part in rotation.tensors.items()
    }


def _compare_rotated(
    heads: HeadSlices,
    converted: Checkpoint,
    source: Checkpoint,
    matrix: Tensor,
    gain: Tensor | None,
) -> tuple[float, bool]:
    """The largest share of one rounding that is used, and whether all other entries are equal."""
    share, rest_is_equal, first_row = 0.0, True, 0
    row_step = 1 if heads.axis else heads.head_dim
    for stored, original in _paired_blocks(heads.tensor, converted, source, row_step):
        vectors, sources = (take_heads(rows, heads, first_row) for rows in (stored, original))
        if len(vectors):
            scaled = sources if gain is None else sources * gain
            share = max(share, _share_of_rounding(vectors, scaled, matrix, sources.dtype))
        other = put_heads(stored, heads, sources.to(stored.dtype), first_row)
        rest_is_equal = rest_is_equal and _equal(other, original)
        first_row += len(stored)
    return share, rest_is_equal


def _whole(checkpoint: Checkpoint, name: str) -> Tensor:
    return to_tensor(checkpoint.read(name), checkpoint.info(name))


def _folded(rotation: Rotation) -> str:
    count = len(rotation.folded_norms)
    return f", {count} norms folded" if count else ""


def _paired_blocks(
    name: str, converted: Checkpoint, source: Checkpoint, row_step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows of both, whatever their dtypes."""
    both = (converted, source)
    rows = min(rows_at_once(checkpoint.info(name), row_step) for checkpoint in both)
    yield from zip(*(read_rows(checkpoint, name, rows) for checkpoint in both), strict=True)


def _share_of_rounding(
    stored: Tensor, original: Tensor, matrix: Tensor, dtype: torch.dtype
) -> float:
    """Largest difference of a head's vector, in units of what rounding explains.

    Args:
        stored: [..., head_dim].
        original: the same shape.
        matrix: R, [head_dim, head_dim].
        dtype: of the source.
    """
    difference = (stored.double() @ matrix.T - original.double()).norm(dim=-1)
    share = difference / rounding_error(stored, dtype).norm(dim=-1)
    return float(share.nan_to_num(math.inf, math.inf).max())


def _same(name: str, converted: Checkpoint, source: Checkpoint) -> bool:
    after, before = converted.info(name), source.info(name)
    if after.dtype == before.dtype:
        rows = rows_at_once(before)
        blocks = zip(
            read_blocks(converted.folder / converted.weight_map[name], after, rows),
            read_blocks(source.folder / source.weight_map[name], before, rows),
            strict=True,
        )
        return all(one == other for one, other in blocks)
    if not {after.dtype, before.dtype} <= FUSIBLE_DTYPES.keys():
        return False
    return all(_equal(new, old) for new, old in _paired_blocks(name, converted, source, 1))


def _equal(new: Tensor, old: Tensor) -> bool:
    """Equal after the same rounding."""
    return torch.equal(new.nan_to_num(), old.to(new.dtype).nan_to_num())
