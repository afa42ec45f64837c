import pytest
import torch

from kvarn_cli.quantization.latent_codec import LatentCodec
from kvarn_cli.quantization.saturation import saturation_sentence, watch_saturation
from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.settings import ENCODERS, KVarNSettings


def states(size):
    return size * torch.randn(2, 1, 128, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    ("layout", "fits", "too_large"),
    [
        ("vllm-fp16", 6e4, 1e15),
        ("paper-fp8", 2e4, 1e7),
    ],
)
def test_scales_beyond_the_format_are_counted(layout, fits, too_large, encoder):
    codec = TileCodec(KVarNSettings(layout=layout, encoder=encoder), 64, rotate_values=True)
    for size in (fits, too_large):
        with watch_saturation() as saturated:
            decoded = codec.reconstruct(*states(size))
            codec.encode(*states(1.0))
        assert (saturated.count > 0) == (size == too_large)
        assert all(each.isfinite().all() for each in decoded)


def test_one_outlying_token_is_counted():
    codec = TileCodec(KVarNSettings(layout="paper-fp8"), 64, rotate_values=True)
    keys, values = states(1.0)
    keys[:, 5] *= 1e7
    with watch_saturation() as saturated:
        codec.encode(keys, values)
    assert saturated.count > 0


def test_rope_keys_beside_a_latent_are_counted():
    codec = LatentCodec(KVarNSettings.from_name("mla_k4_g128"), 64, 64, rotate_latents=True)
    latents, rope_keys = states(1.0)
    rope_keys[0, 3, :2] = torch.tensor([1e5, -1e5])
    for encode in (codec.encode, codec.reconstruct):
        with watch_saturation() as saturated:
            encode(latents, rope_keys)
        assert saturated.count == 2


def test_nothing_is_counted_outside():
    codec = TileCodec(KVarNSettings(), 64, rotate_values=True)
    with watch_saturation() as saturated:
        pass
    codec.encode(*states(1e15))
    assert saturated.count == 0


def test_the_layers_are_named():
    sentence = saturation_sentence({3: 1200, 5: 1})
    assert sentence.endswith("were clamped: 1,200 of layer 3, 1 of layer 5")
