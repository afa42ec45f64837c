"""A small folder as `kvarn convert` would leave it, made without a model or torch."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import xxhash

from kvarn_cli.metadata import (
    Application,
    BaseModelReference,
    CacheFormat,
    Calibration,
    EngineErrors,
    FileRecord,
    KVarNConfig,
    Layers,
    LeftOutLayer,
    Manifest,
    ProofRecord,
    RotatedTensor,
    Rotation,
    Rotations,
    Thresholds,
)
from kvarn_cli.settings import KVarNSettings

HEAD_DIM = 64
BASE_README = b"""---
license: apache-2.0
language:
- en
- de
tags:
- chat
---

# Tiny

The base model.
"""


def write_converted_folder(
    folder: Path,
    config: KVarNConfig | None = None,
    *,
    weights: bytes = b"\x01\x02\x03\x04" * 256,
    readme: bytes | None = BASE_README,
    files: dict[str, bytes] | None = None,
) -> Path:
    """Write a consistent folder: two shards and their index, configuration, tokenizer, manifest.

    Args:
        folder: to make.
        config: its `kvarn_config`; `converted_config()` unless given.
        weights: content of the one tensor of the second shard.
        readme: content of README.md, or None for no such file.
        files: further files, listed in the manifest.
    """
    config = config or converted_config()
    model = {"model_type": "llama", "kvarn_config": config.model_dump(mode="json")}
    shards = {f"model-0000{n}-of-00002.safetensors": name for n, name in ((1, "a"), (2, "b"))}
    index = {"metadata": {}, "weight_map": {name: shard for shard, name in shards.items()}}
    contents = {
        "config.json": json.dumps(model, indent=2).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00002.safetensors": safetensors_bytes("a", b"\0" * 64),
        "model-00002-of-00002.safetensors": safetensors_bytes("b", weights),
        "tokenizer.json": b'{"version": "1.0"}',
        "code/modeling_tiny.py": b"",
        **(files or {}),
    }
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    if readme is not None:
        (folder / "README.md").write_bytes(readme)
    write_manifest(folder, contents)
    return folder


def write_manifest(folder: Path, contents: dict[str, bytes]) -> None:
    records = {path: _record(path, content) for path, content in contents.items()}
    manifest = Manifest(kvarn_version="0.1.0", files=records)
    text = manifest.model_dump_json(indent=2, exclude_none=True)
    (folder / "kvarn_manifest.json").write_text(text)


def _record(path: str, content: bytes) -> FileRecord:
    if path.endswith(".safetensors"):
        return FileRecord(size_bytes=len(content), xxh3_128=xxhash.xxh3_128(content).hexdigest())
    return FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def safetensors_bytes(name: str, content: bytes) -> bytes:
    """A safetensors file of one uint8 tensor."""
    entry = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({name: entry, "__metadata__": {"format": "pt"}}).encode()
    return struct.pack("<Q", len(header)) + header + content


def converted_config(
    settings: KVarNSettings | None = None, *, head_dim: int = HEAD_DIM, **changes: Any
) -> KVarNConfig:
    """A whole `kvarn_config`: fused, proved, validated.

    Args:
        settings: of the quantizer.
        head_dim: width of a head.
        changes: other values for the block's fields.
    """
    fields: dict[str, Any] = {
        "kvarn_version": "0.1.0",
        "base_model": BaseModelReference(
            name="org/Tiny-1B", revision="0" * 40, index_sha256="1" * 64
        ),
        "cache": CacheFormat.from_settings(settings or KVarNSettings(), head_dim),
        "layers": Layers(
            covered=[0, 1], left_out=[LeftOutLayer(layer=2, reason="sliding window of 512 tokens")]
        ),
        "rotations": rotations(head_dim, fused=True),
        "proof": ProofRecord(
            instance_difference=3e-13,
            instance_tolerance=1e-9,
            smallest_control=0.25,
            weight_change=0.0041,
        ),
        "calibration": calibration(),
    }
    return KVarNConfig(**(fields | changes))


def rotations(head_dim: int, *, fused: bool) -> Rotations:
    values = ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"]
    outputs = [name.replace("v_proj", "o_proj") for name in values]
    fused_at = [
        Application(targets=values, location="weight_output"),
        Application(targets=outputs, location="weight_input", inverse=True),
    ]
    tensors = {f"{name}.weight": RotatedTensor(axis=0, first_channels=[0]) for name in values}
    tensors |= {f"{name}.weight": RotatedTensor(axis=1, first_channels=[0]) for name in outputs}
    online_at = [Application(targets=values, location="v_cache")]
    keys = [Application(targets=values, location="k_cache")]
    return Rotations(
        key=Rotation(signs=None, head_dim=head_dim, where="online", apply=keys),
        value=Rotation(
            signs="+-" * (head_dim // 2) if fused else None,
            head_dim=head_dim,
            where="fused" if fused else "online",
            apply=fused_at if fused else online_at,
            tensors=tensors if fused else {},
        ),
    )


def calibration(**changes: Any) -> Calibration:
    fields: dict[str, Any] = {
        "dataset": "built-in text",
        "num_samples": 4,
        "sequence_length": 1024,
        "seed": 0,
        "compute_dtype": "float32",
        "engines": [
            EngineErrors(
                engine=engine,
                kl_mean=kl,
                top1_agreement=0.961,
                loss_original=2.979,
                loss_quantized=2.986,
                attention_mae=0.019,
                attention_mae_by_layer={0: 0.01, 1: 0.028},
            )
            for engine, kl in (("honours_marker", 0.0104), ("rotates_again", 0.0115))
        ],
        "thresholds": Thresholds(max_kl=0.1, min_top1=0.8, max_loss_increase=0.1),
        "misses": [],
    }
    return Calibration(**(fields | changes))
