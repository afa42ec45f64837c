import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from checkpoint_files import write_raw
from safetensors.numpy import load_file, save_file

from kvarn_cli.checkpoint import shard_stream
from kvarn_cli.checkpoint.safetensors_header import TensorInfo, read_header
from kvarn_cli.checkpoint.shard_stream import WrittenShard, plan_shard, write_shard
from kvarn_cli.checkpoint.tensor_blocks import BLOCK_BYTES
from kvarn_cli.checkpoint.tensor_changes import Patch, Workers

Array = np.ndarray[Any, Any]


def negate(data: bytearray, info: TensorInfo) -> bytes:
    values = np.frombuffer(data, np.float16).reshape(info.shape)
    return (-values).tobytes()


def halve(data: bytearray, info: TensorInfo) -> bytes:
    return np.frombuffer(data, np.float32).astype(np.float16).tobytes()


def arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "wide": rng.standard_normal((7, 3)).astype(np.float32),
        "ids": rng.integers(0, 9, (5,)).astype(np.int32),
        "scalar": np.array(1.5, np.float32),
        "half": rng.standard_normal((600, 400)).astype(np.float16),
        "none": np.zeros((0, 4), np.float16),
        "flags": np.array([True, False, True]),
    }


def stream(path: Path, patches: dict[str, Patch]) -> tuple[Path, WrittenShard, list[int]]:
    steps: list[int] = []
    target = path.with_name("new.safetensors")
    plan = plan_shard(read_header(path), patches)
    with (
        path.open("rb", buffering=0) as source,
        target.open("wb", buffering=0) as file,
        ThreadPoolExecutor(2) as threads,
    ):
        written = write_shard(source, file, plan, patches, steps.append, Workers(threads, 1 << 20))
    assert target.stat().st_size == plan.size_bytes == written.record.size_bytes
    return target, written, steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "old.safetensors"
    save_file(arrays(), path, {"format": "pt", "note": "ü"})
    return path


@pytest.mark.parametrize("names", [(), ("half",), ("half", "none")])
def test_only_patched_bytes_change(names: tuple[str, ...], path: Path) -> None:
    target, written, steps = stream(path, dict.fromkeys(names, Patch(negate)))
    old, new = path.read_bytes(), target.read_bytes()
    expected = bytearray(old)
    for name in names:
        info = read_header(path).tensors[name]
        expected[info.start : info.end] = negate(expected[info.start : info.end], info)
    assert new == expected
    assert written.record.xxh3_128 == xxhash.xxh3_128(new).hexdigest()
    assert written.tensors.keys() == set(names)
    if names:
        changed = load_file(target)["half"].tobytes()
        assert written.tensors["half"] == hashlib.sha256(changed).hexdigest()
    assert sum(steps) == len(old)


@pytest.mark.parametrize("row_step", [1, 7, 600])
def test_a_patch_is_given_blocks_of_whole_steps(row_step: int, path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def watch(data: bytearray, info: TensorInfo) -> bytes:
        assert len(data) == info.size_bytes
        seen.append(info.shape)
        return negate(data, info)

    target, _, _ = stream(path, {"half": Patch(watch, row_step)})
    np.testing.assert_array_equal(load_file(target)["half"], -arrays()["half"])
    assert sum(rows for rows, _ in seen) == 600
    assert all(rows % row_step == 0 for rows, _ in seen[:-1])
    if row_step < 600:
        assert len(seen) > 1
        assert all(rows * 800 <= BLOCK_BYTES for rows, _ in seen)


def test_another_dtype_moves_the_rest_and_keeps_it_aligned(path: Path) -> None:
    names = ("wide", "scalar")
    patches = {name: Patch(halve, dtype="F16", recorded=False) for name in names}
    target, written, steps = stream(path, patches)
    new, old = load_file(target), arrays()
    assert list(read_header(target).tensors) == list(read_header(path).tensors)
    for name, array in old.items():
        expected = array.astype(np.float16) if name in names else array
        assert new[name].dtype == expected.dtype
        np.testing.assert_array_equal(new[name], expected)
    header = read_header(target)
    assert header.metadata == {"format": "pt", "note": "ü"}
    for info in header.tensors.values():
        width = {"I32": 4, "F16": 2, "BOOL": 1}[info.dtype]
        assert info.start % width == 0
    assert written.tensors == {}
    assert sum(steps) == path.stat().st_size


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": None}, {"__metadata__": {}}])
def test_a_missing_format_is_added(metadata: dict[str, Any], tmp_path: Path) -> None:
    entry = {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}
    path = write_raw(tmp_path / "old.safetensors", {**metadata, "x": entry}, b"abcd")
    target, _, _ = stream(path, {})
    assert read_header(target).metadata == {"format": "pt"}
    assert target.read_bytes().endswith(b"abcd")


def test_cloned_blocks_are_patched_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(source: Any, target: Any) -> bool:
        target.write(path.read_bytes())
        return True

    expected = stream(path, {"half": Patch(negate)})[0].read_bytes()
    monkeypatch.setattr(shard_stream, "clone", share)
    target, written, _ = stream(path, {"half": Patch(negate)})
    assert target.read_bytes() == expected
    assert written.record.xxh3_128 == xxhash.xxh3_128(expected).hexdigest()
