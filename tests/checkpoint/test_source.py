import traceback
from pathlib import Path
from typing import Any

import httpx2
import pytest
from checkpoint_files import FIRST, INDEX, SECOND, write_index
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from kvarn_cli.checkpoint import source
from kvarn_cli.checkpoint.source import Source, fetch_weights, resolve_source
from kvarn_cli.errors import CheckpointError, HubError, UsageError

COMMIT = "0123456789abcdef" * 2 + "01234567"
SECRET = "hf_" + "Secret" * 6


class Hub:
    """Stands for `snapshot_download`, with its file filter and its check of names."""

    def __init__(self, snapshot: Path, *files: str) -> None:
        self.snapshot = snapshot
        self.files = files
        self.calls: list[dict[str, Any]] = []
        self.fetched: list[str] = []

    def __call__(self, model: str, **arguments: Any) -> str:
        validate_repo_id(model)
        self.calls.append(arguments)
        patterns = {key: arguments.get(key) for key in ("allow_patterns", "ignore_patterns")}
        self.fetched += filter_repo_objects(self.files, **patterns)
        return str(self.snapshot)

    def has(self, model: str, name: str, **arguments: Any) -> bool:
        """Stands for `file_exists`."""
        self.calls.append(arguments)
        return name in self.files


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "models--org--name" / "snapshots" / COMMIT
    path.mkdir(parents=True)
    return path


def test_an_existing_folder_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("org/name") == Source(Path("org/name"), "name", None)
    assert resolve_source("./org/") == Source(Path("org"), "org", None)
    monkeypatch.chdir(tmp_path / "org" / "name")
    assert resolve_source(".").name == "name"
    assert resolve_source("..").name == "org"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source("~/org") == Source(tmp_path / "org", "org", None)


def test_a_link_keeps_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "latest model").symlink_to(tmp_path / "v1")
    assert resolve_source(str(tmp_path / "latest model")).name == "latest model"


def test_a_snapshot_folder_tells_its_id_and_commit(snapshot: Path, tmp_path: Path) -> None:
    assert resolve_source(str(snapshot)) == Source(snapshot, "org/name", COMMIT)
    (tmp_path / "link").symlink_to(snapshot)
    assert resolve_source(str(tmp_path / "link")).revision == COMMIT
    (tmp_path / "snapshots" / COMMIT).mkdir(parents=True)
    assert resolve_source(str(tmp_path / "snapshots" / COMMIT)).revision == COMMIT
    (snapshot / "sub").mkdir()
    assert resolve_source(str(snapshot / "sub")) == Source(snapshot / "sub", "sub", None)


@pytest.mark.parametrize("model", ["./gone", "/gone/model", "~/gone", "../gone", "~nobody-here/x"])
def test_a_path_that_does_not_exist_is_no_hub_id(model: str) -> None:
    with pytest.raises(UsageError, match=r"gone|nobody-here"):
        resolve_source(model)


@pytest.mark.parametrize("model", ["", "a/b/c", "models\\mine", "name with spaces", "org/--"])
def test_refuses_what_can_be_neither(model: str) -> None:
    with pytest.raises(UsageError, match="neither an existing folder nor a Hub id") as refusal:
        resolve_source(model)
    assert isinstance(refusal.value.__cause__, HFValidationError)


def test_refuses_a_file_and_a_revision_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match="is a file"):
        resolve_source(str(tmp_path / "model.gguf"))
    with pytest.raises(UsageError, match="has no revisions"):
        resolve_source(str(tmp_path), revision="main")


def test_downloads_only_the_weights_that_the_index_names(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["config.json", INDEX, "tokenizer.json", "custom.py"]
    unused = [
        "consolidated.safetensors",
        "onnx/model.onnx",
        "original/params.json",
        "pytorch_model.bin",
    ]
    hub = Hub(snapshot, *small, *unused, FIRST, SECOND)
    monkeypatch.setattr(source, "snapshot_download", hub)
    monkeypatch.setattr(source, "file_exists", hub.has)
    write_index(snapshot, {"a": FIRST, "b": SECOND})
    found = resolve_source("org/name", revision="main", token=SECRET, cache_dir=tmp_path)
    assert found == Source(snapshot, "org/name", COMMIT, from_hub=True)
    assert hub.fetched == [*small, FIRST, SECOND]
    assert [call["revision"] for call in hub.calls] == ["main", COMMIT, COMMIT]
    assert all(call["token"] == SECRET for call in hub.calls)
    assert [call.get("cache_dir") for call in hub.calls] == [tmp_path, None, tmp_path]


def test_refuses_a_single_file_on_the_hub_that_the_index_does_not_name(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(snapshot, "config.json", INDEX, FIRST, "model.safetensors")
    monkeypatch.setattr(source, "snapshot_download", hub)
    monkeypatch.setattr(source, "file_exists", hub.has)
    write_index(snapshot, {"a": FIRST})
    with pytest.raises(
        CheckpointError, match="org/name on the Hub has a .* names other"
    ) as refused:
        resolve_source("org/name", weights=False)
    assert "hf download org/name --exclude model.safetensors" in str(refused.value.hint)
    assert hub.fetched == ["config.json", INDEX]


def test_a_hub_that_cannot_be_asked_leaves_it_to_the_cache(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*names: str, **arguments: Any) -> bool:
        raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")

    monkeypatch.setattr(source, "snapshot_download", Hub(snapshot, FIRST))
    monkeypatch.setattr(source, "file_exists", offline)
    write_index(snapshot, {"a": FIRST})
    assert resolve_source("org/name").folder == snapshot
    (snapshot / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="names other files"):
        resolve_source("org/name")


def test_downloads_a_single_file(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(snapshot, "config.json", "model.safetensors", "model.fp16.safetensors")
    monkeypatch.setattr(source, "snapshot_download", hub)
    assert resolve_source("name").folder == snapshot
    assert hub.fetched == ["config.json", "model.safetensors"]


def test_the_small_files_can_be_looked_at_before_the_weights_come(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(snapshot, "config.json", "model.safetensors")
    monkeypatch.setattr(source, "snapshot_download", hub)
    found = resolve_source("org/name", token=SECRET, weights=False)
    assert hub.fetched == ["config.json"]
    assert SECRET not in repr(found)
    fetch_weights(found, token=SECRET)
    assert hub.fetched == ["config.json", "model.safetensors"]


def test_a_local_folder_has_its_weights_or_has_none(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(snapshot, "model.safetensors")
    monkeypatch.setattr(source, "snapshot_download", hub)
    fetch_weights(resolve_source(str(snapshot)))
    assert hub.calls == []


def test_a_hostile_index_is_refused_before_any_weights_come(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(snapshot, INDEX, FIRST)
    monkeypatch.setattr(source, "snapshot_download", hub)
    write_index(snapshot, {"a": "../../x.safetensors"})
    with pytest.raises(CheckpointError):
        resolve_source("org/name")
    assert hub.fetched == [INDEX]


@pytest.mark.parametrize("token", [f"{SECRET}é", f"{SECRET}\n{SECRET}", "two words"])
def test_a_garbled_token_is_refused_unseen(token: str) -> None:
    with pytest.raises(UsageError, match="the token has characters") as refusal:
        resolve_source("org/name", token=token)
    assert SECRET not in str(refusal.value) + refusal.value.hint


@pytest.mark.parametrize(("given", "used"), [(f" {SECRET}\n", SECRET), (" ", None), ("", None)])
def test_space_around_a_token_is_no_part_of_it(
    given: str, used: str | None, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(snapshot)
    monkeypatch.setattr(source, "snapshot_download", hub)
    resolve_source("org/name", token=given)
    assert [call["token"] for call in hub.calls] == [used, used]


def test_a_failing_hub_never_shows_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **_: Any) -> str:
        raise httpx2.ConnectError(f"cannot connect with {SECRET}")

    monkeypatch.setattr(source, "snapshot_download", fail)
    with pytest.raises(HubError, match="cannot download org/name") as refusal:
        resolve_source("org/name", token=SECRET)
    assert SECRET not in "".join(traceback.format_exception(refusal.value))
