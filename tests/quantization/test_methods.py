import pytest
import torch

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.hadamard import fused_rotation, hadamard_matrix, rotate
from kvarn_cli.quantization.methods import KIVI, METHODS, Exact, KVarN, QuaRot, parse_method
from kvarn_cli.settings import KVarNSettings


def states(seed=0):
    """Keys with two heavy channels and values, [1, 2 heads, 256 tokens, 64]."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, 2, 256, 64, generator=generator)
    keys[..., 3] += 15
    keys[..., 40] -= 9
    return keys, values


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("exact", Exact()),
        ("kvarn", KVarN()),
        ("kvarn:k2v2_g64,iterations=16", KVarN(key_bits=2, group_size=64, iterations=16)),
        ("kvarn:kvarn_k4v4_g128", KVarN(value_bits=4)),
        ("quarot:k2v2_g128", QuaRot(key_bits=2)),
        ("kivi:k2v2_g32,sink_tokens=0", KIVI(key_bits=2, group_size=32, sink_tokens=0)),
        ("quarot,key_axis=token", QuaRot(key_axis="token")),
        ("kvarn,value_rotation=fused", KVarN(value_rotation="fused")),
        ("kvarn,std_min=0.5,log_scale_max=2.0", KVarN(std_min=0.5, log_scale_max=2.0)),
        ("kvarn:k2v2_g128,encoder=refined", KVarN(key_bits=2, encoder="refined")),
    ],
)
def test_specs_and_labels(spec, method):
    assert parse_method(spec) == method
    assert parse_method(method.label) == method


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gear", "unknown method 'gear'"),
        ("kvarn:k4v2", "unknown preset 'k4v2'"),
        ("kvarn:k3v2_g128", "key_bits is 3"),
        ("kvarn:k4v2_g100", "group_size is 100"),
        ("kvarn,iterations=many", "whole number"),
        ("kvarn,iterations=-1", "iterations is -1"),
        ("kvarn,std_min=small", "'std_min=small' needs a number"),
        ("kvarn,std_min=nan", "std_min must be above 0"),
        ("kivi,iterations=8", "no option of kivi"),
        ("kvarn,value_rotation=twice", "value_rotation is twice"),
        ("kvarn,encoder=perfect", "encoder is perfect"),
    ],
)
def test_wrong_specs_are_refused(spec, message):
    with pytest.raises(SettingsError, match=message):
        parse_method(spec)


def test_settings_go_in_and_come_out_whole():
    settings = KVarNSettings(
        key_bits=2,
        value_bits=4,
        group_size=32,
        iterations=3,
        log_scale_min=-0.1,
        log_scale_max=2.0,
        std_min=0.5,
        std_max=4.0,
        sink_tokens=16,
    )
    assert KVarN.from_settings(settings).settings == settings
    assert KIVI.from_settings(settings) == KIVI(
        key_bits=2, value_bits=4, group_size=32, sink_tokens=16
    )


def test_clips_matter():
    keys, values = states()
    clipped, plain = (
        parse_method(spec).reconstruct(keys, values) for spec in ("kvarn,std_min=9.0", "kvarn")
    )
    assert not torch.equal(clipped[0], plain[0])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_shapes_and_treats_heads_alone(name):
    method = parse_method(name)
    keys, values = states()
    together = method.reconstruct(keys, values)
    for head in range(2):
        alone = method.reconstruct(keys[:, head : head + 1], values[:, head : head + 1])
        for whole, part in zip(together, alone, strict=True):
            assert whole.shape == keys.shape
            assert torch.allclose(whole[:, head : head + 1], part, atol=1e-5)


def test_exact_changes_nothing():
    keys, values = states()
    assert all(map(torch.equal, Exact().reconstruct(keys, values), (keys, values)))


def test_kivi_equals_a_plain_loop():
    keys, values = states()
    key_states, value_states = KIVI(key_bits=2, value_bits=2).reconstruct(keys, values)

    def rounded(x):
        scale = (x.max() - x.min()) / 3
        return ((x - x.min()) / scale).round() * scale.half().float() + x.min().half().float()

    assert torch.allclose(key_states[0, 1, 128:, 3], rounded(keys[0, 1, 128:, 3]))
    assert torch.allclose(value_states[0, 0, 77], rounded(values[0, 0, 77]))


def test_published_quarot_rounds_each_token_of_the_rotated_states_alone():
    keys, values = states()
    method = QuaRot(key_bits=2, key_axis="token")
    key_states, _ = method.reconstruct(keys, values)
    shuffled = torch.randperm(256)
    again, _ = method.reconstruct(keys[:, :, shuffled], values)
    assert torch.allclose(again, key_states[:, :, shuffled], atol=1e-5)


def test_quarot_is_kivi_in_the_rotated_basis_and_kvarn_without_normalization():
    keys, values = states()
    hadamard = hadamard_matrix(64)
    own = QuaRot(key_bits=2).reconstruct(keys, values)
    rotated = KIVI(key_bits=2).reconstruct(rotate(keys, hadamard), rotate(values, hadamard))
    ablation = KVarN(key_bits=2, iterations=0).reconstruct(keys, values)
    for states_, unrotated, without in zip(own, rotated, ablation, strict=True):
        assert torch.allclose(states_, rotate(unrotated, hadamard), atol=1e-5)
        assert torch.allclose(states_, without, atol=1e-5)


def test_a_fused_model_s_values_are_quantized_as_they_are():
    keys, values = states()
    rotation = fused_rotation(64)
    _, fused = KVarN(value_rotation="fused").reconstruct(keys, rotate(values, rotation))
    _, online = KVarN().reconstruct(keys, values)
    errors = [
        ((states - values).norm() / values.norm()).item()
        for states in (rotate(fused, rotation.T), online)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        (Exact(), 16),
        (KVarN(), 3.5625),
        (KIVI(), 3 + (32 / 128 + 32 / 64) / 2),
        (QuaRot(), 3 + (32 / 128 + 32 / 64) / 2),
        (QuaRot(key_axis="token"), 3 + 32 / 64),
    ],
)
def test_bits_per_element_count_scales_and_zero_points(method, bits):
    assert method.bits_per_element(64) == pytest.approx(bits)
