"""What a converted folder can be asked without its source: metadata, files, headers, hashes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME, Checkpoint, open_checkpoint
from kvarn_cli.checkpoint.hashing import hash_file, new_hash
from kvarn_cli.checkpoint.sidecars import OTHER_WEIGHT_SUFFIXES
from kvarn_cli.checkpoint.strict_json import read_object
from kvarn_cli.checkpoint.tensor_blocks import read_blocks, rows_at_once
from kvarn_cli.errors import CheckpointError, KvarnError, UsageError
from kvarn_cli.metadata import MANIFEST_NAME, MODEL_CARD_NAME, KVarNConfig, Manifest
from kvarn_cli.progress import Report, silent


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    Attributes:
        name: what was looked at.
        result: one line that says what was found.
        problems: one sentence each; empty when all is well.
    """

    name: str
    result: str
    problems: tuple[str, ...] = ()


def verify_folder(
    folder: Path, *, hashes: bool = True, report: Report = silent
) -> tuple[Check, ...]:
    """Check everything that can be known from the folder alone.

    Args:
        folder: as `kvarn convert` left it.
        hashes: read every file and compare its hash; without it only sizes are compared.
        report: told the bytes read.

    Returns:
        The checks that could be made; later ones need what earlier ones read.

    Raises:
        UsageError: there is no such folder, or it was not converted.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    try:
        metadata = read_metadata(folder)
        manifest = _read_manifest(folder)
        checkpoint = open_checkpoint(folder)
    except UsageError:
        raise
    except KvarnError as error:
        return (Check("metadata and headers", "broken", (str(error),)),)
    checks = [
        Check(
            "metadata",
            f"{metadata.cache.dtype}, {metadata.rotated}'s rotation "
            f"{metadata.rotations.value.where}",
            tuple(_rotation_problems(metadata, checkpoint, manifest)),
        ),
        Check(
            "headers",
            f"{len(checkpoint.weight_map)} tensors in {len(checkpoint.shards)} files",
        ),
        Check(
            "files",
            f"{len(manifest.files)} files of the manifest, by size",
            tuple(_size_problems(folder, manifest)),
        ),
        Check("stray weights", "none", tuple(_stray_weights(checkpoint, manifest))),
    ]
    if hashes:
        problems = tuple(_hash_problems(checkpoint, manifest, report))
        checks.append(
            Check(
                "hashes",
                f"{len(manifest.files)} files and {len(manifest.tensors)} rotated tensors",
                problems,
            )
        )
    return tuple(checks)


def require_sound(checks: tuple[Check, ...], folder: Path) -> None:
    """Turn problems into an error.

    Raises:
        CheckpointError: naming the first problem; all stand in its details.
    """
    problems = [problem for check in checks for problem in check.problems]
    if not problems:
        return
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise CheckpointError(
        f"{folder} is not sound: {problems[0]}{more}",
        hint="convert again with --overwrite; only README.md may be edited",
        details={"problems": problems},
    )


def read_metadata(folder: Path) -> KVarNConfig:
    """The `kvarn_config` of a converted folder.

    Raises:
        UsageError: there is none.
        CheckpointError: it is broken.
    """
    metadata = KVarNConfig.from_config_dict(read_object(folder / CONFIG_NAME))
    if metadata is None:
        raise UsageError(
            f"{folder} is not a converted model: its {CONFIG_NAME} has no kvarn_config",
            hint="convert it first: kvarn convert MODEL --output DIR",
        )
    return metadata


def _read_manifest(folder: Path) -> Manifest:
    try:
        return Manifest.from_json((folder / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / MANIFEST_NAME}: {error.strerror}") from error


def _rotation_problems(
    metadata: KVarNConfig, checkpoint: Checkpoint, manifest: Manifest
) -> Iterator[str]:
    rotation = metadata.rotations.value
    for name, part in rotation.tensors.items():
        if name not in checkpoint.weight_map:
            yield (
                f"{name} should hold the rotation of {metadata.rotated}, but there is no such "
                "tensor"
            )
            continue
        shape = checkpoint.info(name).shape
        channels = shape[part.axis] if part.axis < len(shape) else 0
        starts = part.first_channels
        steps = [after - before for before, after in pairwise(starts)]
        if (
            not starts
            or starts[-1] + rotation.head_dim > channels
            or any(start % rotation.head_dim for start in starts)
            or any(step <= 0 for step in steps)
        ):
            yield (
                f"{name} has shape {list(shape)}, which does not hold heads of width "
                f"{rotation.head_dim} where the metadata places them"
            )
    for name in rotation.folded_norms:
        if name not in checkpoint.weight_map:
            yield f"{name} should be a folded norm, but there is no such tensor"
        elif checkpoint.info(name).shape != (rotation.head_dim,):
            yield f"{name} should be a folded norm of {rotation.head_dim} channels"
    for name in sorted(rotation.changed_tensors ^ manifest.tensors.keys()):
        where = "the metadata" if name in rotation.changed_tensors else MANIFEST_NAME
        yield f"{name} is a rotated tensor in {where} only"


def _size_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    if CONFIG_NAME not in manifest.files:
        yield f"{MANIFEST_NAME} does not list {CONFIG_NAME}"
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != record.size_bytes:
            yield f"{name} has {path.stat().st_size} bytes, not {record.size_bytes}"


def _stray_weights(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[str]:
    for name in checkpoint.shards.keys() - manifest.files.keys():
        yield f"{name} is named by the index, but not by {MANIFEST_NAME}"
    for path in checkpoint.folder.rglob("*"):
        name = path.relative_to(checkpoint.folder).as_posix()
        is_weights = name.endswith((".safetensors", *OTHER_WEIGHT_SUFFIXES))
        if is_weights and name not in manifest.files:
            yield f"{name} is no part of the conversion; engines may load or count it"


def _hash_problems(checkpoint: Checkpoint, manifest: Manifest, report: Report) -> Iterator[str]:
    total = sum(record.size_bytes for record in manifest.files.values())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report("checking hashes", done, total)

    for name, record in manifest.files.items():
        path = checkpoint.folder / name
        if name == MODEL_CARD_NAME or not path.is_file():
            continue
        try:
            found = hash_file(path, [record.algorithm], advance)[record.algorithm]
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        if found != record.digest:
            yield f"{name} has another hash than the conversion wrote"
    for name, sha256 in manifest.tensors.items():
        if name in checkpoint.weight_map:
            digest = new_hash("sha256")
            shard = checkpoint.folder / checkpoint.weight_map[name]
            info = checkpoint.info(name)
            for block in read_blocks(shard, info, rows_at_once(info)):
                digest.update(block)
            if digest.hexdigest() != sha256:
                yield f"tensor {name} has another SHA-256 than the conversion wrote"
