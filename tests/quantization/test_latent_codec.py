import pytest
import torch
from loop_reference import hadamard, half, matmul, pack, quantize

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.latent_codec import LatentCodec
from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.settings import GROUP_SIZES, HEAD_DIMS, LAYOUTS, KVarNSettings


def states(latent_dim=64, rope_dim=16, tokens=256, dtype=torch.float32):
    generator = torch.Generator().manual_seed(latent_dim)
    latents = torch.randn(2, 1, tokens, latent_dim, generator=generator)
    latents[..., 3] *= 6
    latents[:, :, 9] *= 4
    return latents.to(dtype), torch.randn(2, 1, tokens, rope_dim, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("preset", "widths", "size_bytes", "bits"),
    [
        ("mla_k4_g128", (512, 64), 51_456, 5.583),
        ("mla_k2_g128", (512, 64), 35_072, 3.806),
        ("mla_k4_g64", (512, 64), 26_752, 5.806),
        ("mla_k4_g128", (256, 32), 25_856, 5.611),
        ("mla_k4_g128", (512, 0), 35_072, 4.281),
    ],
)
def test_record_sizes(preset, widths, size_bytes, bits):
    settings = KVarNSettings.from_name(preset)
    codec = LatentCodec(settings, *widths, rotate_latents=True)
    assert codec.record_bytes == settings.record_bytes(*widths) == size_bytes
    assert settings.bits_per_element(*widths) == pytest.approx(bits, abs=5e-4)


def test_a_record_is_ks_part_of_a_loop_reference_and_then_the_rope_key():
    settings = KVarNSettings.from_name("mla_k4_g32")
    latents, rope_keys = states(32, 8, tokens=32)
    record = LatentCodec(settings, 32, 8, rotate_latents=True).encode(latents, rope_keys)[0, 0, 0]
    rotated = matmul(latents[0, 0].double().tolist(), hadamard(32))
    tile = [list(channel) for channel in zip(*rotated, strict=True)]
    codes, scale, zero, column = quantize(tile, 4, settings.iterations)
    expected = [pack(codes, 4), half(scale), half(zero), half(column)]
    own = bytes(record.tolist())
    assert len(own) == sum(map(len, expected)) + 2 * 32 * 8
    assert own.endswith(half(rope_keys[0, 0].flatten().tolist()))
    for part in expected[:1]:
        same = sum(a == b for a, b in zip(own, part, strict=False))
        assert same >= 0.995 * len(part)
    start = len(expected[0])
    for part in expected[1:]:
        numbers = [
            torch.frombuffer(bytearray(raw), dtype=torch.float16).float()
            for raw in (own[start : start + len(part)], part)
        ]
        assert torch.allclose(*numbers, rtol=2e-3)
        start += len(part)


@pytest.mark.parametrize("encoder", ["reference", "refined"])
def test_a_latent_is_quantized_as_k_of_the_same_width(encoder):
    latents, rope_keys = states()
    settings = KVarNSettings.from_name("mla_k2_g64").with_(encoder=encoder)
    keys_too = settings.with_(value_bits=2)
    latent_codec = LatentCodec(settings, 64, 16, rotate_latents=True)
    expected, _ = TileCodec(keys_too, 64, rotate_values=True).reconstruct(latents, latents)
    assert torch.equal(latent_codec.reconstruct(latents, rope_keys)[0], expected)


@pytest.mark.parametrize("latent_dim", HEAD_DIMS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reconstruct_is_decode_of_encode_to_the_bit(latent_dim, group_size, layout):
    settings = KVarNSettings(value_bits=16, group_size=group_size, iterations=2, layout=layout)
    codec = LatentCodec(settings, latent_dim, 16, rotate_latents=True)
    latents, rope_keys = states(latent_dim)
    records = codec.encode(latents, rope_keys)
    assert records.shape == (2, 1, 256 // group_size, codec.record_bytes)
    for direct, through_bytes in zip(
        codec.reconstruct(latents, rope_keys), codec.decode(records), strict=True
    ):
        assert torch.equal(direct, through_bytes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotate_latents", [True, False])
def test_the_rope_key_stays_exact_and_the_latent_is_close(dtype, rotate_latents):
    codec = LatentCodec(KVarNSettings(value_bits=16), 64, 16, rotate_latents=rotate_latents)
    latents, rope_keys = states(dtype=dtype)
    decoded, exact = codec.decode(codec.encode(latents, rope_keys))
    assert torch.equal(exact.to(dtype), rope_keys)
    error = (decoded - latents.float()).norm() / latents.float().norm()
    assert error < 0.1


def test_a_model_without_rope_caches_the_latent_alone():
    codec = LatentCodec(KVarNSettings(value_bits=16), 64, 0, rotate_latents=True)
    latents, _ = states()
    decoded, rope_keys = codec.decode(codec.encode(latents, latents[..., :0]))
    assert decoded.shape == latents.shape
    assert rope_keys.shape == (2, 1, 256, 0)


@pytest.mark.parametrize("latent_dim", [48, 384, 1024])
def test_other_latent_widths_are_refused(latent_dim):
    with pytest.raises(SettingsError, match="head_dim"):
        LatentCodec(KVarNSettings(value_bits=16), latent_dim, 16, rotate_latents=True)
