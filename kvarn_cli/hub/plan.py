"""What a push would upload, checked before a byte leaves the machine.

Only what the manifest lists is uploaded, with the manifest itself and the model card. Anything
else in the folder (caches, `.env`, editor backups) stays here and is named.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME
from kvarn_cli.checkpoint.hashing import hash_file
from kvarn_cli.checkpoint.strict_json import parse_object
from kvarn_cli.errors import CheckpointError, HubError, UsageError
from kvarn_cli.hub.card import ModelCardText, write_card
from kvarn_cli.metadata import (
    MANIFEST_NAME,
    MODEL_CARD_NAME,
    FileRecord,
    KVarNConfig,
    Manifest,
)
from kvarn_cli.progress import Report, silent

MAX_FILE_BYTES = 50 * 10**9
"""The largest file the Hub takes, as its documentation says."""


@dataclass(frozen=True)
class PlannedFile:
    """One file to upload.

    Attributes:
        path: in the repository, relative, with forward slashes.
        size_bytes: of its content.
        sha256: of its content, in hexadecimal.
        content: where it lies, or the bytes themselves.
    """

    path: str
    size_bytes: int
    sha256: str
    content: Path | bytes = field(repr=False)

    @classmethod
    def from_bytes(cls, path: str, content: bytes) -> "PlannedFile":
        """A file that lies in memory."""
        return cls(path, len(content), hashlib.sha256(content).hexdigest(), content)


@dataclass(frozen=True)
class PushPlan:
    """A checked folder and what of it goes where.

    Attributes:
        folder: the converted folder.
        repo_id: the repository, `namespace/name`.
        config: the folder's `kvarn_config`.
        files: to upload; the last two are the manifest and the model card.
        strays: what lies in the folder and stays there, relative; a folder ends with a slash.
        card: the model card, and where its text comes from.
    """

    folder: Path
    repo_id: str
    config: KVarNConfig
    files: tuple[PlannedFile, ...]
    strays: tuple[str, ...]
    card: ModelCardText

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def plan_push(folder: Path, repo_id: str, *, progress: Report = silent) -> PushPlan:
    """Check a converted folder against its manifest and write its model card, offline.

    Args:
        folder: as `kvarn convert` left it.
        repo_id: `namespace/name`.
        progress: told the bytes checked.

    Raises:
        UsageError: the folder is not converted, the repository's name is none, or a model card
            edited by hand is broken.
        CheckpointError: a file is missing or changed, or the folder is half-written.
        HubError: a file is larger than the Hub takes.
    """
    _check_repo_id(repo_id)
    config, manifest_bytes = _read_metadata(folder)
    manifest = Manifest.from_json(manifest_bytes)
    records = {path: record for path, record in manifest.files.items() if path != MODEL_CARD_NAME}
    if CONFIG_NAME not in records:
        raise CheckpointError(f"{MANIFEST_NAME} does not list {CONFIG_NAME}")
    _check_sizes(folder, records)
    card = write_card(config, repo_id, _read_if_there(folder / MODEL_CARD_NAME))
    sha256 = _check_hashes(folder, records, progress)
    files = [
        PlannedFile(path, record.size_bytes, sha256[path], folder / path)
        for path, record in sorted(records.items())
    ]
    files.append(PlannedFile.from_bytes(MANIFEST_NAME, manifest_bytes))
    files.append(PlannedFile.from_bytes(MODEL_CARD_NAME, card.text.encode()))
    strays = _find_strays(folder, {file.path for file in files})
    return PushPlan(folder, repo_id, config, tuple(files), strays, card)


def _check_repo_id(repo_id: str) -> None:
    hint = "it looks like my-name/my-model"
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"{repo_id!r} is no repository name", hint=hint) from error
    if "/" not in repo_id:
        raise UsageError(f"{repo_id!r} does not say whose repository it is", hint=hint)


def _read_metadata(folder: Path) -> tuple[KVarNConfig, bytes]:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if folder.resolve().name.endswith(".incomplete"):
        raise CheckpointError(
            f"{folder} is half-written", hint="run kvarn convert again, it makes the folder whole"
        )
    config = _read_if_there(folder / CONFIG_NAME)
    block = _parse_block(config, folder / CONFIG_NAME) if config is not None else None
    if block is None:
        raise UsageError(
            f"{folder} is not a converted model: its {CONFIG_NAME} has no kvarn_config",
            hint="convert it first: kvarn convert MODEL --output DIR",
        )
    manifest = _read_if_there(folder / MANIFEST_NAME)
    if manifest is None:
        raise CheckpointError(
            f"{folder / MANIFEST_NAME} is missing, so the folder cannot be checked",
            hint="convert again, or copy the manifest along with the other files",
        )
    return block, manifest


def _parse_block(content: bytes, path: Path) -> KVarNConfig | None:
    config: dict[str, Any] = parse_object(content, str(path))
    return KVarNConfig.from_config_dict(config)


def _read_if_there(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _check_sizes(folder: Path, records: dict[str, FileRecord]) -> None:
    for path, record in records.items():
        try:
            size = (folder / path).stat().st_size
        except OSError as error:
            raise _changed(folder / path, f"cannot be read ({error.strerror})") from error
        if size != record.size_bytes:
            raise _changed(folder / path, f"has {size} bytes, not {record.size_bytes}")
        if size > MAX_FILE_BYTES:
            raise HubError(
                f"{folder / path} has {size / 1e9:.1f} GB; the Hub takes files up to "
                f"{MAX_FILE_BYTES // 10**9} GB",
                hint="save the base model in smaller shards "
                '(save_pretrained(max_shard_size="5GB")) and convert again',
            )


def _check_hashes(folder: Path, records: dict[str, FileRecord], progress: Report) -> dict[str, str]:
    """Compare each file with its own hash; in the same reading take SHA-256, the Hub's hash."""
    total = sum(record.size_bytes for record in records.values())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("checking files", done, total)

    sha256 = {}
    for path, record in records.items():
        try:
            found = hash_file(folder / path, {"sha256", record.algorithm}, advance)
        except OSError as error:
            raise _changed(folder / path, f"cannot be read ({error.strerror})") from error
        if found[record.algorithm] != record.digest:
            raise _changed(folder / path, "has another hash")
        sha256[path] = found["sha256"]
    return sha256


def _changed(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {how}: it is not the file that the conversion wrote",
        hint="convert again with --overwrite; only README.md may be edited",
    )


def _find_strays(folder: Path, planned: Iterable[str]) -> tuple[str, ...]:
    paths = {PurePosixPath(path) for path in planned}
    folders = {parent for path in paths for parent in path.parents}
    strays = []
    for parent, folder_names, file_names in os.walk(folder):
        place = PurePosixPath(Path(parent).relative_to(folder).as_posix())
        strays += [str(place / name) for name in file_names if place / name not in paths]
        foreign = [name for name in folder_names if place / name not in folders]
        strays += [f"{place / name}/" for name in foreign]
        folder_names[:] = [name for name in folder_names if name not in foreign]
    return tuple(sorted(strays))
