"""Write the converted checkpoint and look it over before it gets its name. No transformers here."""

import json
from collections.abc import Mapping
from typing import Any

from kvarn_cli import __version__
from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from kvarn_cli.checkpoint.strict_json import read_object
from kvarn_cli.checkpoint.weight_index import INDEX_NAME
from kvarn_cli.checkpoint.writer import CheckpointWriter
from kvarn_cli.metadata import CONFIG_KEY, MANIFEST_NAME, MODEL_CARD_NAME, KVarNConfig, Manifest
from kvarn_cli.model.layout import FUSIBLE_DTYPES
from kvarn_cli.model.torch_threads import one_thread_per_operation
from kvarn_cli.verification.folder import require_sound, verify_folder

_UNLISTED = (MODEL_CARD_NAME, MANIFEST_NAME)


def write_output(
    writer: CheckpointWriter, checkpoint: Checkpoint, metadata: KVarNConfig, dtype: str | None
) -> None:
    """Copy and patch the weights, add configuration and manifest, verify, and rename.

    Args:
        writer: entered, with the patches.
        checkpoint: the source.
        metadata: goes into config.json.
        dtype: that the patches give the weights, by safetensors' name; None keeps theirs.

    Raises:
        KvarnError: as the writer; or the written folder does not verify.
    """
    config = checkpoint.config | {CONFIG_KEY: metadata.model_dump(mode="json")}
    own = {CONFIG_NAME: config}
    if dtype is not None:
        config |= _dtype_entries(checkpoint.config, dtype)
        if any(str(path) == INDEX_NAME for path in checkpoint.sidecars):
            own[INDEX_NAME] = _index(checkpoint, writer)
    with one_thread_per_operation():
        writer.copy(without={*own, MANIFEST_NAME})
    for name, content in own.items():
        writer.add_file(name, _json_bytes(content))
    manifest = Manifest(
        kvarn_version=__version__,
        files={name: writer.files[name] for name in sorted(writer.files) if name not in _UNLISTED},
        tensors=dict(sorted(writer.tensors.items())),
    )
    writer.add_file(MANIFEST_NAME, _json_bytes(manifest.model_dump(mode="json", exclude_none=True)))
    require_sound(verify_folder(writer.folder, hashes=False), writer.folder)
    writer.commit()


def _dtype_entries(config: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """The dtype as config.json says it: under its old name too, where that stands there."""
    name = str(FUSIBLE_DTYPES[dtype]).removeprefix("torch.")
    keys = {"dtype", "torch_dtype"} & config.keys() or {"dtype"}
    return dict.fromkeys(sorted(keys), name)


def _index(checkpoint: Checkpoint, writer: CheckpointWriter) -> dict[str, Any]:
    """The index with the new size of the weights."""
    index = read_object(checkpoint.folder / INDEX_NAME)
    metadata = index.get("metadata")
    return index | {
        "metadata": (metadata if isinstance(metadata, dict) else {})
        | {"total_size": writer.tensor_bytes}
    }


def _json_bytes(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
