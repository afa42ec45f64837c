import hashlib
import json
from pathlib import Path

import pytest
from converted_folder import converted_config, write_converted_folder, write_manifest

from kvarn_cli.errors import CheckpointError, HubError, UsageError
from kvarn_cli.hub import plan_push
from kvarn_cli.hub.plan import MAX_FILE_BYTES

SHARD = "model-00002-of-00002.safetensors"


def test_everything_the_manifest_lists_goes_with_the_manifest_and_the_card(folder: Path) -> None:
    plan = plan_push(folder, "alice/tiny")
    paths = [file.path for file in plan.files]
    assert paths == [
        "code/modeling_tiny.py",
        "config.json",
        "model-00001-of-00002.safetensors",
        SHARD,
        "model.safetensors.index.json",
        "tokenizer.json",
        "kvarn_manifest.json",
        "README.md",
    ]
    assert plan.strays == ()
    assert plan.config == converted_config()
    for file in plan.files[:-1]:
        assert file.sha256 == hashlib.sha256((folder / file.path).read_bytes()).hexdigest()
    sizes = [(folder / path).stat().st_size for path in paths[:-1]]
    assert plan.total_bytes == sum(sizes) + len(plan.card.text.encode())


def test_planning_writes_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    plan_push(folder, "alice/tiny")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_progress_counts_the_bytes_that_are_checked(folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    plan_push(folder, "alice/tiny", progress=lambda *call: calls.append(call))
    dones = [done for _, done, _ in calls]
    assert dones == sorted(dones)
    assert dones[-1] == calls[-1][2]


@pytest.mark.parametrize("change", ["flip", "shorten", "remove"])
def test_a_changed_file_is_named(folder: Path, change: str) -> None:
    content = (folder / SHARD).read_bytes()
    if change == "flip":
        (folder / SHARD).write_bytes(content[:-1] + b"\xff")
    elif change == "shorten":
        (folder / SHARD).write_bytes(content[:-1])
    else:
        (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=SHARD) as caught:
        plan_push(folder, "alice/tiny")
    assert caught.value.exit_code == 6


def test_a_half_written_folder_is_refused(tmp_path: Path) -> None:
    folder = write_converted_folder(tmp_path / "model.incomplete")
    with pytest.raises(CheckpointError, match="half-written"):
        plan_push(folder, "alice/tiny")


def test_a_folder_without_manifest_is_refused(folder: Path) -> None:
    (folder / "kvarn_manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"kvarn_manifest\.json is missing"):
        plan_push(folder, "alice/tiny")


@pytest.mark.parametrize("config", [None, {"model_type": "llama"}])
def test_a_folder_that_was_not_converted_is_refused(
    folder: Path, config: dict[str, str] | None
) -> None:
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="not a converted model") as caught:
        plan_push(folder, "alice/tiny")
    assert "kvarn convert" in caught.value.hint


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        plan_push(tmp_path / "nowhere", "alice/tiny")


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b"])
def test_a_manifest_that_leads_out_of_the_folder_is_refused(folder: Path, path: str) -> None:
    manifest = json.loads((folder / "kvarn_manifest.json").read_text())
    manifest["files"][path] = {"size_bytes": 1, "sha256": "0" * 64}
    (folder / "kvarn_manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"kvarn_manifest\.json is broken"):
        plan_push(folder, "alice/tiny")


def test_a_manifest_must_list_the_configuration(folder: Path) -> None:
    write_manifest(folder, {"tokenizer.json": (folder / "tokenizer.json").read_bytes()})
    with pytest.raises(CheckpointError, match=r"does not list config\.json"):
        plan_push(folder, "alice/tiny")


def test_strays_stay_here_and_are_named(folder: Path) -> None:
    strays = {
        ".env": b"HF_TOKEN=hf_secret",
        "config.json~": b"{}",
        "model.safetensors": b"not ours",
        "code/.modeling_tiny.py.swp": b"",
        "code/__pycache__/modeling_tiny.pyc": b"",
        ".git/objects/ab": b"",
        ".git/config": b"",
    }
    for path, content in strays.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    plan = plan_push(folder, "alice/tiny")
    assert set(plan.strays) == {
        ".env",
        "config.json~",
        "model.safetensors",
        "code/.modeling_tiny.py.swp",
        "code/__pycache__/",
        ".git/",
    }
    assert not {file.path for file in plan.files} & set(strays)


def test_a_file_above_the_hubs_limit_is_found_before_anything_is_read(folder: Path) -> None:
    manifest = json.loads((folder / "kvarn_manifest.json").read_text())
    manifest["files"][SHARD]["size_bytes"] = MAX_FILE_BYTES + 1
    (folder / "kvarn_manifest.json").write_text(json.dumps(manifest))
    with (folder / SHARD).open("r+b") as shard:
        shard.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(HubError, match=rf"{SHARD} has 50\.0 GB"):
        plan_push(folder, "alice/tiny", progress=lambda *_: pytest.fail("a file was read"))


def test_the_card_may_be_edited_even_if_the_manifest_lists_it(tmp_path: Path) -> None:
    folder = write_converted_folder(tmp_path / "converted", files={"README.md": b"as converted"})
    (folder / "README.md").write_bytes(b"edited since")
    plan = plan_push(folder, "alice/tiny")
    assert [file.path for file in plan.files].count("README.md") == 1


@pytest.mark.parametrize(
    "repo_id", ["tiny", "alice/tiny/main", "alice/../tiny", "alice/ti ny", "", "alice/tiny.git"]
)
def test_a_bad_repository_name_is_refused(folder: Path, repo_id: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_push(folder, repo_id)
    assert "my-name/my-model" in caught.value.hint
