import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import (
    FIRST,
    INDEX,
    SECOND,
    SIDECARS,
    SINGLE,
    save_checkpoint,
    tensors,
    two_shards,
    write_index,
)
from safetensors.numpy import load_file, save_file

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.errors import CheckpointError, UnsupportedModelError


def test_opens_shards_and_reads_every_tensor(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "a model, naïve")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {"model_type": "tiny", "limits": [0.0, math.inf]}
    assert list(checkpoint.shards) == [FIRST, SECOND]
    assert checkpoint.weight_map == {
        name: shard for shard, content in two_shards().items() for name in content
    }
    for shard in (FIRST, SECOND):
        for name, array in load_file(folder / shard).items():
            info = checkpoint.info(name)
            data = np.frombuffer(checkpoint.read(name), array.dtype).reshape(info.shape)
            np.testing.assert_array_equal(data, array)
    assert checkpoint.shard_bytes == sum((folder / s).stat().st_size for s in (FIRST, SECOND))
    assert checkpoint.index_sha256 == hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
    assert {str(path) for path in checkpoint.sidecars} == {"config.json", INDEX, *SIDECARS}
    assert checkpoint.left_out == ()


def test_opens_a_single_file_without_index(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", {SINGLE: tensors("x", "y")})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weight_map == {"x": SINGLE, "y": SINGLE}
    content = (folder / SINGLE).read_bytes()
    header_text = content[8 : 8 + int.from_bytes(content[:8], "little")]
    assert checkpoint.index_sha256 == hashlib.sha256(header_text).hexdigest()


def test_tensors_that_the_index_does_not_name_stay_in_their_shard(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", {FIRST: tensors("x", "mtp.head")})
    write_index(folder, {"x": FIRST})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weight_map == {"x": FIRST}
    assert "mtp.head" in checkpoint.shards[FIRST].tensors


def test_takes_what_the_index_names_beside_a_consolidated_file(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    save_file(tensors("embed", "a.v_proj"), folder / "consolidated.safetensors")
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.shards) == [FIRST, SECOND]
    assert [str(path) for path, _ in checkpoint.left_out] == ["consolidated.safetensors"]


@pytest.mark.parametrize("content", [None, "", "{", "[]", '"x"', "{}{}"])
def test_refuses_a_missing_or_broken_config(content: str | None, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_refuses_a_missing_shard(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"names {SECOND}, which is missing \(1 of 2"):
        open_checkpoint(folder)


def test_refuses_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    write_index(folder, {"embed": FIRST, "norm": FIRST, "b.v_proj": SECOND})
    with pytest.raises(CheckpointError, match=rf"'norm' in {FIRST}, which does not hold it"):
        open_checkpoint(folder)


def test_refuses_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = {FIRST: tensors("x", "shared"), SECOND: tensors("shared", "y")}
    folder = save_checkpoint(tmp_path / "model", shards)
    with pytest.raises(CheckpointError, match=rf"'shared' stands both in {FIRST} and in {SECOND}"):
        open_checkpoint(folder)


def test_refuses_a_broken_shard_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{SECOND}.* ends at byte"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "tf_model.h5"])
def test_refuses_other_formats_and_says_how_to_convert(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", {SINGLE: tensors("x")})
    (folder / SINGLE).rename(folder / name)
    with pytest.raises(UnsupportedModelError, match=f"only {name}") as refusal:
        open_checkpoint(folder)
    assert "save_pretrained" in refusal.value.hint


def test_refuses_a_folder_without_any_weights(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", {SINGLE: tensors("x")})
    (folder / SINGLE).unlink()
    with pytest.raises(UnsupportedModelError, match=rf"holds no {SINGLE}"):
        open_checkpoint(folder)


def test_refuses_shards_whose_index_is_missing(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST}, but neither"):
        open_checkpoint(folder)


def test_a_shard_cut_short_after_opening_is_noticed(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", {SINGLE: tensors("x")})
    checkpoint = open_checkpoint(folder)
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short while in use, at tensor 'x'"):
        checkpoint.read("x")
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.read("x")
