import hashlib
import json
import shutil

import pytest
from fake_hub import READ_TOKEN, WRITE_TOKEN
from hub_process import run_python
from kvarn_process import assert_plain, assert_refused, error_of

REPO = "alice/tiny-kvarn"


@pytest.fixture
def push(hub, tmp_path):
    def push(folder, *options, **environment):
        arguments = ["-m", "kvarn_cli", "push-to-hub", folder, REPO, *options]
        outcome = run_python(hub, tmp_path / "home", arguments, **environment)
        assert_plain(outcome.stdout + outcome.stderr)
        return outcome

    return push


def test_a_folder_arrives_byte_for_byte(hub, push, converted):
    outcome = push(converted)
    assert outcome.exit_code == 0, outcome.stderr
    assert f"{hub.endpoint}/{REPO} (public), main at " in outcome.stdout
    stored = hub.repositories[REPO].files()
    card = stored.pop("README.md").decode()
    assert "kvarn_k4v4_g32" in card
    assert "license: apache-2.0" in card
    for path in converted.rglob("*"):
        name = path.relative_to(converted).as_posix()
        if path.is_file() and name != "README.md":
            assert stored.pop(name) == path.read_bytes()
    assert stored.keys() == {".gitattributes"}


def test_json_and_private(hub, push, converted):
    result = push(converted, "--private", "--json").data
    assert result["private"] is True
    assert hub.repositories[REPO].private
    assert result["commit"] == hub.repositories[REPO].branches["main"]
    assert "model.safetensors" in result["uploaded"]


def test_a_dry_run_asks_nobody(hub, push, converted):
    text = push(converted, "--dry-run", token=None)
    assert text.exit_code == 0, text.stderr
    assert "model.safetensors" in text.stdout
    assert "library_name: transformers" in text.stdout
    document = push(converted, "--dry-run", "--json", token=None).data
    assert document["repo_id"] == REPO
    manifest = json.loads((converted / "kvarn_manifest.json").read_text())["files"]
    planned = {file["path"]: file["sha256"] for file in document["files"]}
    assert planned.keys() == {*manifest, "kvarn_manifest.json", "README.md"}
    assert all(
        planned[path] == hashlib.sha256((converted / path).read_bytes()).hexdigest()
        for path in manifest
    )
    assert hub.requests == []


def test_a_changed_file_is_not_uploaded(hub, push, converted, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "changed")
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)[0]
        weights.seek(-1, 2)
        weights.write(bytes([last ^ 1]))
    outcome = push(folder, "--json")
    assert outcome.exit_code == 6
    assert "model.safetensors has another hash" in error_of(outcome)["message"]
    assert hub.requests == []


def test_an_original_model_is_not_pushed(hub, push, llama):
    assert_refused(push(llama), 2, "is not a converted model", "hint: convert it first")
    assert hub.requests == []


def test_the_token_is_refused_and_not_shown(hub, push, converted):
    assert_refused(push(converted, token=None), 4, "not logged in", "hf auth login")
    expired = push(converted, "--token", "hf_ExpiredToken00000000000000000000", "--json")
    assert expired.exit_code == 4
    assert "401" in error_of(expired)["message"]
    assert "hf_Expired" not in expired.stdout + expired.stderr
    assert push(converted, token=READ_TOKEN).exit_code == 4
    assert REPO not in hub.repositories
    assert push(converted, "--token", WRITE_TOKEN, token=None).exit_code == 0
