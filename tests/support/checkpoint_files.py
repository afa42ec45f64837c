"""Small checkpoints without a model, and safetensors files with any header.

safetensors' own library writes what is meant to be good.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray[Any, Any]]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
SIDECARS = {
    "tokenizer.json": b'{"model": "\xc3\xa9"}\r\n',
    "generation_config.json": b"{not even JSON",
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE": b"Apache-2.0\n",
    "modeling_custom.py": b"raise SystemExit('never run')\n",
    "tokenizer/merges.txt": b"a b\n",
}


def tensors(*names: str, seed: int = 0) -> Tensors:
    """Under the given names in turn: a float16 matrix, a float32 vector, an integer tensor."""
    rng = np.random.default_rng(seed)
    made: Tensors = {}
    for index, name in enumerate(names):
        matrix = rng.standard_normal((6, 10)).astype(np.float16)
        vector = rng.standard_normal(7).astype(np.float32)
        made[name] = (matrix, vector, rng.integers(0, 99, (3, 1, 2)))[index % 3]
    return made


def two_shards() -> dict[str, Tensors]:
    return {
        FIRST: tensors("embed", "a.v_proj", "a.ids"),
        SECOND: tensors("b.v_proj", "norm", seed=1),
    }


def save_checkpoint(
    folder: Path,
    shards: dict[str, Tensors] | None = None,
    metadata: dict[str, str] | None = None,
) -> Path:
    """Write config, sidecars and shards (two, unless given), with an index unless it is one file.

    Args:
        folder: made, with its parents.
        shards: arrays by tensor name by file name.
        metadata: of every shard; `{"format": "pt"}` unless given.
    """
    folder.mkdir(parents=True)
    shards = shards or two_shards()
    for name, content in shards.items():
        save_file(content, folder / name, {"format": "pt"} if metadata is None else metadata)
    if SINGLE not in shards:
        write_index(folder, {name: shard for shard in shards for name in shards[shard]})
    (folder / "config.json").write_text('{"model_type": "tiny", "limits": [0.0, Infinity]}')
    for name, data in SIDECARS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


def write_raw(
    path: Path, header: object, data: bytes = b"", *, header_bytes: int | None = None
) -> Path:
    """Write a safetensors file from any header and data, with a true length unless given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by relative path, links followed."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
