"""The real command, interrupted, killed, and on a full disk."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import contents
from small_disk import fill, small_disk
from tiny_models import build_tiny_checkpoint

KVARN = [sys.executable, "-m", "kvarn_cli"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return build_tiny_checkpoint(folder, "qwen3", dtype=torch.bfloat16, num_layers=12, sharded=True)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("reference") / "out"
    assert run(convert(model, output)).returncode == 0
    return contents(output)


def convert(model: Path, output: Path, *options: str) -> list[str]:
    return [*KVARN, "convert", str(model), "--output", str(output), "--no-validate", *options]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )


@contextlib.contextmanager
def started(command: list[str], ready: Callable[[], bool]) -> Iterator["subprocess.Popen[str]"]:
    """A process that has come as far as `ready`."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not ready() and process.poll() is None:
            time.sleep(0.0005)
        yield process


def unfinished(output: Path) -> Path:
    return output.with_name(f"{output.name}.incomplete")


def journal_holds(output: Path, word: str) -> Callable[[], bool]:
    def ready() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return word in (unfinished(output) / "journal.jsonl").read_text()
        return False

    return ready


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_an_interrupt_ends_cleanly_and_is_continued(
    number: signal.Signals,
    code: int,
    model: Path,
    reference: dict[str, bytes],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    with started(convert(model, output, "--json"), journal_holds(output, "proof")) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert json.loads(out)["error"]["exit_code"] == code
    assert not output.exists()
    assert run(convert(model, output)).returncode == 0
    assert contents(output) == reference
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_kills_at_random_moments_are_continued(
    model: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    moments = random.Random(0)
    for attempt in range(4):
        output = tmp_path / f"out {attempt}"
        word = ("plan", "proof", "model-00003", "commit")[attempt]
        with started(convert(model, output), journal_holds(output, word)) as process:
            time.sleep(moments.random() / 100)
            process.kill()
            process.communicate(timeout=60)
        if output.exists():
            assert contents(output) == reference
        done = run(convert(model, output))
        assert done.returncode == 0 or "not empty" in done.stderr, done.stderr
        assert contents(output) == reference
        assert not output.with_name(f"{output.name}.incomplete").exists()


def test_two_conversions_to_one_output(
    model: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with started(convert(model, output), journal_holds(output, "plan")) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            second = run(convert(model, output, "--overwrite"))
        finally:
            process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
    assert second.returncode == 2
    assert "another conversion is writing" in second.stderr
    assert process.returncode == 0
    assert contents(output) == reference


def test_a_full_disk_has_its_own_exit_code(
    model: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    """On a tmpfs that fills up while it is written, or with a limit on the size of files."""
    disk = tmp_path / "disk"
    output = disk / "out"
    with small_disk(disk, 4 * sum(map(len, reference.values()))) as mounted:
        full = fill_up_meanwhile(model, output) if mounted else run_with_limit(model, output)
        assert full.returncode == 7, full.stderr
        assert json.loads(full.stdout)["error"]["needed_bytes"] > 0
        assert "missing" in full.stderr
        assert "it continues" in full.stderr
        assert not output.exists()
        assert unfinished(output).exists()
        assert run(convert(model, output)).returncode == 0
        assert contents(output) == reference
        assert [path.name for path in disk.iterdir()] == ["out"]


def fill_up_meanwhile(model: Path, output: Path) -> "subprocess.CompletedProcess[str]":
    """Fill the disk when everything is checked and only the writing is left."""
    command, ballast = convert(model, output, "--json"), output.with_name("ballast")
    with started(command, journal_holds(output, "proof")) as process:
        process.send_signal(signal.SIGSTOP)
        fill(ballast)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=60)
    ballast.unlink()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_with_limit(model: Path, output: Path) -> "subprocess.CompletedProcess[str]":
    largest = max(path.stat().st_size for path in model.glob("*.safetensors"))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, resource.RLIM_INFINITY))

    return run(convert(model, output, "--json"), preexec_fn=limit)


def test_verify_tells_sound_from_damaged(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(convert(model, output))
    sound = run([*KVARN, "verify", str(output), "--against", str(model), "--json"])
    assert sound.returncode == 0, sound.stderr
    document = json.loads(sound.stdout)
    assert document["sound"]
    assert [check["name"] for check in document["checks"]][-2:] == ["rotation", "other tensors"]
    shard = next(output.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7e")
    damaged = run([*KVARN, "verify", str(output), "--json"])
    assert damaged.returncode == 6
    assert shard.name in json.loads(damaged.stdout)["error"]["problems"][0]
    assert "Traceback" not in damaged.stderr


def test_a_dry_run_shows_the_plan_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = [*KVARN, "convert", str(model), "--output", str(output), "--dry-run"]
    document = json.loads(run([*command, "--json", "--dtype", "float16"]).stdout)
    size = sum(path.stat().st_size for path in model.iterdir())
    assert document["bytes_read"] == size
    assert abs(document["bytes_written"] - size) < 10_000
    assert document["seconds_at_that_speed"] > 0
    assert len(document["tensors_rotated"]) == 24
    assert len(document["tensors_cast"]) + 24 == 12 * 11 + 3
    assert document["cache_bytes_per_token"] == {"packed": 12 * 2 * 4032 / 128, "float16": 3072}
    assert document["cache_bytes"].keys() == {"32768", "131072"}
    assert document["backends"][0]["command"].startswith(f"kvarn generate {output}")
    assert list(tmp_path.iterdir()) == []
