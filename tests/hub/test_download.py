import socket
from pathlib import Path

import pytest
from converted_folder import safetensors_bytes
from fake_hub import READ_TOKEN, WRITE_TOKEN, FakeHub
from hub_process import Run

REPO = "alice/base"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": safetensors_bytes("weight", bytes(range(256)) * 64),
    "tokenizer/merges.txt": "a b\né\r\n".encode(),
    "LICENSE": b"",
}


def read_all(folder: str) -> dict[str, bytes]:
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_model_arrives_byte_for_byte(hub: FakeHub, tmp_path: Path, run: Run) -> None:
    repository = hub.add_repository(REPO, FILES)
    source = run("source", REPO, "--cache-dir", tmp_path / "cache").data
    assert source["name"] == REPO
    assert source["revision"] == repository.branches["main"]
    assert Path(source["folder"]).is_relative_to(tmp_path / "cache")
    arrived = read_all(source["folder"])
    arrived.pop(".gitattributes")
    assert arrived == FILES
    assert {request.token for request in hub.asked("GET", "/storage/")} == {None}


@pytest.mark.parametrize("by_hash", [False, True])
def test_a_revision_is_a_branch_or_a_commit(hub: FakeHub, run: Run, by_hash: bool) -> None:
    repository = hub.add_repository(REPO, FILES)
    old = repository.branches["main"]
    newer = repository.commits[old] | {"LICENSE": repository.commits[old]["config.json"]}
    repository.commit("main", newer, "newer")
    repository.branches["old"] = old
    source = run("source", REPO, "--revision", old if by_hash else "old").data
    assert source["revision"] == old
    assert read_all(source["folder"])["LICENSE"] == b""


def test_a_second_run_needs_no_second_download(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES)
    first = run("source", REPO).data
    fetched = len(hub.asked("GET", "/storage/"))
    assert run("source", REPO).data == first
    assert len(hub.asked("GET", "/storage/")) == fetched == 1


def test_a_private_model_needs_the_right_token(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES, private=True)
    for token in (None, READ_TOKEN):
        outcome = run("source", REPO, token=token)
        assert outcome.exit_code == 4
        assert "it does not exist, or is private" in outcome.stderr
        assert "hf auth login" in outcome.stderr
    assert run("source", REPO, "--token", WRITE_TOKEN, token=None).data["name"] == REPO


def test_an_unknown_token_is_told_how_to_log_in(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES)
    outcome = run("source", REPO, token="hf_ExpiredToken00000000000000000000")
    assert outcome.exit_code == 4
    assert "hf auth login" in outcome.stderr


def test_a_gated_model_says_so(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES).gated = True
    outcome = run("source", REPO, token=READ_TOKEN)
    assert outcome.exit_code == 4
    assert "access to it is gated" in outcome.stderr


def test_what_is_not_there_is_named(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES)
    missing = run("source", "alice/missing")
    assert missing.exit_code == 4
    assert "cannot download alice/missing: it does not exist" in missing.stderr
    revision = run("source", REPO, "--revision", "nowhere")
    assert revision.exit_code == 4
    assert "no such revision" in revision.stderr


def test_a_rate_limit_is_waited_for(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES)
    hub.fail("GET", "/storage/", 429, headers={"Retry-After": "3"})
    outcome = run("source", REPO)
    assert "Waiting 4.0s before retry" in outcome.stderr
    assert read_all(outcome.data["folder"])["model.safetensors"] == FILES["model.safetensors"]


def test_after_a_server_error_the_same_command_goes_on(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES)
    hub.fail("GET", "/storage/", 503, times=99)
    outcome = run("source", REPO)
    assert outcome.exit_code == 4
    assert "run the same command again later" in outcome.stderr
    hub.recover()
    arrived = read_all(run("source", REPO).data["folder"])
    assert arrived["model.safetensors"] == FILES["model.safetensors"]
    assert len(hub.asked("GET", "/resolve/.*config.json")) == 1


def test_no_network_at_all(hub: FakeHub, run: Run) -> None:
    hub.add_repository(REPO, FILES)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcome = run("source", REPO, HF_ENDPOINT=nowhere)
    assert outcome.exit_code == 4
    assert "check the network" in outcome.stderr
    assert run("source", REPO).exit_code == 0


def test_a_pushed_model_comes_back_whole(hub: FakeHub, folder: Path, run: Run) -> None:
    run("push", folder, "alice/tiny", "--private")
    arrived = read_all(run("source", "alice/tiny").data["folder"])
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert arrived[path.relative_to(folder).as_posix()] == path.read_bytes()
