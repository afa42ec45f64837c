import os
import shutil
from pathlib import Path

import pytest
from checkpoint_files import contents, save_checkpoint

from kvarn_cli.checkpoint.output_folder import WorkFolder, check_before_work, check_output
from kvarn_cli.errors import UsageError


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


@pytest.mark.parametrize("left", [(), ("journal.jsonl", "checkpoint/a/model.safetensors")])
def test_what_a_killed_run_left_is_taken_over(left: tuple[str, ...], tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "out")
    assert work.path == tmp_path / "out.incomplete"
    for name in left:
        (work.path / name).parent.mkdir(parents=True, exist_ok=True)
        (work.path / name).touch()
    work.make()
    assert contents(work.path).keys() == set(left)
    work.empty()
    assert contents(work.path).keys() <= {"journal.jsonl"}
    work.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_nobody_left_behind_is_not_touched(kind: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "journal.jsonl").touch()
    stale = tmp_path / "out.incomplete"
    if kind == "folder":
        stale.mkdir()
        (stale / "thesis.tex").touch()
    elif kind == "file":
        stale.touch()
    else:
        stale.symlink_to(mine)
    with pytest.raises(UsageError, match="stands in the way"):
        WorkFolder(tmp_path / "out").make()
    assert (mine / "journal.jsonl").exists()
    assert stale.exists()


@pytest.mark.parametrize("content", [None, "mine"])
def test_an_empty_leftover_beside_a_finished_output_goes(
    content: str | None, model: Path, tmp_path: Path
) -> None:
    output = save_checkpoint(tmp_path / "out")
    (output / "kvarn_manifest.json").touch()
    leftover = tmp_path / "out.incomplete"
    leftover.mkdir()
    if content:
        (leftover / content).touch()
    with pytest.raises(UsageError, match="a converted checkpoint stands there") as refusal:
        check_before_work(model, output, overwrite=False)
    assert "kvarn verify" in str(refusal.value.hint)
    assert leftover.exists() == bool(content)


def work_folder_with(text: str, output: Path) -> WorkFolder:
    work = WorkFolder(output)
    work.make()
    work.checkpoint.mkdir()
    (work.checkpoint / "config.json").write_text(text)
    return work


def test_moves_into_nothing_an_empty_folder_and_over_an_old_one(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for number in range(3):
        if number == 1:
            shutil.rmtree(output)
            output.mkdir()
        work = work_folder_with(str(number), output)
        assert not work.finished
        work.move_into_place()
        assert work.finished
        assert contents(output) == {"config.json": str(number).encode()}
        work.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("old")
    work = WorkFolder(output)
    work.make()
    with pytest.raises(FileNotFoundError):
        work.move_into_place()
    assert contents(output) == {"config.json": b"old"}
    work.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_folder_set_aside_by_a_killed_run_comes_back(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("old")
    work = work_folder_with("new", output)
    output.replace(work.replaced)
    work.empty()
    assert contents(tmp_path) == {"out/config.json": b"old"}
