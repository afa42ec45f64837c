"""Variance normalization: equalise the standard deviations along both axes of a tile.

An alternating, Sinkhorn-Knopp style balancing in the log domain. The balanced tile is never
materialised while iterating: with inverse scales a (rows) and b (columns), the first and second
moments of `tile · a · b` along either axis are matrix-vector products of `tile` and `tile²`, and
scaling a row divides its standard deviation exactly.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvarn_cli.settings import KVarNSettings

_SMALLEST_STD = 1e-8


class TileScales(NamedTuple):
    """Scales with which `tile = balanced · row · column`.

    Attributes:
        row: [N, rows, 1] float32.
        column: [N, 1, columns] float32.
    """

    row: Tensor
    column: Tensor


def variance_normalize(tiles: Tensor, settings: KVarNSettings) -> TileScales:
    """Find the row and column scales of each tile.

    After each iteration the imbalance max std / min std, columns plus rows, is compared per tile,
    and the best scales so far are kept (ties: the later ones).

    Args:
        tiles: [N, rows, columns], float32.
        settings: iterations and clips; 0 iterations give scales of one.

    Returns:
        The best scales of each tile.

    Source: KVarN (arXiv 2606.03458), section 3, after SINQ's dual scaling; sample standard
    deviations and clips as in the public vLLM backend.
    """
    count, rows, columns = tiles.shape
    squares = tiles.square()
    log_row = tiles.new_zeros(count, rows, 1)
    log_column = tiles.new_zeros(count, 1, columns)
    best = TileScales(torch.ones_like(log_row), torch.ones_like(log_column))
    best_imbalance = tiles.new_full((count, 1, 1), torch.inf)
    column_std = _std(tiles, squares, torch.ones_like(log_row), dim=1)
    for _ in range(settings.iterations):
        log_column = _updated(log_column, column_std, settings)
        inverse_column = (-log_column).exp()
        inverse_row = (-log_row).exp()
        row_std = _std(tiles, squares, inverse_column, dim=2) * inverse_row
        new_log_row = _updated(log_row, row_std, settings)
        row_std = row_std * (log_row - new_log_row).exp()
        log_row = new_log_row
        column_std = _std(tiles, squares, (-log_row).exp(), dim=1) * inverse_column

        imbalance = _spread(column_std) + _spread(row_std)
        better = imbalance <= best_imbalance
        best_imbalance = torch.where(better, imbalance, best_imbalance)
        best = TileScales(
            torch.where(better, log_row.exp(), best.row),
            torch.where(better, log_column.exp(), best.column),
        )
    return best


def _std(tiles: Tensor, squares: Tensor, inverse_scale: Tensor, *, dim: int) -> Tensor:
    """Sample standard deviation along `dim` of the tiles scaled across `dim`."""
    count = tiles.shape[dim]
    if dim == 1:
        weights = inverse_scale.transpose(1, 2)
        total, total_squares = weights @ tiles, weights.square() @ squares
    else:
        weights = inverse_scale.transpose(1, 2)
        total, total_squares = tiles @ weights, squares @ weights.square()
    variance = (total_squares - total.square() / count) / (count - 1)
    return variance.clamp_min(0).sqrt()


def _updated(log_scale: Tensor, std: Tensor, settings: KVarNSettings) -> Tensor:
    step = std.clamp(settings.std_min, settings.std_max).log()
    return (log_scale + step).clamp(settings.log_scale_min, settings.log_scale_max)


def _spread(std: Tensor) -> Tensor:
    flat = std.flatten(1)
    spread = flat.amax(1) / flat.amin(1).clamp_min(_SMALLEST_STD)
    return spread[:, None, None]
