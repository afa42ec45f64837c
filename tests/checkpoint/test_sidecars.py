import os
from pathlib import Path, PurePosixPath

import pytest

from kvarn_cli.checkpoint.sidecars import LeftOut, find_sidecars
from kvarn_cli.errors import CheckpointError


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_keeps_what_belongs_to_the_model_at_any_depth(tmp_path: Path) -> None:
    names = ("LICENSE", "a/b/tokenizer.model", "custom.py", "my chat template é.jinja", "v.json")
    fill(tmp_path, *names)
    sidecars, left_out = find_sidecars(tmp_path, ["model.safetensors"])
    assert [str(path) for path in sidecars] == sorted(names)
    assert left_out == ()


def test_leaves_out_the_rest_and_says_why(tmp_path: Path) -> None:
    expected = {
        ".cache": "hidden",
        ".env": "hidden",
        "__pycache__": "Python cache",
        "back\\slash.txt": "a name that not every system can hold",
        "code/x.pyc": "Python cache",
        "consolidated.safetensors": "weights that the checkpoint does not name",
        "loop": "a link to a folder",
        "model-q4.gguf": "weights in another format",
        "onnx/model.onnx_data": "weights in another format",
        "original": "the same weights in their publisher's own format",
        "pipe": "no regular file",
        "pytorch_model.bin": "weights in another format",
        "pytorch_model.bin.index.json": "weights in another format",
        "sub/.git": "hidden",
        "sub/model.safetensors": "weights that the checkpoint does not name",
        "training_args.bin": "weights in another format",
    }
    folders = {".cache", "__pycache__", "original", "sub/.git", "loop", "pipe"}
    fill(tmp_path, *(f"{name}/inside.json" for name in folders - {"loop", "pipe"}))
    fill(tmp_path, *(name for name in expected if name not in folders))
    fill(tmp_path, "model.safetensors")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe")
    sidecars, left_out = find_sidecars(tmp_path, ["model.safetensors"])
    assert sidecars == ()
    assert {str(path): reason for path, reason in left_out} == expected
    assert list(left_out) == sorted(left_out)


def test_follows_links_to_files_and_refuses_broken_ones(tmp_path: Path) -> None:
    fill(tmp_path, "models--a--b/blobs/1", "model/config.json")
    (tmp_path / "model/tokenizer.json").symlink_to("../models--a--b/blobs/1")
    assert find_sidecars(tmp_path / "model", [])[0] == (
        PurePosixPath("config.json"),
        PurePosixPath("tokenizer.json"),
    )
    (tmp_path / "models--a--b/blobs/1").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to a missing file"):
        find_sidecars(tmp_path / "model", [])


def test_a_broken_link_to_a_file_of_no_use_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").symlink_to("gone")
    assert find_sidecars(tmp_path, []) == (
        (),
        (LeftOut(PurePosixPath("pytorch_model.bin"), "weights in another format"),),
    )


def test_a_link_out_of_the_model_s_folder_is_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path, "secret", "model/config.json")
    (tmp_path / "model/vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"vocab\.txt is a link that leads out"):
        find_sidecars(tmp_path / "model", [])


def test_links_into_the_folder_and_into_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    fill(tmp_path, "models--a--b/blobs/1", "model/own.json")
    (tmp_path / "model/config.json").symlink_to(tmp_path / "models--a--b/blobs/1")
    (tmp_path / "model/same.json").symlink_to("own.json")
    sidecars, _ = find_sidecars(tmp_path / "model", [])
    assert [path.name for path in sidecars] == ["config.json", "own.json", "same.json"]
