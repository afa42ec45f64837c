import os
import shutil
from pathlib import Path

import pytest
from checkpoint_files import contents, save_checkpoint

from kvarn_cli.checkpoint.output_folder import (
    check_output,
    make_staging_folder,
    move_into_place,
    staging_folder,
)
from kvarn_cli.errors import KvarnError, UsageError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "models" / "model")


def test_takes_a_new_an_empty_and_a_linked_folder(model: Path, tmp_path: Path) -> None:
    new = tmp_path / "not yet" / "there" / "an output, naïve"
    assert check_output(model, new, overwrite=False) == new
    assert not new.parent.parent.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert check_output(model, empty, overwrite=False) == empty
    (tmp_path / "link").symlink_to(empty)
    assert check_output(model, tmp_path / "link", overwrite=False) == empty
    assert check_output(model, model.with_name("model-kvarn"), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("output", [".", "new", "tokenizer", "..", "../..", "/"])
def test_refuses_the_models_own_folder_and_all_in_and_above_it(
    output: str, overwrite: bool, model: Path
) -> None:
    with pytest.raises(UsageError, match="lie in one another"):
        check_output(model, model / output, overwrite=overwrite)


def test_looks_through_links_for_the_models_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    for source, output in [(tmp_path / "link", model), (model, tmp_path / "link" / "new")]:
        with pytest.raises(UsageError, match="lie in one another"):
            check_output(source, output, overwrite=True)


def test_the_folder_of_work_is_never_the_models(model: Path) -> None:
    source = model.rename(model.with_name("out.incomplete"))
    with pytest.raises(UsageError, match="lie in one another"):
        check_output(source, model.with_name("out"), overwrite=True)


def test_refuses_a_file_and_a_path_through_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output, words in [("file", "is a file"), ("file/out", "file is a file")]:
        with pytest.raises(UsageError, match=words):
            check_output(model, tmp_path / output, overwrite=True)


def test_refuses_a_name_that_is_too_long(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name too long"):
        check_output(model, tmp_path / ("x" * 300), overwrite=False)


def test_refuses_a_parent_without_the_right_to_write(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UsageError, match="not writable"):
        check_output(model, tmp_path / "out", overwrite=False)


def test_refuses_the_current_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "sub")
    for output in (".", "..", tmp_path / "out"):
        with pytest.raises(UsageError, match="current folder"):
            check_output(model, Path(output), overwrite=True)


def test_only_a_checkpoint_is_overwritten_and_only_when_told(model: Path, tmp_path: Path) -> None:
    output = save_checkpoint(tmp_path / "out")
    with pytest.raises(UsageError, match="is not empty") as refusal:
        check_output(model, output, overwrite=False)
    assert "--overwrite" in refusal.value.hint
    assert check_output(model, output, overwrite=True) == output
    for weights in output.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UsageError, match="holds no checkpoint"):
        check_output(model, output, overwrite=True)
    home = tmp_path / "home"
    shutil.copytree(model, home)
    (home / "config.json").unlink()
    with pytest.raises(UsageError, match="holds no checkpoint"):
        check_output(model, home, overwrite=True)


@pytest.mark.parametrize("left", [(), ("config.json", "sub/model.safetensors")])
def test_what_a_killed_run_left_is_replaced(left: tuple[str, ...], tmp_path: Path) -> None:
    stale = tmp_path / "out.incomplete"
    stale.mkdir()
    for name in left:
        (stale / name).parent.mkdir(exist_ok=True)
        (stale / name).touch()
    assert make_staging_folder(tmp_path / "out") == stale == staging_folder(tmp_path / "out")
    assert contents(stale) == {}


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_nobody_left_behind_is_not_removed(kind: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").touch()
    stale = tmp_path / "out.incomplete"
    if kind == "folder":
        stale.mkdir()
        (stale / "thesis.tex").touch()
    elif kind == "file":
        stale.touch()
    else:
        stale.symlink_to(mine)
    with pytest.raises(UsageError, match="stands in the way"):
        make_staging_folder(tmp_path / "out")
    assert (mine / "config.json").exists()
    assert stale.exists()


def test_moves_into_nothing_an_empty_folder_and_over_an_old_one(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for number in range(3):
        if number == 1:
            shutil.rmtree(output)
            output.mkdir()
        staging = make_staging_folder(output)
        (staging / "config.json").write_text(str(number))
        move_into_place(staging, output)
        assert contents(tmp_path) == {"out/config.json": str(number).encode()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    with pytest.raises(FileNotFoundError):
        move_into_place(tmp_path / "no such folder", tmp_path / "out")
    assert contents(tmp_path) == {"out/config.json": b"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_says_where_an_old_folder_is_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", path)

    save_checkpoint(tmp_path / "out")
    staging = make_staging_folder(tmp_path / "out")
    (staging / "config.json").write_text("new")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(KvarnError, match="is written, but") as told:
        move_into_place(staging, tmp_path / "out")
    monkeypatch.undo()
    assert contents(tmp_path / "out") == {"config.json": b"new"}
    (shelter,) = tmp_path.glob("out.replaced-*")
    assert str(shelter) in told.value.hint
