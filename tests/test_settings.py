import pytest

from kvarn_cli.errors import SettingsError, UsageError
from kvarn_cli.settings import KVarNSettings


def test_names_go_both_ways():
    settings = KVarNSettings.from_name("kvarn_k2v4_g64")
    assert (settings.key_bits, settings.value_bits, settings.group_size) == (2, 4, 64)
    assert settings.cache_dtype == "kvarn_k2v4_g64"


def test_names_of_latent_caches_go_both_ways():
    settings = KVarNSettings.from_name("kvarn_mla_k2_g64")
    assert settings.latent
    assert (settings.key_bits, settings.value_bits, settings.group_size) == (2, 16, 64)
    assert settings.iterations == 16
    assert settings.cache_dtype == "kvarn_mla_k2_g64"
    assert not KVarNSettings().latent


@pytest.mark.parametrize("name", ["k4v16_g128", "mla_k5_g128", "mla_k4_g100"])
def test_names_of_records_that_nobody_writes_are_refused(name):
    with pytest.raises(SettingsError, match="must be one of"):
        KVarNSettings.from_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mla_k4v2_g128",
        "mla_k4",
        "k4_g128",
        "k4v2",
        "k4v2_g128 ",
        "K4V2_G128",
        "k4v2_g128_x",
        "v2k4_g128",
        "k٤v2_g128",
        "k" + "4" * 5000 + "v2_g128",
    ],
)
def test_unknown_names_are_refused_with_an_example(name):
    with pytest.raises(SettingsError, match="unknown preset") as caught:
        KVarNSettings.from_name(name)
    assert "k4v2_g128" in caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_bits": 3},
        {"value_bits": 0},
        {"group_size": 100},
        {"iterations": -1},
        {"iterations": 10**9},
        {"sink_tokens": -1},
        {"layout": "other"},
        {"log_scale_min": 11.0},
        {"std_min": 0.0},
    ],
)
def test_values_that_no_record_holds_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        KVarNSettings(**wrong)


@pytest.mark.parametrize(
    ("length", "packed"),
    [(0, 0), (1, 0), (127, 0), (128, 0), (255, 0), (256, 128), (257, 128), (700, 512)],
)
def test_packed_tokens_lie_between_the_sink_and_the_tail(length, packed):
    assert KVarNSettings().packed_tokens(length) == packed


def test_cache_bytes_count_sink_records_and_tail():
    settings = KVarNSettings()
    exact_tokens = 128 + 44
    expected = 2 * settings.record_bytes(64) + exact_tokens * 2 * 64 * 2
    assert settings.cache_bytes(428, 64) == expected


def test_bytes_of_a_latent_cache_count_its_rope_key():
    settings = KVarNSettings.from_name("mla_k4_g128")
    expected = 2 * 51_456 + (128 + 44) * (512 + 64) * 2
    assert settings.cache_bytes(428, 512, 64) == expected
