import json

import pytest
from converted_folder import calibration
from pydantic import ValidationError

from kvarn_cli.errors import CheckpointError
from kvarn_cli.metadata import CacheFormat, KVarNConfig, Manifest, Rotation
from kvarn_cli.settings import KVarNSettings

SETTINGS = KVarNSettings(key_bits=2, iterations=16)


def block():
    rotation = {
        "signs": "+" * 63 + "-",
        "head_dim": 64,
        "where": "fused",
        "apply": [{"targets": ["model.layers.0.self_attn.v_proj"], "location": "weight_output"}],
        "tensors": {
            "model.layers.0.self_attn.v_proj.weight": {"axis": 0, "first_channels": [0, 64]}
        },
    }
    online = rotation | {"where": "online", "signs": None, "tensors": {}}
    return {
        "format_version": 1,
        "kvarn_version": "0.1.0",
        "base_model": {"name": "org/model", "revision": None, "index_sha256": "0" * 64},
        "cache": CacheFormat.from_settings(SETTINGS, 64).model_dump(),
        "layers": {"covered": [0, 1], "left_out": [{"layer": 2, "reason": "sliding window"}]},
        "rotations": {"key": online, "value": rotation},
        "proof": None,
        "calibration": None,
    }


def test_a_block_survives_json():
    config = KVarNConfig.from_config_dict({"kvarn_config": block()})
    assert config is not None
    again = json.loads(config.model_dump_json())
    assert KVarNConfig.from_config_dict({"kvarn_config": again}) == config
    assert config.cache.settings == SETTINGS
    assert config.fused
    (tensor,) = config.rotations.value.tensors.values()
    assert (tensor.axis, tensor.first_channels) == (0, [0, 64])


def test_a_block_from_before_encoders_had_names_means_the_reference():
    older = block()
    del older["cache"]["encoder"]
    assert KVarNConfig.from_config_dict({"kvarn_config": older}).cache.settings == SETTINGS
    refined = SETTINGS.with_(encoder="refined")
    newer = block() | {"cache": CacheFormat.from_settings(refined, 64).model_dump()}
    assert KVarNConfig.from_config_dict({"kvarn_config": newer}).cache.settings == refined


def test_the_layout_decides_the_bytes_of_a_record():
    small = CacheFormat.from_settings(SETTINGS.with_(layout="paper-fp8"), 128)
    large = CacheFormat.from_settings(SETTINGS, 128)
    assert (small.record_bytes, large.record_bytes) == (9_216, 9_728)
    with pytest.raises(ValidationError, match="record_bytes should be"):
        CacheFormat.model_validate(small.model_dump() | {"layout": "vllm-fp16"})


def latent_block():
    """Of a latent cache with a folded norm."""
    given = block()
    settings = KVarNSettings.from_name("mla_k4_g64")
    given["cache"] = CacheFormat.from_settings(settings, 64, 16).model_dump(mode="json")
    given["rotations"]["key"] = None
    (name,) = given["rotations"]["value"]["tensors"]
    given["rotations"]["value"]["folded_norms"] = {"norm.weight": {"into": name, "unit": 1}}
    return given


def test_a_block_of_a_latent_cache_reads_back():
    config = KVarNConfig.from_config_dict({"kvarn_config": latent_block()})
    assert config.cache.settings == KVarNSettings.from_name("mla_k4_g64")
    assert (config.rotated, config.cache.rope_dim) == ("the latent", 16)
    value = config.rotations.value
    assert value.changed_tensors == value.tensors.keys() | {"norm.weight"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cache", "rope_dim"), 8, "record_bytes should be"),
        (("cache", "rope_dim"), None, "record_bytes should be"),
        (("rotations", "key"), block()["rotations"]["key"], "null for a latent cache"),
        (
            ("rotations", "value", "folded_norms", "norm.weight", "into"),
            "x",
            "folded into x, which",
        ),
        (("rotations", "value", "folded_norms", "norm.weight", "unit"), 2, "unit"),
    ],
)
def test_a_broken_block_of_a_latent_cache_is_refused(path, value, message):
    broken = latent_block()
    parent = broken
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        KVarNConfig.from_config_dict({"kvarn_config": broken})


def test_a_config_without_the_block_reads_as_none():
    assert KVarNConfig.from_config_dict({"model_type": "llama"}) is None


@pytest.mark.parametrize("version", [0, 2, "1.0", None])
def test_an_unknown_format_version_is_refused_by_name(version):
    with pytest.raises(CheckpointError, match=f"format_version {version!r} is unknown") as caught:
        KVarNConfig.from_config_dict({"kvarn_config": block() | {"format_version": version}})
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cache", "key_bits"), 3, "key_bits is 3"),
        (("cache", "record_bytes"), 1, "record_bytes should be"),
        (("cache", "dtype"), "kvarn_k4v2_g128", "dtype and record_bytes"),
        (("rotations", "value", "signs"), "+-", "signs has 2 entries"),
        (("rotations", "value", "normalized"), False, "normalized"),
        (("layers", "covered"), "all", "layers.covered"),
        (("surprise",), 1, "surprise"),
        (("cache", "key_bits"), "2", "cache.key_bits"),
        (("cache", "key_bits"), 2.0, "cache.key_bits"),
        (("cache", "sink_tokens"), True, "cache.sink_tokens"),
        (("cache", "std_min"), "0.001", "cache.std_min"),
        (("layers", "covered"), ["0"], "layers.covered.0"),
        (("kvarn_version",), 1, "kvarn_version"),
        (("rotations", "key", "signs"), "+" * 64, "engines apply H itself"),
        (("rotations", "key"), block()["rotations"]["value"], "K cannot be fused"),
        (("rotations", "value", "tensors"), {}, "tensors must be listed where"),
        (("rotations", "value", "where"), "online", "tensors must be listed where"),
        (("rotations", "value", "tensors", "w"), {"axis": 2, "first_channels": []}, "axis"),
        (("rotations", "value", "tensors", "w"), {"axis": 0, "first_channels": [-1]}, "first_ch"),
        (("rotations", "value", "apply", 0, "location"), "output", "location"),
        (("rotations", "value", "apply", 0, "inverse"), "no", "inverse"),
    ],
)
def test_a_broken_block_is_refused_with_its_place(path, value, message):
    broken = block()
    parent = broken
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    with pytest.raises(CheckpointError, match=message) as caught:
        KVarNConfig.from_config_dict({"kvarn_config": broken})
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("not_a_block", [3, "text", [], {}])
def test_something_else_under_the_key_is_refused(not_a_block):
    with pytest.raises(CheckpointError, match="kvarn_config"):
        KVarNConfig.from_config_dict({"kvarn_config": not_a_block})


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a\\b", "./x"])
def test_a_manifest_names_only_files_inside_the_folder(path):
    record = {"size_bytes": 1, "sha256": "0" * 64}
    manifest = {"format_version": 1, "kvarn_version": "0.1.0", "files": {path: record}}
    with pytest.raises(CheckpointError, match="no plain path"):
        Manifest.from_json(json.dumps(manifest))


def test_signs_are_only_plus_and_minus():
    with pytest.raises(ValidationError, match="signs"):
        Rotation(signs="+1", head_dim=2, where="online", apply=[])


@pytest.mark.parametrize("name", ["key", "value"])
def test_a_block_has_one_head_width(name):
    broken = block()
    broken["rotations"][name] |= {"head_dim": 32, "signs": None}
    with pytest.raises(CheckpointError, match=f"{name} has head_dim 32, the cache 64"):
        KVarNConfig.from_config_dict({"kvarn_config": broken})


def test_layers_are_keys_of_json_objects():
    measured = calibration().model_dump(mode="json")
    measured["engines"][0]["attention_mae_by_layer"] = {"0": 0.5, "12": 0.25}
    text = json.dumps({"kvarn_config": block() | {"calibration": measured}})
    config = KVarNConfig.from_config_dict(json.loads(text))
    assert config.calibration.engines[0].attention_mae_by_layer == {0: 0.5, 12: 0.25}
    measured["engines"][0]["attention_mae_by_layer"] = {"last": 0.5}
    with pytest.raises(CheckpointError, match="attention_mae_by_layer"):
        KVarNConfig.from_config_dict({"kvarn_config": block() | {"calibration": measured}})


@pytest.mark.parametrize("size", ["4", 4.0, True])
def test_a_manifest_counts_bytes_in_whole_numbers(size):
    files = {"config.json": {"size_bytes": size, "sha256": "0" * 64}}
    manifest = {"format_version": 1, "kvarn_version": "0.1.0", "files": files}
    with pytest.raises(CheckpointError, match="size_bytes"):
        Manifest.from_json(json.dumps(manifest))
