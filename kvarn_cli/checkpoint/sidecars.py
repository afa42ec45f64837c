"""Which files of a model folder belong in a copy of it beside the shards, and which do not."""

import os
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvarn_cli.errors import CheckpointError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_WEIGHT_SUFFIXES = (
    *PICKLE_SUFFIXES,
    *(".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".tflite", ".mlmodel", ".ot"),
)
ORIGINAL_FOLDER = "original"


class LeftOut(NamedTuple):
    """A file, or a folder with all that it holds, that does not belong to a checkpoint's copy."""

    path: PurePosixPath
    reason: str


def find_sidecars(
    folder: Path, shards: Collection[str]
) -> tuple[tuple[PurePosixPath, ...], tuple[LeftOut, ...]]:
    """Sort every file of a model folder, subfolders included, into sidecars and the rest.

    Links to files are followed inside the folder and into the Hub's cache, as a snapshot consists
    of them; links to folders are not.

    Args:
        folder: the model's folder.
        shards: names of the weight files, which are neither.

    Returns:
        The sidecars and what is left out; both relative to `folder` and sorted.

    Raises:
        CheckpointError: a sidecar is a link to a missing file, or to one outside the model; or a
            folder cannot be read.
    """
    sidecars: list[PurePosixPath] = []
    left_out: list[LeftOut] = []
    try:
        for parent, folder_names, file_names in os.walk(folder, onerror=_raise):
            place = PurePosixPath(Path(parent).relative_to(folder).as_posix())
            for name in list(folder_names):
                if reason := _reason_against_folder(Path(parent, name), place / name):
                    left_out.append(LeftOut(place / name, reason))
                    folder_names.remove(name)
            for name in file_names:
                if str(place / name) in shards:
                    continue
                if reason := _reason_against_file(Path(parent, name)):
                    left_out.append(LeftOut(place / name, reason))
                else:
                    _refuse_foreign_link(Path(parent, name), folder)
                    sidecars.append(place / name)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    return tuple(sorted(sidecars)), tuple(sorted(left_out))


def _reason_against_name(name: str) -> str | None:
    if name.startswith("."):
        return "hidden"
    if not name.isprintable() or "\\" in name:
        return "a name that not every system can hold"
    return None


def _reason_against_folder(path: Path, relative: PurePosixPath) -> str | None:
    if reason := _reason_against_name(path.name):
        return reason
    if path.name == "__pycache__":
        return "Python cache"
    if str(relative) == ORIGINAL_FOLDER:
        return "the same weights in their publisher's own format"
    if path.is_symlink():
        return "a link to a folder"
    return None


def _reason_against_file(path: Path) -> str | None:
    if reason := _reason_against_name(path.name):
        return reason
    if path.suffix in (".pyc", ".pyo"):
        return "Python cache"
    if path.name.removesuffix(".index.json").endswith(OTHER_WEIGHT_SUFFIXES):
        return "weights in another format"
    if path.suffix == ".safetensors":
        return "weights that the checkpoint does not name"
    if not stat.S_ISREG(_mode_behind_links(path)):
        return "no regular file"
    return None


def _mode_behind_links(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is a link to a missing file", hint="download the model again"
        ) from None


def _refuse_foreign_link(path: Path, folder: Path) -> None:
    """A model must not bring along, and later publish, a file of its user's by a link to it."""
    target = path.resolve()
    in_hub_cache = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
    if not target.is_relative_to(folder.resolve()) and not in_hub_cache:
        raise CheckpointError(
            f"{path} is a link that leads out of the model's folder, to {target}",
            hint="put the file itself there, if it belongs to the model, or remove the link",
        )


def _raise(error: OSError) -> None:
    raise error
