from pathlib import Path

import pytest
from checkpoint_files import INDEX, SINGLE, write_index

from kvarn_cli.checkpoint.weight_index import read_weight_map, shard_names
from kvarn_cli.errors import CheckpointError


def test_reads_the_map_and_names_each_shard_once(tmp_path: Path) -> None:
    weight_map = {"b": "ö 2.safetensors", "a": "1.safetensors", "c": "ö 2.safetensors"}
    write_index(tmp_path, weight_map)
    assert read_weight_map(tmp_path) == weight_map
    assert shard_names(weight_map) == ["1.safetensors", "ö 2.safetensors"]


def test_without_an_index_there_is_one_file(tmp_path: Path) -> None:
    assert read_weight_map(tmp_path) is None
    assert shard_names(None) == ["model.safetensors"]


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "../../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "./x.safetensors",
        "..\\x.safetensors",
        "x.safetensors/",
        "x\x00.safetensors",
        "x.bin",
        "config.json",
        "..",
        ".",
        "",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_refuses_names_that_could_lead_elsewhere(shard: object, tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "a.safetensors", "hostile": shard})
    with pytest.raises(CheckpointError, match=rf"{INDEX} places tensor 'hostile'"):
        read_weight_map(tmp_path)


def test_refuses_an_index_beside_a_single_file_that_it_does_not_name(tmp_path: Path) -> None:
    (tmp_path / SINGLE).touch()
    write_index(tmp_path, {"a": "1.safetensors"})
    with pytest.raises(CheckpointError, match=f"{INDEX} that names other files than the {SINGLE}"):
        read_weight_map(tmp_path)
    write_index(tmp_path, {"a": SINGLE, "b": "1.safetensors"})
    assert read_weight_map(tmp_path) is not None


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_refuses_an_index_without_tensors(weight_map: object, tmp_path: Path) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="no weight_map with tensors"):
        read_weight_map(tmp_path)


def test_refuses_a_tensor_placed_twice(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(CheckpointError, match="'a' stands twice"):
        read_weight_map(tmp_path)
