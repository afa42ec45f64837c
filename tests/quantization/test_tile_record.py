import pytest
import torch
from loop_reference import decode, pack, quantize, record

from kvarn_cli.quantization.rounding import pack_codes, round_to_nearest, unpack_codes
from kvarn_cli.quantization.tile_record import (
    SCALE_DTYPES,
    pack_records,
    quantize_tiles,
    unpack_records,
)
from kvarn_cli.settings import GROUP_SIZES, HEAD_DIMS, LAYOUTS, KVarNSettings


def tiles(head_dim, group_size, seed=0):
    """A K tile [head_dim, group_size] and a V tile [group_size, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(head_dim, group_size, generator=generator)
    values = torch.randn(group_size, head_dim, generator=generator)
    keys[:, 3] *= 12
    values[5] *= 8
    return keys, values


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_pack_low_bits_first(bits):
    codes = torch.randint(0, 2**bits, (3, 4, 16), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed[1].flatten().numpy().tobytes() == pack(codes[1].tolist(), bits)
    assert torch.equal(unpack_codes(packed, bits), codes)


def test_halves_round_to_even():
    rows = torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.0]])
    assert round_to_nearest(rows, 2).codes.tolist() == [[0, 0, 2, 2, 3]]


def test_a_constant_row_decodes_to_itself():
    rows = torch.full((1, 32), 2.5)
    assert torch.equal(round_to_nearest(rows, 2).dequantize(), rows)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (2, 2), (4, 4), (2, 4)])
@pytest.mark.parametrize(("head_dim", "group_size"), [(32, 32), (64, 32), (32, 64)])
def test_record_equals_the_loop_reference(key_bits, value_bits, head_dim, group_size):
    settings = KVarNSettings(key_bits=key_bits, value_bits=value_bits, group_size=group_size)
    keys, values = tiles(head_dim, group_size)
    packed = pack_records(
        quantize_tiles(keys, key_bits, settings),
        quantize_tiles(values, value_bits, settings),
        settings,
    )
    expected = record(keys.tolist(), values.tolist(), key_bits, value_bits, settings.iterations)
    assert packed.shape == (settings.record_bytes(head_dim),)
    own = packed.numpy().tobytes()
    assert len(own) == len(expected)
    code_bytes = head_dim * group_size * key_bits // 8
    same_codes = sum(a == b for a, b in zip(own[:code_bytes], expected[:code_bytes], strict=True))
    assert same_codes >= 0.999 * code_bytes
    restored, _ = unpack_records(packed, head_dim, settings)
    assert torch.allclose(
        restored.dequantize(),
        torch.tensor(decode(*quantize(keys.tolist(), key_bits, settings.iterations))),
        rtol=2e-2,
        atol=2e-2,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_records_round_trip_at_every_width(head_dim, group_size, layout):
    settings = KVarNSettings(group_size=group_size, iterations=2, layout=layout)
    keys, values = (part.expand(2, 3, -1, -1) for part in tiles(head_dim, group_size))
    quantized = quantize_tiles(keys, 4, settings), quantize_tiles(values, 2, settings)
    records = pack_records(*quantized, settings)
    assert records.shape == (2, 3, settings.record_bytes(head_dim))
    for before, after in zip(quantized, unpack_records(records, head_dim, settings), strict=True):
        assert torch.equal(before.rows.codes, after.rows.codes)
        assert after.rows.scale.dtype == after.column_scale.dtype == SCALE_DTYPES[layout]
        assert torch.equal(before.rows.scale.float(), after.rows.scale.float())
        assert torch.equal(before.rows.zero_point, after.rows.zero_point)
        assert torch.equal(before.column_scale.float(), after.column_scale.float())


def test_an_fp8_record_holds_its_parts_in_order():
    settings = KVarNSettings.from_name("k2v2_g32").with_(layout="paper-fp8")
    keys, values = (quantize_tiles(part, 2, settings) for part in tiles(64, 32))
    record = pack_records(keys, values, settings).numpy().tobytes()
    codes, channels, tokens = 64 * 32 // 4, 64, 32
    parts = [
        pack_codes(keys.rows.codes, 2),
        *(keys.rows.scale, keys.rows.zero_point, keys.column_scale),
        pack_codes(values.rows.codes, 2),
        *(values.column_scale, values.rows.scale, values.rows.zero_point),
    ]
    sizes = [codes, channels, 2 * channels, tokens, codes, channels, tokens, 2 * tokens]
    assert len(record) == sum(sizes) == settings.record_bytes(64)
    for part, size in zip(parts, sizes, strict=True):
        assert record[:size] == part.flatten().view(torch.uint8).numpy().tobytes()
        record = record[size:]


@pytest.mark.parametrize("size", [1e-3, 0.03, 1.0, 100.0, 3e3])
def test_fp8_scales_cost_little_at_any_size_of_the_tile(size):
    tile = tiles(64, 128)[0] * size
    errors = [
        (quantize_tiles(tile, 2, KVarNSettings(layout=layout)).dequantize() - tile).norm()
        for layout in ("vllm-fp16", "paper-fp8")
    ]
    assert errors[1] < 1.06 * errors[0]


@pytest.mark.parametrize(
    ("head_dim", "preset", "size_bytes", "bits"),
    [
        (128, "k4v2_g128", 13_824, 3.375),
        (128, "k4v4_g128", 17_920, 4.375),
        (128, "k2v2_g128", 9_728, 2.375),
        (128, "k4v2_g64", 7_296, 3.5625),
        (64, "k4v2_g128", 7_296, 3.5625),
        (256, "k4v2_g128", 26_880, 3.28125),
        (256, "k4v4_g128", 35_072, 4.28125),
    ],
)
def test_record_sizes_are_the_published_ones(head_dim, preset, size_bytes, bits):
    settings = KVarNSettings.from_name(preset)
    assert settings.record_bytes(head_dim) == size_bytes
    assert settings.bits_per_element(head_dim) == pytest.approx(bits)


def test_the_papers_layout_takes_two_and_a_quarter_bits():
    settings = KVarNSettings.from_name("k2v2_g128").with_(layout="paper-fp8")
    assert settings.record_bytes(128) == 9_216
    assert settings.bits_per_element(128) == 2.25
