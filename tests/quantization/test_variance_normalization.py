import pytest
import torch
from loop_reference import normalize

from kvarn_cli.quantization.variance_normalization import variance_normalize
from kvarn_cli.settings import KVarNSettings


def outlier_tiles(count=4, rows=32, columns=48):
    """Tiles with a few heavy rows and columns, as K and V have them."""
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randn(count, rows, columns, generator=generator)
    tiles[1, 3] *= 20
    tiles[2, :, 5] *= 30
    tiles[3] *= torch.rand(rows, 1, generator=generator) * 9 + 0.01
    return tiles


@pytest.mark.parametrize("iterations", [0, 1, 3, 8, 16])
def test_scales_equal_the_loop_reference(iterations):
    tiles = outlier_tiles()
    scales = variance_normalize(tiles, KVarNSettings(iterations=iterations))
    for index, tile in enumerate(tiles):
        row, column, _ = normalize(tile.tolist(), iterations)
        assert scales.row[index, :, 0].tolist() == pytest.approx(row, rel=2e-5)
        assert scales.column[index, 0].tolist() == pytest.approx(column, rel=2e-5)


def imbalance(tile):
    return sum((tile.std(axis).max() / tile.std(axis).min()).item() for axis in (0, 1))


def test_the_best_iterate_is_kept_per_tile_in_batches():
    tiles = outlier_tiles()
    scales = variance_normalize(tiles, KVarNSettings(iterations=12))
    balanced = tiles / (scales.row * scales.column)
    for tile, kept in zip(tiles, balanced, strict=True):
        *_, imbalances = normalize(tile.tolist(), 12)
        assert imbalance(kept) == pytest.approx(min(imbalances), rel=1e-4)


def test_a_tile_is_treated_alike_alone_and_in_a_batch():
    tiles = outlier_tiles()
    together = variance_normalize(tiles, KVarNSettings())
    for index in range(len(tiles)):
        alone = variance_normalize(tiles[index : index + 1], KVarNSettings())
        assert torch.allclose(alone.row[0], together.row[index], rtol=1e-6)
        assert torch.allclose(alone.column[0], together.column[index], rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1e-4, 6e4])
def test_extreme_and_degenerate_tiles_stay_finite(magnitude):
    tiles = outlier_tiles() * magnitude
    tiles[0, 7] = 0
    tiles[1, 8] = magnitude
    tiles[2] = magnitude
    scales = variance_normalize(tiles, KVarNSettings())
    assert scales.row.isfinite().all() and scales.column.isfinite().all()
    assert (scales.row > 0).all() and (scales.column > 0).all()
