import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_reference import refine

from kvarn_cli.quantization.refined_encoder import RANGE_SHARES, refine_tiles, search_ranges
from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.quantization.tile_record import (
    SCALE_DTYPES,
    pack_records,
    quantize_tiles,
    tile_scales,
    unpack_records,
)
from kvarn_cli.settings import LAYOUTS, KVarNSettings

DOCS = Path(__file__).parents[2] / "docs"
VECTORS = json.loads((DOCS / "encoder-vectors.json").read_text(encoding="utf-8"))
SETTINGS = {layout: KVarNSettings(layout=layout) for layout in LAYOUTS}
ROUNDING = {torch.float16: (2**-11, 2**-25), torch.float8_e4m3fn: (2**-4, 2**-10)}
TOKENS = ("rows", "columns")
CHANNELS = {"rows": -1, "columns": -2}

tile_kinds = given(
    seed=st.integers(0, 2**32),
    bits=st.sampled_from((2, 4)),
    tokens=st.sampled_from(TOKENS),
    tail=st.sampled_from((0.0, 1.0, 2.0)),
    layout=st.sampled_from(LAYOUTS),
)


def random_tile(seed, tail=1.0, rows=32, columns=64):
    """Rows and columns of different sizes; the larger `tail`, the heavier the outliers."""
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randn(rows, columns, generator=generator)
    tile *= 4 * (torch.randn(rows, 1, generator=generator) / 2).exp()
    return tile * (tail * torch.randn(1, columns, generator=generator)).exp()


def largest_rounding(stored):
    """The most by which a number can differ from what it was before it was stored."""
    relative, absolute = ROUNDING[stored.dtype]
    return (relative * stored.float().abs() / (1 - relative)).clamp_min(absolute)


@tile_kinds
@settings(max_examples=100, deadline=None)
def test_inner_products_with_the_token_itself_are_kept(seed, bits, tokens, tail, layout):
    tile = random_tile(seed, tail)
    quantized = refine_tiles(tile, bits, SETTINGS[layout], tokens=tokens)
    rows, column, channels = quantized.rows, quantized.column_scale, CHANNELS[tokens]
    decoded = quantized.dequantize()
    cosine = torch.cosine_similarity(tile, decoded, dim=channels)
    assert (cosine > 0.5).float().mean() > 0.8
    difference = (tile * (decoded - tile)).sum(channels).abs()
    if tokens == "columns":
        rounding = rows.dequantize().abs() * largest_rounding(column)
    else:
        steps = rows.codes * largest_rounding(rows.scale) + largest_rounding(rows.zero_point)
        rounding = steps * column.float()
    float_noise = 1e-5 * tile.square().sum(channels)
    allowed = (tile.abs() * rounding).sum(channels) + float_noise
    assert (difference <= allowed)[cosine > 0.55].all()


@tile_kinds
@settings(max_examples=100, deadline=None)
def test_no_row_of_the_balanced_tile_is_worse_than_with_the_reference(
    seed, bits, tokens, tail, layout
):
    tiles, own_settings = random_tile(seed, tail)[None], SETTINGS[layout]
    scales, dtype = tile_scales(tiles, own_settings), SCALE_DTYPES[layout]
    own = search_ranges(tiles, scales, bits, RANGE_SHARES[bits], dtype)
    reference = quantize_tiles(tiles, bits, own_settings)
    own_error, reference_error = (
        ((quantized.dequantize() - tiles) / own.column_scale.float()).norm(dim=-1)
        for quantized in (own, reference)
    )
    assert (own_error <= reference_error * (1 + 1e-5)).all()
    assert own_error.mean() < reference_error.mean()


@tile_kinds
@settings(max_examples=30, deadline=None)
def test_the_order_of_tokens_does_not_matter(seed, bits, tokens, tail, layout):
    tile = random_tile(seed, tail).double()  # so that the order of sums flips no rounding
    token_dim = 0 if tokens == "rows" else 1
    order = torch.randperm(tile.shape[token_dim], generator=torch.Generator().manual_seed(seed + 1))
    decoded = refine_tiles(tile, bits, SETTINGS[layout], tokens=tokens).dequantize()
    shuffled = tile.index_select(token_dim, order)
    again = refine_tiles(shuffled, bits, SETTINGS[layout], tokens=tokens).dequantize()
    assert torch.equal(again, decoded.index_select(token_dim, order))


@tile_kinds
@settings(max_examples=30, deadline=None)
def test_scaling_the_tile_scales_what_it_decodes_to(seed, bits, tokens, tail, layout):
    # Within the clips of the normalization; they act on smaller and larger tiles.
    tile = 4 * random_tile(seed, tail=0).double()
    decoded = refine_tiles(tile, bits, SETTINGS[layout], tokens=tokens).dequantize()
    for factor in (2, 4):
        scaled = refine_tiles(tile * factor, bits, SETTINGS[layout], tokens=tokens).dequantize()
        assert torch.equal(scaled, decoded * factor)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_the_published_vectors_are_what_this_encoder_and_a_plain_loop_give(case):
    bits, tokens, iterations = case["bits"], case["tokens"], case["iterations"]
    layout = case.get("layout", "vllm-fp16")
    own_settings = KVarNSettings(iterations=iterations, layout=layout)
    own = refine_tiles(torch.tensor(case["tile"]), bits, own_settings, tokens=tokens)
    stored = (own.rows.scale[:, 0], own.rows.zero_point[:, 0], own.column_scale[0])
    scales = (part.float() for part in stored)
    by_loop = refine(case["tile"], bits, iterations, RANGE_SHARES[bits], tokens, layout)
    for codes, *numbers in ((own.rows.codes.tolist(), *scales), by_loop):
        assert codes == case["codes"]
        for part, name in zip(numbers, ("scale", "zero_point", "column_scale"), strict=True):
            assert list(part) == pytest.approx(case[name], rel=2**-10)


def test_the_worked_example_of_the_docs_is_the_first_vector():
    page = (DOCS / "encoder.md").read_text(encoding="utf-8")
    assert json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1]) == VECTORS[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1e-4, 1.0, 6e4])
def test_degenerate_tiles_decode_to_finite_values_near_them(tokens, magnitude, layout):
    tile = random_tile(5, tail=0)
    tile /= tile.abs().max()
    tile[3] = 0
    tile[4] = 0.25
    tile[:, 7] = 0
    tile[:, 9] = -0.5
    decoded = refine_tiles(tile * magnitude, 2, SETTINGS[layout], tokens=tokens).dequantize()
    assert decoded.isfinite().all()
    reference = quantize_tiles(tile * magnitude, 2, SETTINGS[layout]).dequantize()
    error, allowed = ((states - tile * magnitude).norm() for states in (decoded, reference))
    assert error <= allowed + 1e-5
    zeros = refine_tiles(torch.zeros(32, 64), 2, SETTINGS[layout], tokens=tokens).dequantize()
    assert zeros.eq(0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_token_that_decodes_to_something_else_keeps_its_scale(tokens, layout):
    tile = torch.ones(4, 8)
    tile[0, 0] = 1e-6
    tile[1:, 0] = 0
    tile[0, 1:] = 0
    decoded = refine_tiles(tile, 2, SETTINGS[layout], tokens=tokens).dequantize()
    assert decoded.isfinite().all()
    assert decoded.abs().max() < 4


def test_tiles_are_independent_and_runs_repeat_to_the_bit():
    tiles = torch.stack([random_tile(seed) for seed in range(6)]).view(2, 3, 32, 64)
    together, again, alone = (
        refine_tiles(part, 2, KVarNSettings(), tokens="rows")
        for part in (tiles, tiles, tiles[1, 2])
    )
    assert torch.equal(together.dequantize(), again.dequantize())
    assert torch.equal(together.rows.codes[1, 2], alone.rows.codes)
    assert torch.allclose(together.dequantize()[1, 2], alone.dequantize(), rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 2), (4, 2), (4, 4)])
def test_one_decoder_reads_the_records_of_both_encoders(key_bits, value_bits, layout):
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 256, 64, generator=generator)
    reference = KVarNSettings(key_bits=key_bits, value_bits=value_bits, layout=layout)
    decoder = TileCodec(reference, 64, rotate_values=True)
    errors = []
    for encoder in ("reference", "refined"):
        codec = TileCodec(reference.with_(encoder=encoder), 64, rotate_values=True)
        records = codec.encode(keys, values)
        assert records.shape == (3, 2, reference.record_bytes(64))
        repacked = pack_records(*unpack_records(records, 64, reference), reference)
        assert torch.equal(repacked, records)
        decoded = decoder.decode(records)
        assert all(map(torch.equal, decoded, codec.reconstruct(keys, values)))
        errors.append([(a - b).norm() for a, b in zip(decoded, (keys, values), strict=True)])
    assert all(refined < plain for plain, refined in zip(*errors, strict=True))
