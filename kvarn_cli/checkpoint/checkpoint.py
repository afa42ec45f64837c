"""A transformers checkpoint on disk, opened from its small files and headers alone."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvarn_cli.checkpoint.safetensors_header import Header, TensorInfo, read_header
from kvarn_cli.checkpoint.sidecars import OTHER_WEIGHT_SUFFIXES, LeftOut, find_sidecars
from kvarn_cli.checkpoint.strict_json import quoted, read_object
from kvarn_cli.checkpoint.weight_index import (
    INDEX_NAME,
    SINGLE_FILE_NAME,
    read_weight_map,
    shard_names,
)
from kvarn_cli.errors import CheckpointError, UnsupportedModelError

CONFIG_NAME = "config.json"

ReadHeaders = Callable[[Sequence[str]], Mapping[str, Header]]
"""From names of shards to their headers."""


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint folder.

    Attributes:
        folder: where it lies.
        config: the whole of `config.json`.
        shards: header of each weight file, by file name.
        weight_map: file name of each tensor that the model loads. A shard may hold more tensors;
            they stay in it.
        index_sha256: SHA-256 of the index file, or of a single file's header text.
        sidecars: every other file that belongs to the checkpoint, `config.json` and the index
            included; relative paths.
        left_out: files and folders that do not belong to it, with the reason.
    """

    folder: Path
    config: dict[str, Any]
    shards: dict[str, Header]
    weight_map: dict[str, str]
    index_sha256: str
    sidecars: tuple[PurePosixPath, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def shard_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(header.file_bytes for header in self.shards.values())

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor of the weight map."""
        return self.shards[self.weight_map[name]].tensors[name]

    def read(self, name: str) -> bytearray:
        """The bytes of a tensor of the weight map, little-endian and in row-major order.

        Raises:
            CheckpointError: the shard became shorter, or unreadable, since it was opened.
        """
        path = self.folder / self.weight_map[name]
        info = self.info(name)
        data = bytearray(info.size_bytes)
        try:
            with path.open("rb") as file:
                file.seek(info.start)
                read_bytes = file.readinto(data)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if read_bytes != info.size_bytes:
            raise CheckpointError(f"{path} was cut short while in use, at tensor {quoted(name)}")
        return data


def open_checkpoint(folder: Path, remote: ReadHeaders | None = None) -> Checkpoint:
    """Open a folder that holds `config.json` and safetensors weights, and check all its claims.

    With an index, the weights are the shards that it names; see `read_weight_map`.

    Args:
        folder: holds the small files, and the shards unless they are elsewhere.
        remote: reads the headers of the named shards where they are not in the folder; such a
            checkpoint can be planned with, but no tensor can be read.

    Raises:
        CheckpointError: a file is missing, broken or contradicts another one.
        UnsupportedModelError: the weights are in no safetensors file.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"{folder} holds no {CONFIG_NAME}", hint="name a folder that transformers can load"
        )
    config = read_object(folder / CONFIG_NAME)
    weight_map = read_weight_map(folder)
    names = shard_names(weight_map)
    if remote is None:
        _require_shards(folder, names, indexed=weight_map is not None)
        shards = {name: read_header(folder / name) for name in names}
    else:
        shards = dict(remote(names))
    if weight_map is None:
        weight_map = dict.fromkeys(shards[SINGLE_FILE_NAME].tensors, SINGLE_FILE_NAME)
        index_sha256 = shards[SINGLE_FILE_NAME].sha256
    else:
        _compare_with_shards(weight_map, shards, folder / INDEX_NAME)
        index_sha256 = hashlib.sha256((folder / INDEX_NAME).read_bytes()).hexdigest()
    sidecars, left_out = find_sidecars(folder, names)
    return Checkpoint(folder, config, shards, weight_map, index_sha256, sidecars, left_out)


def _require_shards(folder: Path, names: list[str], *, indexed: bool) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return
    if indexed:
        raise CheckpointError(
            f"{folder / INDEX_NAME} names {missing[0]}, which is missing "
            f"({len(missing)} of {len(names)} weight files are)",
            hint="the download may be incomplete; fetch the missing files again",
        )
    beside = sorted(path.name for path in folder.iterdir())
    if loose := [name for name in beside if name.endswith(".safetensors")]:
        raise CheckpointError(
            f"{folder} holds {loose[0]}, but neither {SINGLE_FILE_NAME} nor {INDEX_NAME}",
            hint="a transformers checkpoint has one of the two; fetch the missing file",
        )
    other = [name for name in beside if name.endswith(OTHER_WEIGHT_SUFFIXES)]
    found = f"only {other[0]}" if other else f"no {SINGLE_FILE_NAME}"
    hint = (
        "pickle files can run code when opened. Convert with the Hub's space "
        "safetensors/convert, or where you trust the file load it with transformers "
        "and call save_pretrained"
    )
    if other and other[0].endswith(".gguf"):
        hint = (
            "its weights are quantized already: convert the safetensors checkpoint that it was "
            "made from, and make the GGUF file from the result"
        )
    raise UnsupportedModelError(
        f"{folder} holds {found}; weights are read from safetensors files alone", hint=hint
    )


def _compare_with_shards(
    weight_map: dict[str, str], shards: dict[str, Header], index: Path
) -> None:
    places: dict[str, str] = {}
    for shard, header in shards.items():
        for tensor in header.tensors:
            if tensor in places:
                raise CheckpointError(
                    f"tensor {quoted(tensor)} stands both in {places[tensor]} and in {shard}"
                )
            places[tensor] = shard
    for tensor, shard in weight_map.items():
        if places.get(tensor) != shard:
            raise CheckpointError(
                f"{index} places tensor {quoted(tensor)} in {shard}, which does not hold it"
            )
