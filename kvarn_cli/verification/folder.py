"""What a converted folder can be asked without its source: metadata, files, headers, hashes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME, Checkpoint, open_checkpoint
from kvarn_cli.checkpoint.hashing import hash_file, new_hash
from kvarn_cli.checkpoint.shard_stream import read_blocks, rows_at_once
from kvarn_cli.checkpoint.sidecars import OTHER_WEIGHT_SUFFIXES
from kvarn_cli.checkpoint.strict_json import read_object
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
            f"{metadata.cache.dtype}, V's rotation {metadata.rotations.value.where}",
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


def rotated_tensors(metadata: KVarNConfig, names: Mapping[str, object]) -> dict[str, bool]:
    """Tensors that hold V's rotation, and whether it acts on their rows (V) or columns (O).

    Args:
        metadata: of a converted folder.
        names: the tensors that there are.
    """
    rotated = {}
    if metadata.fused:
        for application in metadata.rotations.value.apply:
            on_rows = application.location == "weight_output"
            for module in application.targets:
                rotated[f"{module}.weight"] = on_rows
                if on_rows and f"{module}.bias" in names:
                    rotated[f"{module}.bias"] = True
    return rotated


def _read_manifest(folder: Path) -> Manifest:
    try:
        return Manifest.from_json((folder / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / MANIFEST_NAME}: {error.strerror}") from error


def _rotation_problems(
    metadata: KVarNConfig, checkpoint: Checkpoint, manifest: Manifest
) -> Iterator[str]:
    rotated = rotated_tensors(metadata, checkpoint.weight_map)
    width = metadata.rotations.value.head_dim
    for name, on_rows in rotated.items():
        if name not in checkpoint.weight_map:
            yield f"{name} should hold V's rotation, but there is no such tensor"
        elif (checkpoint.info(name).shape or (0,))[0 if on_rows else -1] % width:
            shape = list(checkpoint.info(name).shape)
            yield f"{name} has shape {shape}, which holds no whole heads of width {width}"
    for name in sorted(rotated.keys() ^ manifest.tensors.keys()):
        where = "the metadata" if name in rotated else MANIFEST_NAME
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
