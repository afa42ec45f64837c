import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import FIRST, INDEX, SECOND, SINGLE, contents, save_checkpoint, tensors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvarn_cli.checkpoint import writer as writer_module
from kvarn_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.writer import CheckpointWriter
from kvarn_cli.errors import CheckpointError, KvarnError, UsageError


def negate(data: bytearray, info: TensorInfo) -> bytes:
    assert info.dtype == "F16"
    return (-np.frombuffer(data, np.float16)).tobytes()


PATCHES = {"embed": negate, "b.v_proj": negate}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(save_checkpoint(tmp_path / "a model, naïve"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results" / "ein Ausgang, größer"


def test_everything_unpatched_is_byte_identical(checkpoint: Checkpoint, output: Path) -> None:
    before = contents(checkpoint.folder)
    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy(PATCHES)
        writer.commit()
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
    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy(PATCHES)
        writer.commit()
    for shard in (FIRST, SECOND):
        old, new = load_file(checkpoint.folder / shard), load_file(output / shard)
        assert list(new) == list(old)
        for name, array in old.items():
            sign = -1 if name in PATCHES else 1
            np.testing.assert_array_equal(new[name], sign * array)


def test_without_patches_the_copy_is_exact(checkpoint: Checkpoint, output: Path) -> None:
    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy({})
        writer.commit()
    assert contents(output) == contents(checkpoint.folder)


@pytest.mark.parametrize("metadata", [{}, {"note": "ü"}])
def test_a_shard_without_format_gets_one(
    metadata: dict[str, str], tmp_path: Path, output: Path
) -> None:
    written = tensors("z", "embed", "a", "b")
    folder = save_checkpoint(tmp_path / "model", {SINGLE: written}, metadata)
    source = open_checkpoint(folder)
    with CheckpointWriter(source, output) as writer:
        writer.copy({"z": negate})
        writer.commit()
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
    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy(PATCHES)
        writer.add_file("config.json", b'{"new": true}')
        listed = {name: record.model_dump() for name, record in writer.files.items()}
        writer.add_file("sub/manifest.json", json.dumps(listed).encode())
        writer.commit()
    written = contents(output)
    assert written["config.json"] == b'{"new": true}'
    assert json.loads(written.pop("sub/manifest.json")) == {
        name: {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in written.items()
    }


def test_reports_progress_up_to_the_shards_bytes(checkpoint: Checkpoint, output: Path) -> None:
    seen: list[int] = []
    with CheckpointWriter(checkpoint, output, progress=seen.append) as writer:
        writer.copy({})
    assert seen == sorted(seen)
    assert len(seen) == 4
    assert seen[-1] == checkpoint.shard_bytes


def test_what_is_left_out_is_not_copied(tmp_path: Path, output: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    for name in (SINGLE, "consolidated.safetensors"):
        save_file(tensors("embed"), folder / name)
    (folder / "pytorch_model.bin").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").touch()
    (folder / "loop").symlink_to(folder)
    with CheckpointWriter(open_checkpoint(folder), output) as writer:
        writer.copy({})
        writer.commit()
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
    with CheckpointWriter(open_checkpoint(snapshot), output) as writer:
        writer.copy(PATCHES)
        writer.add_file("config.json", b"{}")
        writer.commit()
    assert contents(cache / "blobs") == blobs
    assert not any(path.is_symlink() for path in output.rglob("*"))
    assert contents(output).keys() == contents(model).keys()
    assert contents(output)[FIRST] != contents(model)[FIRST]
    assert contents(output)[INDEX] == contents(model)[INDEX]


class BoomError(Exception):
    pass


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
def test_an_exception_midway_leaves_nothing(
    error: type[BaseException], checkpoint: Checkpoint, output: Path, tmp_path: Path
) -> None:
    def fail(data: bytearray, info: TensorInfo) -> bytes:
        assert (output.with_name(f"{output.name}.incomplete") / SECOND).exists()
        raise error

    before = contents(tmp_path)
    with pytest.raises(error), CheckpointWriter(checkpoint, output) as writer:
        writer.copy({"embed": negate, "b.v_proj": fail})
    assert contents(tmp_path) == before
    assert not output.parent.exists()


def test_leaving_without_commit_leaves_nothing(checkpoint: Checkpoint, output: Path) -> None:
    output.parent.mkdir()
    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy({})
        assert not output.exists()
        assert open_checkpoint(writer.folder).weight_map == checkpoint.weight_map
    assert list(output.parent.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.writer import CheckpointWriter

def die(data, info):
    os.kill(os.getpid(), signal.SIGKILL)

with CheckpointWriter(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2])) as writer:
    writer.copy({"b.v_proj": die})
"""


def test_after_a_kill_the_next_run_starts_afresh(checkpoint: Checkpoint, output: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(checkpoint.folder), str(output)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in output.parent.iterdir()] == [f"{output.name}.incomplete"]
    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy({})
        writer.commit()
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    assert contents(output) == contents(checkpoint.folder)


def test_a_full_disk_is_told_and_leaves_nothing(
    checkpoint: Checkpoint, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "append_rest", no_space)
    with (
        pytest.raises(KvarnError, match=f"cannot write {output}: No space left") as told,
        CheckpointWriter(checkpoint, output) as writer,
    ):
        writer.copy({})
    assert told.value.exit_code == 1
    assert not output.parent.exists()


def test_an_old_output_stands_until_the_new_one_is_whole(
    checkpoint: Checkpoint, output: Path
) -> None:
    save_checkpoint(output, {SINGLE: tensors("old")})
    old = contents(output)
    with pytest.raises(UsageError, match="not empty"), CheckpointWriter(checkpoint, output):
        pass
    with pytest.raises(BoomError), CheckpointWriter(checkpoint, output, overwrite=True) as writer:
        writer.copy(PATCHES)
        raise BoomError
    assert contents(output) == old
    with CheckpointWriter(checkpoint, output, overwrite=True) as writer:
        writer.copy({})
        assert contents(output) == old
        writer.commit()
    assert contents(output) == contents(checkpoint.folder)
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_what_appears_at_the_output_meanwhile_is_kept(checkpoint: Checkpoint, output: Path) -> None:
    with (
        pytest.raises(UsageError, match="not empty"),
        CheckpointWriter(checkpoint, output) as writer,
    ):
        writer.copy({})
        output.mkdir()
        (output / "thesis.tex").write_text("mine")
        writer.commit()
    assert contents(output.parent) == {f"{output.name}/thesis.tex": b"mine"}


def test_a_link_planted_at_a_files_name_is_not_written_through(
    checkpoint: Checkpoint, output: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with (
        pytest.raises(KvarnError, match="File exists"),
        CheckpointWriter(checkpoint, output) as writer,
    ):
        (writer.folder / SECOND).symlink_to(victim)
        writer.copy({})
    with CheckpointWriter(checkpoint, output) as writer:
        (writer.folder / "config.json").symlink_to(victim)
        writer.add_file("config.json", b"{}")
        writer.commit()
    assert victim.read_text() == "mine"
    assert not (output / "config.json").is_symlink()


def test_patches_must_fit(checkpoint: Checkpoint, output: Path) -> None:
    with CheckpointWriter(checkpoint, output) as writer:
        with pytest.raises(ValueError, match=r"no such tensors to patch: \['c'\]"):
            writer.copy({"c": negate})
        with pytest.raises(ValueError, match="changes the size of tensor embed"):
            writer.copy({"embed": lambda data, info: data[:-1]})


def test_a_shard_that_changes_meanwhile_is_noticed(checkpoint: Checkpoint, output: Path) -> None:
    shard = checkpoint.folder / SECOND
    shard.write_bytes(shard.read_bytes()[:-1])
    with (
        pytest.raises(CheckpointError, match=f"{SECOND} was cut short"),
        CheckpointWriter(checkpoint, output) as writer,
    ):
        writer.copy({})
    shard.write_bytes((shard.read_bytes() + b"1").replace(b'"norm"', b'"morn"'))
    with (
        pytest.raises(KvarnError, match=f"{SECOND} does not read back as it was written"),
        CheckpointWriter(checkpoint, output) as writer,
    ):
        writer.copy({})
    assert not output.exists()
