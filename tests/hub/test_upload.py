import json
import socket
from pathlib import Path

import pytest
from converted_folder import safetensors_bytes, write_converted_folder
from fake_hub import READ_TOKEN, WRITE_TOKEN, FakeHub
from hub_process import Run

from kvarn_cli.hub.card import MARKER

REPO = "alice/tiny"
SHARD = "model-00002-of-00002.safetensors"
SCHEDULE = [1, 2, 4, 8, 8]


def local_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "README.md"
    }


def uploads(hub: FakeHub) -> int:
    return len(hub.asked("PUT", "/storage/"))


def commits(hub: FakeHub) -> list[str]:
    return hub.repositories[REPO].messages[1:]


def assert_whole(hub: FakeHub, folder: Path, branch: str = "main") -> None:
    """Every file arrived byte for byte, and nothing else did."""
    stored = hub.repositories[REPO].files(branch)
    assert MARKER.encode() in stored.pop("README.md")
    stored.pop(".gitattributes")
    assert stored == local_files(folder)


def test_a_push_creates_the_repository_and_uploads_every_byte(
    hub: FakeHub, folder: Path, run: Run
) -> None:
    (folder / ".env").write_text("SECRET=1")
    outcome = run("push", folder, REPO)
    (folder / ".env").unlink()
    assert_whole(hub, folder)
    result = outcome.data["result"]
    repository = hub.repositories[REPO]
    assert result["url"] == f"{hub.endpoint}/{REPO}"
    assert result["commit"] == repository.branches["main"]
    assert result["private"] is False
    assert len(result["uploaded"]) == 8
    assert result["unchanged"] == []
    assert result["others"] == [".gitattributes"]
    assert commits(hub) == ["Upload org/Tiny-1B for kvarn_k4v2_g128"]
    assert repository.commits[result["commit"]][SHARD].is_lfs
    assert not repository.commits[result["commit"]]["config.json"].is_lfs


def test_the_token_goes_to_the_hub_and_to_nobody_else(
    hub: FakeHub, folder: Path, tmp_path: Path, run: Run
) -> None:
    assert run("push", folder, REPO, "--token", WRITE_TOKEN, token=None).exit_code == 0
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(WRITE_TOKEN.encode() in content for content in kept)
    assert {request.token for request in hub.asked("PUT", "/storage/")} == {None}
    assert {request.token for request in hub.asked("POST", "/commit/")} == {WRITE_TOKEN}


def test_a_second_push_sends_nothing(hub: FakeHub, folder: Path, run: Run) -> None:
    run("push", folder, REPO)
    sent = uploads(hub)
    result = run("push", folder, REPO).data["result"]
    assert result["uploaded"] == []
    assert len(result["unchanged"]) == 8
    assert result["commit"] == hub.repositories[REPO].branches["main"]
    assert uploads(hub) == sent
    assert len(commits(hub)) == 1


def test_a_changed_conversion_sends_only_what_changed(hub: FakeHub, folder: Path, run: Run) -> None:
    run("push", folder, REPO)
    write_converted_folder(folder, weights=b"\x05\x06\x07\x08" * 256)
    result = run("push", folder, REPO, "--commit-message", "Other weights").data["result"]
    assert result["uploaded"] == [SHARD, "kvarn_manifest.json"]
    assert_whole(hub, folder)
    assert commits(hub)[1] == "Other weights"


def test_a_listing_in_pages_is_read_to_its_end(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.page_size = 2
    run("push", folder, REPO)
    assert run("push", folder, REPO).data["result"]["uploaded"] == []


def test_large_files_go_one_by_one_and_in_parts(hub: FakeHub, tmp_path: Path, run: Run) -> None:
    folder = write_converted_folder(tmp_path / "large", weights=bytes(range(250)) * 50_000)
    hub.part_bytes = 5_000_000
    notes = run("push", folder, REPO).data["notes"]
    assert_whole(hub, folder)
    assert notes[0] == f"uploading {SHARD} (13 MB), 1 of 1"
    assert len(hub.asked("PUT", "/storage/")) == 3 + 1


def test_private_means_private(hub: FakeHub, folder: Path, run: Run) -> None:
    assert run("push", folder, REPO, "--private").data["result"]["private"] is True
    assert hub.repositories[REPO].private
    assert run("push", folder, REPO).data["result"]["private"] is True


def test_private_does_not_publish_to_a_public_repository(
    hub: FakeHub, folder: Path, run: Run
) -> None:
    hub.add_repository(REPO)
    outcome = run("push", folder, REPO, "--private")
    assert outcome.exit_code == 2
    assert "exists already and is public" in outcome.stderr
    assert commits(hub) == []
    assert uploads(hub) == 0


def test_a_branch_is_made_once_and_main_is_left_alone(hub: FakeHub, folder: Path, run: Run) -> None:
    for _ in range(2):
        result = run("push", folder, REPO, "--revision", "k4v2/first").data["result"]
    assert result["revision"] == "k4v2/first"
    assert_whole(hub, folder, "k4v2/first")
    assert list(hub.repositories[REPO].files("main")) == [".gitattributes"]
    assert len(commits(hub)) == 1


def test_a_repository_left_by_a_failed_run_is_used(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.fail("POST", "/preupload/", 403, message="not yet")
    assert run("push", folder, REPO).exit_code == 4
    assert commits(hub) == []
    assert run("push", folder, REPO).exit_code == 0
    assert_whole(hub, folder)


def test_files_sent_before_a_failed_commit_are_not_sent_again(
    hub: FakeHub, folder: Path, run: Run
) -> None:
    hub.fail("POST", "/commit/", 403, message="storage is full")
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert "storage is full" in outcome.stderr
    sent = uploads(hub)
    assert run("push", folder, REPO).exit_code == 0
    assert uploads(hub) == sent == 2
    assert_whole(hub, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_of_another_model_are_not_joined(
    hub: FakeHub, tmp_path: Path, run: Run, name: str
) -> None:
    folder = write_converted_folder(tmp_path / "converted")
    if name.endswith(".json"):
        manifest = json.loads((folder / "kvarn_manifest.json").read_text())
        del manifest["files"][name]
        (folder / "kvarn_manifest.json").write_text(json.dumps(manifest))
    hub.add_repository(REPO, {name: safetensors_bytes("other", b"1")})
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 2
    assert f"{REPO} holds {name}, which is not this model's" in outcome.stderr
    assert commits(hub) == ["files"]


def test_other_files_of_the_repository_stay_and_are_named(
    hub: FakeHub, folder: Path, run: Run
) -> None:
    hub.add_repository(REPO, {"notes.txt": b"mine", "README.md": b"an older card"})
    result = run("push", folder, REPO).data["result"]
    assert result["others"] == [".gitattributes", "notes.txt"]
    assert hub.repositories[REPO].files()["notes.txt"] == b"mine"


def test_a_file_the_repository_ignores_is_reported(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.add_repository(REPO, {".gitignore": b"tokenizer.json\n"})
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert "does not hold tokenizer.json after the commit" in outcome.stderr
    assert ".gitignore" in outcome.stderr


def test_a_card_the_hub_refuses_is_found_before_anything_is_made(
    hub: FakeHub, folder: Path, run: Run
) -> None:
    (folder / "README.md").write_text(f"---\nlicense:\n- mit\n- other\n---\n{MARKER}\nMine.\n")
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert "must be a string" in outcome.stderr
    assert hub.repositories == {}
    assert [request.path for request in hub.requests] == ["/api/validate-yaml"]


def test_what_the_hub_remarks_about_the_card_is_told(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.card_warnings = ["license is missing"]
    assert any("license is missing" in note for note in run("push", folder, REPO).data["notes"])


def test_the_stored_login_is_used(hub: FakeHub, folder: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(WRITE_TOKEN)
    assert run("push", folder, REPO, token=None).exit_code == 0
    assert_whole(hub, folder)


def test_the_given_token_goes_before_the_login(hub: FakeHub, folder: Path, run: Run) -> None:
    assert run("push", folder, REPO, "--token", WRITE_TOKEN, token=READ_TOKEN).exit_code == 0


def test_without_a_login_nothing_is_asked(hub: FakeHub, folder: Path, run: Run) -> None:
    outcome = run("push", folder, REPO, token=None)
    assert outcome.exit_code == 4
    assert "hf auth login" in outcome.stderr
    assert hub.requests == []


def test_an_unknown_token_is_told_how_to_log_in(hub: FakeHub, folder: Path, run: Run) -> None:
    outcome = run("push", folder, REPO, token="hf_ExpiredToken00000000000000000000")
    assert outcome.exit_code == 4
    assert "status 401" in outcome.stderr
    assert "hf auth login" in outcome.stderr
    assert "waits: []" in outcome.stderr


@pytest.mark.parametrize("token", ["hf_with\nnewline0000000000", "hf_mit_Ü_0000000000000000"])
def test_a_garbled_token_is_not_shown(hub: FakeHub, folder: Path, run: Run, token: str) -> None:
    outcome = run("push", folder, REPO, "--token", token, token=None)
    assert outcome.exit_code == 2
    assert "characters that no token has" in outcome.stderr
    assert "newline" not in outcome.stderr
    assert "mit_" not in outcome.stderr
    assert hub.requests == []


def test_debug_output_shows_no_token(folder: Path, run: Run) -> None:
    outcome = run("push", folder, REPO, HF_DEBUG="1", HF_HUB_VERBOSITY="debug")
    assert outcome.exit_code == 0
    assert "/api/repos/create" in outcome.stderr


def test_no_right_to_write_stops_at_once(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.add_repository(REPO)
    outcome = run("push", folder, REPO, token=READ_TOKEN)
    assert outcome.exit_code == 4
    assert "You don't have the rights to write to alice" in outcome.stderr
    assert "waits: []" in outcome.stderr
    assert len(hub.asked("POST", "/preupload/")) == 1


def test_no_right_to_create_stops_at_once(hub: FakeHub, folder: Path, run: Run) -> None:
    outcome = run("push", folder, REPO, token=READ_TOKEN)
    assert outcome.exit_code == 4
    assert "status 403" in outcome.stderr
    assert len(hub.asked("POST", "/create")) == 1


def test_a_refused_upload_shows_no_signed_address(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.fail("PUT", "/storage/", 400, message="The content does not match its checksum")
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert "does not match its checksum" in outcome.stderr
    assert "Signature" not in outcome.stderr


def test_a_file_the_storage_refuses_is_told(hub: FakeHub, folder: Path, run: Run) -> None:
    refused = {"oid": "0" * 64, "size": 1, "error": {"code": 403, "message": "over the quota"}}
    hub.fail("POST", "/batch", 200, message=json.dumps({"objects": [refused]}).encode())
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert "over the quota" in outcome.stderr


@pytest.mark.parametrize("path", ["/objects/batch", "/preupload/"])
def test_full_storage_stops_at_once(hub: FakeHub, folder: Path, run: Run, path: str) -> None:
    hub.fail("POST", path, 403, times=9, message="Private storage limit reached")
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert "Private storage limit reached" in outcome.stderr
    assert len(hub.asked("POST", path)) == 1
    assert "waits: []" in outcome.stderr


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/validate-yaml"),
        ("POST", "/api/repos/create"),
        ("GET", r"/api/models/alice/tiny$"),
        ("POST", "/branch/"),
        ("GET", "/tree/"),
        ("POST", "/preupload/"),
        ("POST", "/objects/batch"),
        ("PUT", "/storage/"),
        ("POST", "/verify"),
        ("POST", "/commit/"),
    ],
)
def test_a_busy_hub_is_waited_for(
    hub: FakeHub, folder: Path, run: Run, method: str, path: str
) -> None:
    hub.fail(method, path, 503)
    outcome = run("push", folder, REPO, "--revision", "dev")
    assert outcome.data["waits"] == [1]
    assert "503" in outcome.stderr
    assert_whole(hub, folder, "dev")
    assert len(commits(hub)) == 1


def test_a_proxys_page_instead_of_json_is_waited_out(hub: FakeHub, folder: Path, run: Run) -> None:
    run("push", folder, REPO)
    write_converted_folder(folder, weights=b"\x00\x01" * 100)
    hub.fail("POST", "/commit/", 502, message=b"<html>Bad gateway</html>")
    assert run("push", folder, REPO).data["waits"] == [1]
    assert_whole(hub, folder)


@pytest.mark.parametrize(
    ("headers", "wait"),
    [({"Retry-After": "7"}, 7), ({"RateLimit": '"api";r=0;t=55'}, 56), ({}, 1)],
)
def test_a_rate_limit_says_how_long_to_wait(
    hub: FakeHub, folder: Path, run: Run, headers: dict[str, str], wait: int
) -> None:
    hub.fail("POST", "/api/repos/create", 429, headers=headers)
    outcome = run("push", folder, REPO)
    assert outcome.data["waits"] == [wait]
    assert f"the Hub answers with status 429; trying again in {wait} s" in outcome.stderr


def test_a_rate_limit_of_a_day_is_not_waited_for(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.fail("POST", "/api/repos/create", 429, headers={"Retry-After": "86400"})
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert "waits: []" in outcome.stderr
    assert "run the same command again" in outcome.stderr


@pytest.mark.parametrize("path", ["/api/repos/create", "/commit/"])
def test_waiting_has_an_end(hub: FakeHub, folder: Path, run: Run, path: str) -> None:
    hub.fail("POST", path, 503, times=99)
    outcome = run("push", folder, REPO)
    assert outcome.exit_code == 4
    assert f"waits: {SCHEDULE}" in outcome.stderr
    assert "run the same command again later" in outcome.stderr
    assert len(hub.asked("POST", path)) == len(SCHEDULE) + 1


@pytest.mark.parametrize("status", [503, None])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(
    hub: FakeHub, folder: Path, run: Run, status: int | None
) -> None:
    hub.fail("POST", "/commit/", status, after=True)
    result = run("push", folder, REPO).data["result"]
    assert len(commits(hub)) == 1
    assert result["commit"] == hub.repositories[REPO].branches["main"]
    assert_whole(hub, folder)


def test_a_broken_upload_is_repeated_from_its_start(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.fail("PUT", "/storage/", None, times=2)
    assert run("push", folder, REPO).exit_code == 0
    assert_whole(hub, folder)


def test_a_network_that_goes_away_midway_is_continued(hub: FakeHub, folder: Path, run: Run) -> None:
    hub.fail("PUT", "/storage/", None, times=99)
    outcome = run("push", folder, REPO)
    hub.recover()
    assert outcome.exit_code == 4
    assert "the same command continues where it stopped" in outcome.stderr
    assert "Signature" not in outcome.stderr.partition("error:")[2]
    assert commits(hub) == []
    assert run("push", folder, REPO).exit_code == 0
    assert_whole(hub, folder)


def test_no_network_at_all(hub: FakeHub, folder: Path, run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcome = run("push", folder, REPO, HF_ENDPOINT=nowhere)
    assert outcome.exit_code == 4
    assert "check the network; the same command continues" in outcome.stderr
    assert run("push", folder, REPO).exit_code == 0
    assert_whole(hub, folder)


def test_offline_mode_is_named(hub: FakeHub, folder: Path, run: Run) -> None:
    outcome = run("push", folder, REPO, HF_HUB_OFFLINE="1")
    assert outcome.exit_code == 4
    assert "HF_HUB_OFFLINE" in outcome.stderr
    assert hub.requests == []
