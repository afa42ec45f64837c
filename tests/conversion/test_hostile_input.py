"""Broken and hostile checkpoints through the whole of convert: refused by name, nothing left."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import contents, write_raw
from conversions import convert
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.errors import CheckpointError, KvarnError, UnsupportedModelError, UsageError
from kvarn_cli.verification.against_source import verify_against
from kvarn_cli.verification.folder import verify_folder

pytestmark = pytest.mark.usefixtures("proof_made_once")

INDEX = "model.safetensors.index.json"
V = "model.layers.1.self_attn.v_proj.weight"


def linked(
    model: Path,
    folder: Path,
    *written: str,
    link: Callable[[Path, Path], None] = os.link,
) -> Path:
    """A folder of links to the model's files, and of copies of those that will be written."""
    for path in model.rglob("*"):
        target = folder / path.relative_to(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name in written:
            shutil.copy(path, target)
        elif path.is_file():
            link(path, target)
    return folder


def split(shard: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a weight file."""
    content = shard.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def refuse(source: Path, output: Path, error: type[KvarnError]) -> str:
    """Convert, and see that it is refused with nothing left behind."""
    beside = sorted(output.parent.iterdir())
    with pytest.raises(error) as told:
        convert(source, output)
    assert told.type is error
    assert sorted(output.parent.iterdir()) == beside
    return str(told.value)


HeaderEdit = Callable[[dict[str, Any], dict[str, Any]], object]
HEADERS: dict[str, tuple[HeaderEdit, type[KvarnError], str]] = {
    "dtype": (lambda h, v: v.update(dtype="Q4"), CheckpointError, "unknown dtype"),
    "float8": (lambda h, v: v.update(dtype="F8_E4M3"), CheckpointError, "take"),
    "shape": (lambda h, v: v["shape"].append(2), CheckpointError, "take"),
    "swapped": (lambda h, v: v["shape"].reverse(), UnsupportedModelError, "has shape"),
    "huge": (lambda h, v: v.update(shape=[2**40, 2**40]), CheckpointError, "too many elements"),
    "negative": (lambda h, v: v.update(shape=[-1, -1]), CheckpointError, "whole numbers"),
    "offsets": (lambda h, v: v["data_offsets"].reverse(), CheckpointError, "ascending"),
    "overlap": (lambda h, v: v.update(data_offsets=[0, 16384]), CheckpointError, "overlaps|gap"),
    "beyond": (lambda h, v: v.update(data_offsets=[2**40, 2**40 + 16384]), CheckpointError, "gap"),
    "missing": (lambda h, v: h.pop(V), CheckpointError, "gap|belong to no|does not hold"),
    "renamed": (lambda h, v: h.update({"other": h.pop(V)}), CheckpointError, "does not hold"),
    "metadata": (lambda h, v: h.update(__metadata__={"a": 1}), CheckpointError, "must be a string"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_broken_header_is_refused(case: str, model: Path, tmp_path: Path) -> None:
    edit, error, words = HEADERS[case]
    shard = json.loads((model / INDEX).read_text())["weight_map"][V]
    source = linked(model, tmp_path / "source", shard)
    header, data = split(source / shard)
    edit(header, header[V])
    write_raw(source / shard, header, data)
    said = refuse(source, tmp_path / "out", error)
    assert any(word in said for word in words.split("|")), said


@pytest.mark.parametrize("how", ["cut", "longer", "empty", "lying", "twice", "deep", "many"])
def test_a_broken_file_is_refused(how: str, model: Path, tmp_path: Path) -> None:
    shard = json.loads((model / INDEX).read_text())["weight_map"][V]
    source = linked(model, tmp_path / "source", shard)
    path = source / shard
    content = path.read_bytes()
    changed = {
        "cut": content[:-1],
        "longer": content + b"!",
        "empty": b"",
        "lying": (2**62).to_bytes(8, "little") + content[8:],
    }
    if how in changed:
        path.write_bytes(changed[how])
    else:
        text = {"twice": b'{"a":1,"a":1}', "deep": b'{"a":' * 500, "many": b"[0,1]," * 2_000_000}
        write_raw(path, text[how])
    assert shard in refuse(source, tmp_path / "out", CheckpointError)


IndexEdit = Callable[[dict[str, str]], object]
INDEXES: dict[str, IndexEdit] = {
    "missing shard": lambda names: names.update({V: "model-9.safetensors"}),
    "another shard": lambda names: names.update(
        {V: next(shard for shard in names.values() if shard != names[V])}
    ),
    "unknown tensor": lambda names: names.update(ghost=names[V]),
    "path": lambda names: names.update({V: f"../source/{names[V]}"}),
    "absolute": lambda names: names.update({V: "/etc/passwd.safetensors"}),
    "backslash": lambda names: names.update({V: "..\\x.safetensors"}),
    "no name": lambda names: names.update({V: 3}),
    "no weights": lambda names: names.update({V: "config.json"}),
    "empty": lambda names: names.clear(),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_broken_index_is_refused(case: str, model: Path, tmp_path: Path) -> None:
    source = linked(model, tmp_path / "source", INDEX)
    index = json.loads((source / INDEX).read_text())
    INDEXES[case](index["weight_map"])
    (source / INDEX).write_text(json.dumps(index))
    assert INDEX in refuse(source, tmp_path / "out", CheckpointError)


@pytest.mark.parametrize(
    "config", ["", "[]", '{"a":' * 300 + "1" + "}" * 300, '{"a": ["\\ud800"]}']
)
def test_a_broken_configuration_is_refused(config: str, model: Path, tmp_path: Path) -> None:
    source = linked(model, tmp_path / "source", "config.json")
    (source / "config.json").write_text(config)
    assert "config.json" in refuse(source, tmp_path / "out", CheckpointError)


def test_a_duplicate_consolidated_file_is_not_copied(model: Path, tmp_path: Path) -> None:
    source = linked(model, tmp_path / "source")
    shard = next(model.glob("*.safetensors"))
    shutil.copy(shard, source / "consolidated.safetensors")
    convert(source, tmp_path / "out")
    assert "consolidated.safetensors" not in contents(tmp_path / "out")


def test_weights_that_a_loader_would_prefer_to_the_index_s_are_refused(
    model: Path, tmp_path: Path
) -> None:
    source = linked(model, tmp_path / "source")
    shutil.copy(next(model.glob("*.safetensors")), source / "model.safetensors")
    assert "model.safetensors beside it" in refuse(source, tmp_path / "out", CheckpointError)


def test_sidecars_are_copied_byte_for_byte(model: Path, tmp_path: Path) -> None:
    source = linked(model, tmp_path / "source", "generation_config.json")
    sidecars = {
        "generation_config.json": b"{not even JSON",
        "chat_template.jinja": b"{{ x }}\r\n",
        "modeling_custom.py": b"raise SystemExit('never run')\n",
        "LICENSE": b"",
    }
    for name, content in sidecars.items():
        (source / name).unlink(missing_ok=True)
        (source / name).write_bytes(content)
    convert(source, tmp_path / "out")
    assert contents(tmp_path / "out").items() >= sidecars.items()


def test_code_is_not_run_unasked(model: Path, tmp_path: Path) -> None:
    source = linked(model, tmp_path / "source", "config.json")
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "configuration_x.Config"}}
    (source / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (source / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w')\n")
    refuse(source, tmp_path / "out", UnsupportedModelError)
    assert not marker.exists()


def test_pickles_are_refused(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(model / "config.json", source)
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pytorch_model.bin" in refuse(source, tmp_path / "out", UnsupportedModelError)


def test_a_snapshots_blobs_are_never_written(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    blobs = cache / "blobs"
    shutil.copytree(model, blobs)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in blobs.iterdir()}
    snapshot = linked(blobs, cache / "snapshots" / ("0" * 40), link=os.symlink)
    output = convert(snapshot, tmp_path / "out").output
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in blobs.iterdir()
    } == before
    assert not any(path.is_symlink() for path in output.rglob("*"))


@pytest.mark.parametrize("place", [".", "new", ".."])
def test_the_output_is_never_the_models_own(place: str, model: Path) -> None:
    before = contents(model.parent)
    with pytest.raises(UsageError, match="lie in one another"):
        convert(model, model / place, overwrite=True)
    assert contents(model.parent) == before


def test_an_empty_output_is_fine_and_a_full_one_is_kept(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "mit Leerzeichen und Umläuten äöü"
    output.mkdir()
    convert(model, output)
    with pytest.raises(UsageError, match="not empty"):
        convert(model, output)
    convert(model, output, overwrite=True)


def test_a_dead_head_is_named(model: Path, tmp_path: Path) -> None:
    shard = json.loads((model / INDEX).read_text())["weight_map"][V]
    source = linked(model, tmp_path / "source", shard)
    header, data = split(source / shard)
    begin, end = header[V]["data_offsets"]
    write_raw(source / shard, header, data[:begin] + bytes(end - begin) + data[end:])
    warnings = convert(source, tmp_path / "out").conversion.warnings
    assert any("layer 1: V of KV head 0 is all zero" in warning for warning in warnings)


EDITS = st.lists(
    st.tuples(
        st.integers(0, 4000),
        st.integers(0, 9),
        st.binary(max_size=3)
        | st.sampled_from([b'"', b"0", b"-", b"[", b"]", b"{", b"}", b",", b"_", b"..", b"/"]),
    ),
    max_size=3,
)
VALUES = st.one_of(
    st.none(),
    st.integers(-1, 2**64),
    st.text(max_size=3),
    st.sampled_from(["F32", "BF16", "I16", "F8_E4M3", "../x.safetensors", "config.json"]),
    st.lists(st.integers(-1, 70), max_size=3),
    st.lists(st.integers(0, 2**63), max_size=2),
)
FIELD = st.tuples(
    st.integers(0, 40), st.sampled_from(["dtype", "shape", "data_offsets", "name", "all"]), VALUES
)


def mutate(document: dict[str, Any], field: tuple[int, str, Any]) -> None:
    number, what, value = field
    name = list(document)[number % len(document)]
    entry = document[name]
    if what == "name":
        document[str(value)] = document.pop(name)
    elif what == "all" or not isinstance(entry, dict):
        document[name] = value
    else:
        entry[what] = value


@settings(max_examples=2000, deadline=10_000)
@given(
    target=st.sampled_from(["shard", "index"]),
    number=st.integers(0, 9),
    field=st.none() | FIELD,
    edits=EDITS,
    honest=st.booleans(),
)
def test_any_mutation_is_converted_right_or_refused(
    target: str,
    number: int,
    field: tuple[int, str, Any] | None,
    edits: list[tuple[int, int, bytes]],
    honest: bool,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    changed = INDEX if target == "index" else shards[number % len(shards)]
    folder = tmp_path_factory.getbasetemp() / "mutations"
    shutil.rmtree(folder, ignore_errors=True)
    source, output = linked(model, folder / "source", changed), folder / "out"
    document, data = split(model / changed) if target == "shard" else ({}, b"")
    if target == "index":
        document = json.loads((model / INDEX).read_text())
    if field is not None:
        mutate(document["weight_map"] if target == "index" else document, field)
    text = bytearray(json.dumps(document).encode("utf-8", "surrogatepass"))
    length = len(text)
    for position, removed, inserted in edits:
        place = position % len(text)
        text[place : place + removed] = inserted
    if target == "index":
        (source / INDEX).write_bytes(text)
    else:
        write_raw(source / changed, bytes(text), data, header_bytes=None if honest else length)
    try:
        convert(source, output)
    except KvarnError as refusal:
        assert refusal.exit_code in (3, 6), refusal
        assert sorted(path.name for path in folder.iterdir()) == ["source"]
    else:
        original = open_checkpoint(source)
        checks = verify_folder(output) + verify_against(open_checkpoint(output), original)
        assert not [problem for check in checks for problem in check.problems]
        assert sorted(path.name for path in folder.iterdir()) == ["out", "source"]
    assert not any(path.is_symlink() for path in output.rglob("*"))


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing thousands of small files says nothing here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


READ = r"""
import re, sys
from pathlib import Path
from kvarn_cli.checkpoint.safetensors_header import read_header
from kvarn_cli.checkpoint.weight_index import read_weight_map
from kvarn_cli.errors import CheckpointError
read = read_header if sys.argv[1].endswith(".safetensors") else read_weight_map
try:
    read(Path(sys.argv[1]))
except CheckpointError:
    pass
status = Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) // 1024)
"""
GREEDY = {
    "zeros": b'{"x":[' + b"0," * 1_900_000 + b"0]}",
    "objects": b'{"x":[' + b"{}," * 990_000 + b"0]}",
    "lists": b'{"x":' + b"[" * 50 + b"[]," * 990_000 + b"0" + b"]" * 50 + b"}",
    "keys": b"{" + b",".join(b'"%d":{}' % n for n in range(990_000)) + b"}",
    "wide text": b'{"x":"' + "\U0001f600".encode() + b"a" * 31_000_000 + b'"}',
    "escapes": b'{"x":"' + b"\\ud83d\\ude00" * 2_600_000 + b'"}',
}


@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("where", ["header", "index"])
def test_no_small_file_takes_a_gigabyte(kind: str, where: str, tmp_path: Path) -> None:
    if where == "header":
        target = write_raw(tmp_path / "x.safetensors", GREEDY[kind])
    else:
        (tmp_path / INDEX).write_bytes(GREEDY[kind])
        target = tmp_path
    done = subprocess.run(
        [sys.executable, "-c", READ, target], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 1000
