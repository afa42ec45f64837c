import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from checkpoint_files import FIRST, INDEX, SECOND, SINGLE, contents, save_checkpoint, tensors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvarn_cli.checkpoint import writer as writer_module
from kvarn_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from kvarn_cli.checkpoint.output_folder import WorkFolder
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.shard_stream import ShardPlan, WrittenShard
from kvarn_cli.checkpoint.tensor_changes import Patch
from kvarn_cli.checkpoint.writer import CheckpointWriter
from kvarn_cli.errors import (
    CheckpointError,
    DiskFullError,
    KvarnError,
    UnsupportedModelError,
    UsageError,
)


def negate(data: bytearray, info: TensorInfo) -> bytes:
    assert info.dtype == "F16"
    return (-np.frombuffer(data, np.float16)).tobytes()


PATCHES = {"embed": Patch(negate), "b.v_proj": Patch(negate)}


def open_writer(checkpoint: Checkpoint, output: Path, **options: Any) -> CheckpointWriter:
    return CheckpointWriter(
        checkpoint, output, **({"patches": {}, "plan": {"preset": 1}} | options)
    )


def write(checkpoint: Checkpoint, output: Path, patches: Mapping[str, Patch] = {}) -> None:
    with open_writer(checkpoint, output, patches=patches) as writer:
        writer.copy()
        writer.commit()


def unfinished(output: Path) -> Path:
    return output.with_name(f"{output.name}.incomplete")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(save_checkpoint(tmp_path / "a model, naïve"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results" / "ein Ausgang, größer"


def test_everything_unpatched_is_byte_identical(checkpoint: Checkpoint, output: Path) -> None:
    before = contents(checkpoint.folder)
    write(checkpoint, output, PATCHES)
    expected = dict(before)
    for name, shard in (("embed", FIRST), ("b.v_proj", SECOND)):
        info = checkpoint.info(name)
        content = bytearray(before[shard])
        content[info.start : info.end] = negate(content[info.start : info.end], info)
        expected[shard] = bytes(content)
    assert contents(output) == expected
    assert contents(checkpoint.folder) == before
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_the_formats_own_library_reads_the_result(checkpoint: Checkpoint, output: Path) -> None:
    write(checkpoint, output, PATCHES)
    for shard in (FIRST, SECOND):
        old, new = load_file(checkpoint.folder / shard), load_file(output / shard)
        assert list(new) == list(old)
        for name, array in old.items():
            sign = -1 if name in PATCHES else 1
            np.testing.assert_array_equal(new[name], sign * array)


def test_without_patches_the_copy_is_exact(checkpoint: Checkpoint, output: Path) -> None:
    write(checkpoint, output)
    assert contents(output) == contents(checkpoint.folder)


@pytest.mark.parametrize("metadata", [{}, {"note": "ü"}])
def test_a_shard_without_format_gets_one(
    metadata: dict[str, str], tmp_path: Path, output: Path
) -> None:
    written = tensors("z", "embed", "a", "b")
    folder = save_checkpoint(tmp_path / "model", {SINGLE: written}, metadata)
    source = open_checkpoint(folder)
    write(source, output, {"z": Patch(negate)})
    result = open_checkpoint(output)
    assert result.shards[SINGLE].metadata == {**metadata, "format": "pt"}
    assert list(result.weight_map) == list(source.weight_map)
    for name in written:
        old, new = source.info(name), result.info(name)
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        changed = name == "z"
        assert result.read(name) == (
            negate(source.read(name), old) if changed else source.read(name)
        )
    with safe_open(output / SINGLE, "np") as control:
        assert control.metadata()["format"] == "pt"
        np.testing.assert_array_equal(control.get_tensor("z"), -written["z"])


def test_records_every_file_as_it_lies_on_disk(checkpoint: Checkpoint, output: Path) -> None:
    with open_writer(checkpoint, output, patches=PATCHES) as writer:
        writer.copy(without={"config.json"})
        writer.add_file("config.json", b'{"new": true}')
        writer.commit()
    written = contents(output)
    assert written["config.json"] == b'{"new": true}'
    assert writer.files.keys() == written.keys()
    for name, content in written.items():
        record = writer.files[name]
        assert record.size_bytes == len(content)
        if name in checkpoint.shards:
            assert record.xxh3_128 == xxhash.xxh3_128(content).hexdigest()
        else:
            assert record.sha256 == hashlib.sha256(content).hexdigest()
    result = open_checkpoint(output)
    assert writer.tensors == {
        name: hashlib.sha256(result.read(name)).hexdigest() for name in PATCHES
    }


def test_reports_progress_up_to_the_shards_bytes(checkpoint: Checkpoint, output: Path) -> None:
    seen: list[int] = []
    with open_writer(checkpoint, output, progress=seen.append) as writer:
        writer.copy()
    assert seen == sorted(seen)
    assert seen[-1] == checkpoint.shard_bytes


def test_what_is_left_out_is_not_copied(tmp_path: Path, output: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    save_file(tensors("embed"), folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").touch()
    (folder / "loop").symlink_to(folder)
    write(open_checkpoint(folder), output)
    assert sorted(path.name for path in output.glob("*.safetensors")) == [FIRST, SECOND]
    assert not {"pytorch_model.bin", ".git", "loop"} & {path.name for path in output.iterdir()}


def test_a_hub_snapshot_is_copied_and_its_cache_untouched(tmp_path: Path, output: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / ("0123456789" * 4)
    (cache / "blobs").mkdir(parents=True)
    for name, content in contents(model).items():
        blob = cache / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    blobs = contents(cache / "blobs")
    for folder in (cache / "blobs", snapshot):
        folder.chmod(0o555)
    with open_writer(open_checkpoint(snapshot), output, patches=PATCHES) as writer:
        writer.copy()
        writer.add_file("config.json", b"{}")
        writer.commit()
    assert contents(cache / "blobs") == blobs
    assert not any(path.is_symlink() for path in output.rglob("*"))
    assert contents(output).keys() == contents(model).keys()
    assert contents(output)[FIRST] != contents(model)[FIRST]
    assert contents(output)[INDEX] == contents(model)[INDEX]


class BoomError(Exception):
    pass


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt, MemoryError])
def test_after_an_accident_the_next_run_goes_on(
    error: type[BaseException], checkpoint: Checkpoint, output: Path
) -> None:
    finished: list[str] = []

    def fail(data: bytearray, info: TensorInfo) -> bytes:
        while FIRST not in writer.files:
            time.sleep(0.001)
        raise error

    with (
        pytest.raises(error),
        open_writer(checkpoint, output, patches=PATCHES | {"b.v_proj": Patch(fail)}) as writer,
    ):
        writer.copy()
    assert not output.exists()
    before = (unfinished(output) / "checkpoint" / FIRST).stat()
    with open_writer(checkpoint, output, patches=PATCHES) as writer:
        finished += writer.files
        writer.copy()
        writer.commit()
    assert FIRST in finished
    assert SECOND not in finished
    assert (output / FIRST).stat().st_ino == before.st_ino
    assert (output / FIRST).stat().st_mtime_ns == before.st_mtime_ns
    other = output.with_name("other")
    write(checkpoint, other, PATCHES)
    assert contents(output) == contents(other)
    assert not unfinished(output).exists()


@pytest.mark.parametrize("error", [CheckpointError, UnsupportedModelError])
def test_a_refusal_leaves_nothing(
    error: type[KvarnError], checkpoint: Checkpoint, output: Path, tmp_path: Path
) -> None:
    def refuse(data: bytearray, info: TensorInfo) -> bytes:
        raise error("no")

    before = contents(tmp_path)
    with (
        pytest.raises(error),
        open_writer(checkpoint, output, patches=PATCHES | {"embed": Patch(refuse)}) as writer,
    ):
        writer.copy()
    assert contents(tmp_path) == before
    assert not output.parent.exists()


def test_leaving_without_commit_leaves_nothing(checkpoint: Checkpoint, output: Path) -> None:
    output.parent.mkdir()
    with open_writer(checkpoint, output) as writer:
        writer.copy()
        assert not output.exists()
        assert open_checkpoint(writer.folder).weight_map == checkpoint.weight_map
    assert list(output.parent.iterdir()) == []


def leave_unfinished(checkpoint: Checkpoint, output: Path, **options: Any) -> None:
    with (
        contextlib.suppress(BoomError),
        open_writer(checkpoint, output, patches=PATCHES, **options) as writer,
    ):
        writer.copy()
        raise BoomError


@pytest.mark.parametrize("change", ["plan", "shard", "sidecar"])
def test_another_plan_or_source_starts_over_only_when_told(
    change: str, checkpoint: Checkpoint, output: Path
) -> None:
    leave_unfinished(checkpoint, output)
    plan = {"preset": 2} if change == "plan" else {"preset": 1}
    if change != "plan":
        path = checkpoint.folder / (SECOND if change == "shard" else "LICENSE")
        path.write_bytes(path.read_bytes().replace(b"Apache", b"apache"))
        os.utime(path, ns=(0, 12345))
    with (
        pytest.raises(UsageError, match="preset" if change == "plan" else "source") as told,
        open_writer(checkpoint, output, patches=PATCHES, plan=plan),
    ):
        pass
    assert "--overwrite" in told.value.hint
    assert (unfinished(output) / "checkpoint" / FIRST).exists()
    with open_writer(checkpoint, output, patches=PATCHES, plan=plan, overwrite=True) as writer:
        assert writer.files == {}
        writer.copy()
        writer.commit()
    assert contents(output)["LICENSE"] == contents(checkpoint.folder)["LICENSE"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "link"])
def test_a_finished_file_that_changed_since_is_written_again(
    damage: str, checkpoint: Checkpoint, output: Path, tmp_path: Path
) -> None:
    leave_unfinished(checkpoint, output)
    path = unfinished(output) / "checkpoint" / FIRST
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    (path.parent / "stray").touch()
    write(checkpoint, output, PATCHES)
    assert contents(output)[FIRST] == content
    assert not (output / FIRST).is_symlink()
    assert not (output / "stray").exists()


def test_notes_are_kept_for_the_next_run(checkpoint: Checkpoint, output: Path) -> None:
    with (
        contextlib.suppress(BoomError),
        open_writer(checkpoint, output) as writer,
    ):
        writer.note("proof", {"change": 0.5})
        raise BoomError
    with open_writer(checkpoint, output) as writer:
        assert writer.notes == {"proof": {"change": 0.5}}


def test_a_second_run_is_refused_while_the_first_lives(
    checkpoint: Checkpoint, output: Path
) -> None:
    with open_writer(checkpoint, output, patches=PATCHES) as writer:
        writer.copy()
        with (
            pytest.raises(UsageError, match="another conversion is writing"),
            open_writer(checkpoint, output, overwrite=True),
        ):
            pass
        writer.commit()
    assert contents(output).keys() == contents(checkpoint.folder).keys()


def test_what_is_too_large_for_the_disk_is_not_started(
    checkpoint: Checkpoint, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(checkpoint.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(DiskFullError) as told, open_writer(checkpoint, output):
        pass
    assert told.value.exit_code == 7
    missing = told.value.details["missing_bytes"]
    assert missing == told.value.details["needed_bytes"] - 1000
    assert f"{missing:,} bytes" in str(told.value)
    assert not output.parent.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_becomes_full_is_told_and_continued_later(
    number: int, checkpoint: Checkpoint, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard = writer_module.write_shard

    def no_space(source: Any, target: Any, plan: ShardPlan, *rest: Any) -> WrittenShard:
        if "b.v_proj" in plan.tensors:
            while FIRST not in writer.files:
                time.sleep(0.001)
            raise OSError(number, os.strerror(number))
        return write_shard(source, target, plan, *rest)

    monkeypatch.setattr(writer_module, "write_shard", no_space)
    with (
        pytest.raises(DiskFullError, match="are missing") as told,
        open_writer(checkpoint, output, patches=PATCHES) as writer,
    ):
        writer.copy()
    assert "continues" in told.value.hint
    assert (unfinished(output) / "checkpoint" / FIRST).exists()
    assert not (unfinished(output) / "checkpoint" / SECOND).exists()
    needed = told.value.details["needed_bytes"]
    assert isinstance(needed, int)
    assert (checkpoint.folder / SECOND).stat().st_size <= needed < 2**21
    monkeypatch.undo()
    write(checkpoint, output, PATCHES)
    assert not unfinished(output).exists()


def test_a_run_that_ends_meanwhile_may_take_the_folder_along(
    checkpoint: Checkpoint, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, endings = WorkFolder.make, [True, False]

    def make_then_lose(folder: WorkFolder) -> None:
        make(folder)
        if endings.pop(0):
            folder.path.rmdir()

    monkeypatch.setattr(WorkFolder, "make", make_then_lose)
    write(checkpoint, output, PATCHES)
    assert not endings
    assert not unfinished(output).exists()


def test_an_old_output_stands_until_the_new_one_is_whole(
    checkpoint: Checkpoint, output: Path
) -> None:
    save_checkpoint(output, {SINGLE: tensors("old")})
    old = contents(output)
    with pytest.raises(UsageError, match="not empty"), open_writer(checkpoint, output):
        pass
    leave_unfinished(checkpoint, output, overwrite=True)
    assert contents(output) == old
    with open_writer(checkpoint, output, patches=PATCHES, overwrite=True) as writer:
        assert FIRST in writer.files
        writer.copy()
        assert contents(output) == old
        writer.commit()
    assert contents(output).keys() == contents(checkpoint.folder).keys()
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_what_appears_at_the_output_meanwhile_is_kept(checkpoint: Checkpoint, output: Path) -> None:
    with (
        pytest.raises(UsageError, match="not empty"),
        open_writer(checkpoint, output) as writer,
    ):
        writer.copy()
        output.mkdir()
        (output / "thesis.tex").write_text("mine")
        writer.commit()
    assert contents(output) == {"thesis.tex": b"mine"}
    shutil.rmtree(output)
    with open_writer(checkpoint, output) as writer:
        assert FIRST in writer.files
        writer.copy()
        writer.commit()


def test_a_link_planted_at_a_files_name_is_not_written_through(
    checkpoint: Checkpoint, output: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with open_writer(checkpoint, output) as writer:
        for name in (SECOND, "config.json", "LICENSE"):
            (writer.folder / name).symlink_to(victim)
        writer.copy(without={"config.json"})
        writer.add_file("config.json", b"{}")
        writer.commit()
    assert victim.read_text() == "mine"
    assert not any(path.is_symlink() for path in output.iterdir())


def test_patches_must_fit(checkpoint: Checkpoint, output: Path) -> None:
    with pytest.raises(ValueError, match=r"no such tensors to patch: \['c'\]"):
        open_writer(checkpoint, output, patches={"c": Patch(negate)})
    cut = {"embed": Patch(lambda data, info: data[:-1])}
    with (
        pytest.raises(ValueError, match="changes the size of tensor embed"),
        open_writer(checkpoint, output, patches=cut) as writer,
    ):
        writer.copy()


def test_a_shard_that_changes_meanwhile_is_noticed(checkpoint: Checkpoint, output: Path) -> None:
    shard = checkpoint.folder / SECOND
    content = shard.read_bytes()
    for change, words in [(content[:-1], "was cut short"), (content[::-1], "changed while")]:
        with (
            pytest.raises((CheckpointError, KvarnError), match=f"{SECOND}"),
            open_writer(checkpoint, output, patches=PATCHES) as writer,
        ):
            shard.write_bytes(change)
            os.utime(shard, ns=(0, len(words)))
            writer.copy()
        assert not output.exists()
        shard.write_bytes(content)
