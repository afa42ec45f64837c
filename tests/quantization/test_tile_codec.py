import pytest
import torch

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.settings import ENCODERS, HEAD_DIMS, LAYOUTS, KVarNSettings


def states(head_dim, tokens=256, dtype=torch.float32):
    generator = torch.Generator().manual_seed(head_dim)
    shape = (2, 3, tokens, head_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def relative_error(approximation, exact):
    return ((approximation - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotate_values", [True, False])
def test_decode_undoes_encode_up_to_the_codes(dtype, rotate_values):
    codec = TileCodec(KVarNSettings(key_bits=4, value_bits=4), 64, rotate_values=rotate_values)
    keys, values = states(64, dtype=dtype)
    records = codec.encode(keys, values)
    assert records.shape == (2, 3, 2, codec.settings.record_bytes(64))
    assert records.dtype == torch.uint8
    for decoded, exact in zip(codec.decode(records), (keys, values), strict=True):
        assert decoded.dtype == torch.float32
        assert relative_error(decoded, exact.float()) < 0.12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_reconstruct_is_decode_of_encode_to_the_bit(head_dim, layout):
    codec = TileCodec(KVarNSettings(group_size=64, layout=layout), head_dim, rotate_values=True)
    keys, values = states(head_dim)
    for direct, through_bytes in zip(
        codec.reconstruct(keys, values), codec.decode(codec.encode(keys, values)), strict=True
    ):
        assert torch.equal(direct, through_bytes)


def test_more_bits_give_less_error():
    keys, values = states(64)
    errors = []
    for bits in (2, 4):
        codec = TileCodec(KVarNSettings(key_bits=bits, value_bits=bits), 64, rotate_values=True)
        errors.append(
            [
                relative_error(*pair)
                for pair in zip(codec.reconstruct(keys, values), (keys, values), strict=True)
            ]
        )
    assert all(four < two / 3 for two, four in zip(*errors, strict=True))


def test_a_token_with_a_large_norm_does_not_spoil_its_tile():
    keys, values = states(64, tokens=128)
    plain = TileCodec(KVarNSettings(iterations=0), 64, rotate_values=True)
    normalized = TileCodec(KVarNSettings(iterations=8), 64, rotate_values=True)
    keys[:, :, 9] *= 20
    others = torch.arange(128) != 9

    def error_of_the_others(codec):
        return relative_error(codec.reconstruct(keys, values)[0][:, :, others], keys[:, :, others])

    assert error_of_the_others(normalized) < error_of_the_others(plain) / 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("magnitude", [1e-4, 6e4])
def test_extreme_tiles_decode_to_finite_states(magnitude, encoder, layout):
    keys, values = states(64, tokens=128)
    keys[0, 0, :, 5] = 0
    values[0, 1] = 1
    values[1, 1, 7] = 0
    codec = TileCodec(KVarNSettings(encoder=encoder, layout=layout), 64, rotate_values=True)
    exact = [states * magnitude for states in (keys, values)]
    for decoded, given in zip(codec.reconstruct(*exact), exact, strict=True):
        assert relative_error(decoded, given) < (0.5 if layout == "vllm-fp16" else 1)


@pytest.mark.parametrize("head_dim", [80, 96, 112, 120, 1024])
def test_other_head_widths_are_refused(head_dim):
    with pytest.raises(SettingsError, match="head_dim"):
        TileCodec(KVarNSettings(), head_dim, rotate_values=True)
