import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import tensors, write_raw
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.numpy import save, save_file

from kvarn_cli.checkpoint.safetensors_header import (
    DTYPE_BITS,
    Header,
    encode_header,
    read_header,
)
from kvarn_cli.errors import CheckpointError


def entry(dtype: str = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_agrees_with_the_formats_own_library(tmp_path: Path) -> None:
    written = tensors("a", "β", "with space", "d.weight")
    path = tmp_path / "good.safetensors"
    save_file(written, path, metadata={"format": "pt", "note": "{}"})
    header = read_header(path)
    content = path.read_bytes()
    assert header.metadata == {"format": "pt", "note": "{}"}
    assert header.tensors.keys() == written.keys()
    assert header.file_bytes == len(content)
    with safe_open(path, "np") as control:
        for name, info in header.tensors.items():
            part = control.get_slice(name)
            assert info.dtype == part.get_dtype()
            assert list(info.shape) == part.get_shape()
            assert content[info.start : info.end] == written[name].tobytes()


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_formats_own_width(dtype: str, tmp_path: Path) -> None:
    size = DTYPE_BITS[dtype]
    path = write_raw(tmp_path / "x.safetensors", {"x": entry(dtype, (8,), (0, size))}, bytes(size))
    assert read_header(path).tensors["x"].size_bytes == size
    assert deserialize(path.read_bytes())[0][1]["dtype"] == dtype


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": None}, {"__metadata__": {}}])
def test_metadata_may_be_missing_null_or_empty(metadata: dict[str, Any], tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {**metadata, "x": entry()}, b"1")
    assert read_header(path).metadata == {}
    assert deserialize(path.read_bytes())


def test_scalars_empty_tensors_padding_and_any_order(tmp_path: Path) -> None:
    document = {
        "last": entry("F32", (), (2, 6)),
        "empty": entry("F16", (0, 5), (2, 2)),
        "first": entry("I16", (1, 1), (0, 2)),
    }
    text = json.dumps(document).encode() + b"   "
    header = read_header(write_raw(tmp_path / "x.safetensors", text, bytes(6)))
    assert list(header.tensors) == ["last", "empty", "first"]
    assert header.data_start == 8 + len(text)
    assert header.tensors["last"].shape == ()
    assert header.tensors["empty"].size_bytes == 0


TWICE = b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{}}'

BROKEN = {
    "no JSON": (b"{x", b"", "not valid JSON"),
    "no UTF-8": (b'{"\xff":1}', b"", "not valid JSON"),
    "no object": ([], b"", "must be a JSON object"),
    "duplicate keys": (TWICE, b"1", "'x' stands twice"),
    "deep nesting": (b'{"x":' + b"[" * 100_000, b"", "nested too deeply"),
    "half a surrogate": (b'{"\\ud800":{}}', b"", "not valid JSON"),
    "metadata no object": ({"__metadata__": 3}, b"", "must be an object or null"),
    "metadata no string": ({"__metadata__": {"k": 3}}, b"", "entry 'k' must be a string"),
    "entry no object": ({"x": 3}, b"", "'x' must be described by an object"),
    "unknown dtype": ({"x": entry("Q3")}, b"1", "'x' has an unknown dtype: 'Q3'"),
    "dtype no string": ({"x": {**entry(), "dtype": [[1]]}}, b"1", "'x' has an unknown dtype"),
    "no shape": ({"x": {"dtype": "U8", "data_offsets": [0, 1]}}, b"1", "'x': shape must be a list"),
    "negative shape": ({"x": entry(shape=(-1, -1))}, b"1", "'x': shape must hold whole numbers"),
    "fractional shape": ({"x": entry(shape=(1.0,))}, b"1", "'x': shape must hold whole numbers"),
    "bool in shape": ({"x": entry(shape=(True,))}, b"1", "'x': shape must hold whole numbers"),
    "huge size": ({"x": entry(shape=(2**63,))}, b"1", "'x': shape must hold whole numbers"),
    "huge product": ({"x": entry(shape=(2**40, 2**40))}, b"1", "'x': its shape has too many"),
    "long number": (b'{"x":[' + b"9" * 5000 + b"]}", b"", "not valid JSON"),
    "one offset": ({"x": entry(offsets=(0,))}, b"1", "'x': data_offsets must be two numbers"),
    "falling offsets": ({"x": entry(offsets=(1, 0))}, b"1", "ascending order"),
    "wrong byte count": ({"x": entry("F16", (3,), (0, 5))}, b"12345", "'x': its F16 elements"),
    "no whole byte": ({"x": entry("F4", (1,), (0, 1))}, b"1", "take 4 bits"),
    "overlap": ({"x": entry(), "y": entry()}, b"1", "'y' overlaps the bytes"),
    "gap": ({"x": entry(), "y": entry(offsets=(2, 3))}, b"123", "'y' leaves a gap"),
    "gap before all": ({"x": entry(offsets=(1, 2))}, b"12", "'x' leaves a gap"),
    "truncated": ({"x": entry(), "y": entry(shape=(9,), offsets=(1, 10))}, b"12345", "'y' ends at"),
    "bytes left over": ({"x": entry()}, b"123", "2 bytes that belong to no tensor"),
    "data without tensors": ({}, b"123", "3 bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refuses_by_name_what_is_broken(case: str, tmp_path: Path) -> None:
    header, data, words = BROKEN[case]
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError) as refusal:
        read_header(path)
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value)) < 1000


def test_a_long_name_is_cut_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="100000 characters") as refusal:
        read_header(write_raw(tmp_path / "x.safetensors", {"x" * 100_000: 3}))
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("claimed", [200, 30_000_000, 150_000_000, 2**64 - 1])
def test_a_lying_header_length_allocates_nothing(claimed: int, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"x": entry()}, b"1", header_bytes=claimed)
    if claimed == 150_000_000:
        os.truncate(path, 2 * claimed)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"claims a header of {claimed} bytes"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("size", [0, 7])
def test_refuses_a_file_without_room_for_a_header(size: int, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=r"short\.safetensors"):
        read_header(path)


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(CheckpointError, match="missing or no regular file"):
            read_header(tmp_path / name)


def test_an_encoded_header_reads_back_with_the_same_tensors(tmp_path: Path) -> None:
    written = tensors("a", "β", "c", "d")
    path = tmp_path / "old.safetensors"
    save_file(written, path)
    old = read_header(path)
    encoded = encode_header({"format": "pt", "naïve": '"\n'}, old)
    content = encoded + path.read_bytes()[old.data_start :]
    new_path = tmp_path / "new.safetensors"
    new_path.write_bytes(content)
    new = read_header(new_path)
    assert new.metadata == {"format": "pt", "naïve": '"\n'}
    assert list(new.tensors) == list(old.tensors)
    assert new.data_start == len(encoded)
    assert len(encoded) % 8 == 0
    with safe_open(new_path, "np") as control:
        assert control.metadata() == new.metadata
        for name, array in written.items():
            np.testing.assert_array_equal(control.get_tensor(name), array)


GOOD = save(tensors("a.weight", "b", "c"), {"format": "pt"})
HEADER_END = 8 + int.from_bytes(GOOD[:8], "little")
Edit = tuple[int, int, bytes]
edits = st.lists(
    st.tuples(
        st.integers(0, HEADER_END - 1),
        st.integers(0, 9),
        st.binary(max_size=3) | st.sampled_from([b'"', b"0", b"-", b"[", b"]", b"{", b"}", b","]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(edits=edits, honest_length=st.booleans())
@example(edits=[(0, 0, b"")], honest_length=True)
def test_any_mutation_gives_a_header_or_a_refusal(
    edits: list[Edit], honest_length: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mutated = bytearray(GOOD[:HEADER_END])
    for position, removed, inserted in edits:
        mutated[position : position + removed] = inserted
    if honest_length:
        mutated[:8] = max(len(mutated) - 8, 0).to_bytes(8, "little")
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(mutated + GOOD[HEADER_END:])
    try:
        header = read_header(path)
    except CheckpointError as refusal:
        assert str(path) in str(refusal)
    else:
        assert isinstance(header, Header)
        assert b"-0" in mutated or deserialize(path.read_bytes()) is not None
