import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.hadamard import fused_rotation, hadamard_matrix, rotate
from kvarn_cli.quantization.methods import (
    FP8,
    KIVI,
    METHODS,
    Q40,
    Q80,
    Ablation,
    Exact,
    KVarN,
    KVQuant,
    QuaRot,
    TurboQuant,
    parse_method,
)
from kvarn_cli.quantization.rounding import round_to_nearest
from kvarn_cli.quantization.variance_normalization import variance_normalize
from kvarn_cli.settings import KVarNSettings


def fitted(method, keys, values):
    return method.fit({0: (keys, values)}).for_layer(0)


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
        ("kvarn,sink_tokens=0,residual_tokens=64", KVarN(sink_tokens=0, residual_tokens=64)),
        ("kvarn,tail=packed", KVarN(tail="packed")),
        (
            "ablation:k2v2_g64,without=token_scales",
            Ablation(key_bits=2, group_size=64, without="token_scales"),
        ),
        ("kvquant:k2v2_g128", KVQuant(key_bits=2)),
        ("turboquant:k4v4_g128", TurboQuant(value_bits=4)),
        ("fp8,scale=amax", FP8(scale="amax")),
        ("q4_0,group_size=32", Q40(group_size=32)),
        ("q8_0", Q80()),
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
        ("kvarn,residual_tokens=-1", "residual_tokens is -1"),
        ("kvarn,tail=gone", "tail is gone"),
        ("ablation,without=codes", "without is codes"),
        ("fp8:k4v2_g128", "fp8 has no presets"),
        ("fp8,key_bits=4", "no option of fp8"),
        ("fp8,scale=none", "scale is none"),
        ("kvquant,fits=1", "no option of kvquant"),
    ],
)
def test_wrong_specs_are_refused(spec, message):
    with pytest.raises(SettingsError, match=message):
        parse_method(spec)


def test_settings_go_in_and_come_out_whole():
    own = KVarNSettings(
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
    assert KVarN.from_settings(own).settings == own
    assert KIVI.from_settings(own) == KIVI(key_bits=2, value_bits=4, group_size=32, sink_tokens=16)


def test_clips_matter():
    keys, values = states()
    clipped, plain = (
        parse_method(spec).reconstruct(keys, values) for spec in ("kvarn,std_min=9.0", "kvarn")
    )
    assert not torch.equal(clipped[0], plain[0])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_shapes_and_treats_heads_alone(name):
    keys, values = states()
    together = fitted(parse_method(name), keys, values).reconstruct(keys, values)
    assert together[0].shape == together[1].shape == keys.shape
    if name == "kvquant":
        return  # its levels are a layer's, its V scales a token's over all heads
    for head in range(2):
        alone = parse_method(name).reconstruct(keys[:, head : head + 1], values[:, head : head + 1])
        for whole, part in zip(together, alone, strict=True):
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


def test_kivi_groups_channels_of_v_when_a_group_is_narrower_than_a_head():
    keys, values = states()
    _, value_states = KIVI(value_bits=2, group_size=32).reconstruct(keys, values)
    _, halves = KIVI(value_bits=2).reconstruct(keys[..., 32:], values[..., 32:])
    assert torch.equal(value_states[..., 32:], halves)


def test_q8_0_and_q4_0_equal_a_plain_loop():
    keys, values = states()
    block = values[0, 1, 70, 32:]
    _, eight = Q80().reconstruct(keys, values)
    scale = block.abs().max() / 127
    assert torch.allclose(eight[0, 1, 70, 32:], (block / scale).round() * scale.half().float())
    _, four = Q40().reconstruct(keys, values)
    scale = max(block.tolist(), key=abs) / -8
    expected = [min(int(x / scale + 8.5), 15) * 1.0 - 8 for x in block.tolist()]
    assert torch.allclose(
        four[0, 1, 70, 32:], torch.tensor(expected) * torch.tensor(scale).half().float()
    )


@pytest.mark.parametrize("method", [Q40(), Q80(), FP8(scale="amax"), TurboQuant()])
def test_zeros_stay_zeros(method):
    zeros = torch.zeros(1, 1, 128, 64)
    for part in method.reconstruct(zeros, zeros):
        assert torch.equal(part, zeros)


def test_fp8_is_a_cast_that_saturates():
    keys, values = states()
    keys[0, 0, 0, 0] = 1e5
    key_states, value_states = FP8().reconstruct(keys, values)
    assert key_states[0, 0, 0, 0] == 448
    assert torch.equal(value_states, values.to(torch.float8_e4m3fn).float())
    scaled, _ = FP8(scale="amax").reconstruct(keys, values)
    assert scaled[0, 0, 0, 0] == pytest.approx(1e5)


def test_turboquant_keeps_the_error_of_lloyd_max_levels_and_the_norm_s_scale():
    """Max (1960): distortion 0.1175 for 2 bits and 0.009497 for 4 bits of unit variance."""
    keys, values = states()
    key_states, value_states = TurboQuant(key_bits=4, value_bits=2).reconstruct(1e3 * keys, values)
    error = (key_states / 1e3 - keys).square().sum() / keys.square().sum()
    assert error == pytest.approx(0.0095, rel=0.05)
    error = (value_states - values).square().sum() / values.square().sum()
    assert error == pytest.approx(0.1175, rel=0.05)


def test_kvquant_keeps_outliers_and_beats_uniform_levels_on_bell_shaped_channels():
    keys, values = states()
    method = fitted(KVQuant(key_bits=2, value_bits=2), keys, values)
    key_states, value_states = method.reconstruct(keys, values)
    for states_, own in ((keys, key_states), (values, value_states)):
        kept = (states_.half().float() == own).float().mean().item()
        assert 0.009 < kept < 0.02
    uniform, _ = KIVI(key_bits=2).reconstruct(keys, values)
    assert (key_states - keys).square().mean() < 0.8 * (uniform - keys).square().mean()


def test_kvquant_unfitted_is_refused():
    with pytest.raises(SettingsError, match="not fitted"):
        KVQuant().reconstruct(*states())


def test_a_fitted_method_shows_a_permuted_head_order():
    keys, values = states()
    keys[:, 1] += 5
    method = fitted(KVQuant(), keys, values)
    own, _ = method.reconstruct(keys, values)
    permuted, _ = method.reconstruct(keys.flip(1), values.flip(1))
    assert (permuted - keys.flip(1)).square().mean() > 5 * (own - keys).square().mean()


def test_ablations_leave_out_what_they_name():
    keys, values = states()
    values[..., ::7, :] *= 6
    results = {
        without: Ablation(key_bits=2, without=without).reconstruct(keys, values)
        for without in ("rotation", "normalization", "token_scales", "channel_scales")
    }
    rotation_only = KVarN(key_bits=2, iterations=0).reconstruct(keys, values)
    for own, expected in zip(results["normalization"], rotation_only, strict=True):
        assert torch.allclose(own, expected, atol=1e-5)
    hadamard = hadamard_matrix(64)
    rotated = [rotate(states_, hadamard) for states_ in (keys, values)]
    unrotated = Ablation(key_bits=2, without="rotation").reconstruct(*rotated)
    whole = KVarN(key_bits=2).reconstruct(keys, values)
    for own, expected in zip(unrotated, whole, strict=True):
        assert torch.allclose(rotate(own, hadamard), expected, atol=1e-4)
    # K's columns are tokens, V's are channels: without their scales only rotation is left.
    assert torch.equal(results["token_scales"][0], results["normalization"][0])
    assert torch.equal(results["channel_scales"][1], results["normalization"][1])
    assert not torch.allclose(results["channel_scales"][0], results["normalization"][0])
    assert not torch.allclose(results["token_scales"][1], results["normalization"][1])


@pytest.mark.parametrize(
    "spec",
    ["kvarn", "quarot", "quarot,key_axis=token", "kivi", "turboquant", "kvquant", "ablation"],
)
def test_more_bits_give_less_error(spec):
    name, *options = spec.split(",")
    errors = []
    for bits in (2, 4):
        keys, values = states()
        method = parse_method(",".join([f"{name}:k{bits}v{bits}_g128", *options]))
        both = fitted(method, keys, values).reconstruct(keys, values)
        errors.append([(a - b).square().mean() for a, b in zip(both, (keys, values), strict=True)])
    assert all(fine < coarse / 5 for coarse, fine in zip(*errors, strict=True))


@pytest.mark.parametrize("iterations", [0, 8])
@given(seed=st.integers(0, 2**32 - 1), key_like=st.booleans())
@settings(max_examples=20, deadline=None)
def test_with_scales_in_full_precision_more_bits_give_less_error_on_random_tiles(
    iterations, seed, key_like
):
    """Balanced and rounded as KVarN does, before scales become float16."""
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randn(64, 128, generator=generator) * torch.rand(64, 1, generator=generator)
    tile = tile if key_like else tile.T.contiguous()
    scales = variance_normalize(tile[None], KVarNSettings(iterations=iterations))
    balanced = tile[None] / scales.row / scales.column
    errors = [
        (round_to_nearest(balanced, bits).dequantize() * scales.row * scales.column - tile)
        .square()
        .mean()
        for bits in (2, 4, 8)
    ]
    assert errors[0] > 10 * errors[1] > 1000 * errors[2]


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
        (KIVI(group_size=32), 3 + 32 / 32),
        (FP8(), 8),
        (Q40(), 4.5),
        (Q80(), 8.5),
        (TurboQuant(), 3 + 16 / 64),
        (KVQuant(), 3 + (0.32 + (2 * 32 + 32) / (2 * 64)) / 2),
        (Ablation(without="rotation"), 3.5625),
        (Ablation(without="normalization"), 3 + (32 / 128 + 32 / 64) / 2),
        (Ablation(without="token_scales"), 3.5625 - 16 / 64 / 2),
        (Ablation(without="channel_scales"), 3.5625 - 16 / 128 / 2),
    ],
)
def test_bits_per_element_count_scales_and_zero_points(method, bits):
    assert method.bits_per_element(64, 2) == pytest.approx(bits)


def test_average_bits_count_sink_tail_padding_and_constants():
    method = KVarN(sink_tokens=20, group_size=32)
    packed = method.bits_per_element(64)
    assert method.average_bits(80, 64) == pytest.approx((32 * packed + 48 * 16) / 80)
    residual = KVarN(sink_tokens=20, group_size=32, residual_tokens=30)
    assert residual.average_bits(80, 64) == 16
    no_window = KVarN(sink_tokens=0, group_size=32, tail="packed")
    assert no_window.average_bits(80, 64) == pytest.approx(96 * packed / 80)
    assert Exact().average_bits(80, 64) == 16
    kvquant = KVQuant(sink_tokens=0)
    expected = kvquant.bits_per_element(64, 2) + (32 / 2) / 1280
    assert kvquant.average_bits(1280, 64, 2) == pytest.approx(expected)
    assert kvquant.average_bits(100, 64, 2) > 16  # nothing packed, ranges stored all the same
