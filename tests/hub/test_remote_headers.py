import json
from pathlib import Path

import pytest
from fake_hub import READ_TOKEN, FakeHub
from hub_process import Run, run_python
from hub_repository import StoredFile

REPO = "alice/base"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
BIG = 30_000_000


def shard(names: list[str], size: int) -> bytes:
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
        for n, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size * len(names))


def add_model(hub: FakeHub, second: bytes) -> dict[str, bytes]:
    weight_map = {"big": SHARDS[0], "tensor.0": SHARDS[1]}
    files = {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        SHARDS[0]: shard(["big"], BIG),
        SHARDS[1]: second,
    }
    hub.add_repository(REPO, files)
    return files


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_reads_headers_and_little_more(hub: FakeHub, run: Run, ignores_ranges: bool) -> None:
    hub.ignores_ranges = ignores_ranges
    long_header = [f"tensor.{number}" for number in range(2000)]
    files = add_model(hub, shard(long_header, 1000))
    read = run("headers", REPO).data
    assert read["tensors"] == {"big": [BIG], "tensor.0": [1000]}
    assert read["shard_bytes"] == sum(len(files[name]) for name in SHARDS)
    assert read["requests"] == 3
    assert read["received_bytes"] < 600_000
    assert len(hub.asked("GET", "/storage/")) == 3
    assert hub.sent_bytes < BIG / 2


def test_any_revision_and_a_single_file(hub: FakeHub, run: Run) -> None:
    files = {"config.json": b"{}", "model.safetensors": shard(["old"], 3)}
    repository = hub.add_repository(REPO, files)
    repository.branches["v1"] = old = repository.branches["main"]
    new = {"model.safetensors": StoredFile(shard(["new"], 5), is_lfs=True)}
    repository.commit("main", repository.commits[old] | new, "newer")
    assert run("headers", REPO, "--revision", "v1").data["tensors"] == {"old": [3]}
    assert run("headers", REPO).data["tensors"] == {"new": [5]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "claims a header|not found|short"),
        (shard(["tensor.0"], 9)[:-1], "ends at byte"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "claims a header"),
    ],
)
def test_a_broken_file_is_named(hub: FakeHub, run: Run, content: bytes, words: str) -> None:
    add_model(hub, content)
    outcome = run("headers", REPO)
    assert outcome.exit_code == 6
    assert SHARDS[1] in outcome.stderr


def test_refusals_of_the_hub_keep_their_exit_code(hub: FakeHub, run: Run) -> None:
    add_model(hub, shard(["tensor.0"], 9))
    hub.repositories[REPO].gated = True
    assert run("headers", REPO, token=READ_TOKEN).exit_code == 4
    hub.repositories[REPO].gated = False
    hub.fail("GET", "/storage/", 503, times=99)
    outcome = run("headers", REPO)
    assert outcome.exit_code == 4
    assert "run the same command again later" in outcome.stderr


def test_a_busy_hub_is_asked_again(hub: FakeHub, run: Run) -> None:
    add_model(hub, shard(["tensor.0"], 9))
    hub.fail("GET", "/storage/", 429, headers={"Retry-After": "1"})
    assert run("headers", REPO).data["tensors"]["big"] == [BIG]


def test_the_dry_run_of_a_hub_model_downloads_no_weights(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.add_repository(REPO, files)
    weights = [name for name in files if name.endswith(".safetensors")]
    command = ["-m", "kvarn_cli", "convert", REPO, "--dry-run", "--no-validate"]
    outcome = run_python(hub, tmp_path / "home", [*command, "--json"])
    assert outcome.data["header_requests"] == len(weights)
    assert len(hub.asked("GET", "/storage/")) == len(weights)
    assert outcome.data["bytes_read"] > sum(len(files[name]) for name in weights)
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert f"{len(weights)} range requests" in run_python(hub, tmp_path / "home", command).stdout
