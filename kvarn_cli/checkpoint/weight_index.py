"""Which weight files a checkpoint consists of: its index, or one file alone."""

from collections.abc import Mapping
from pathlib import Path, PurePath

from kvarn_cli.checkpoint.strict_json import quoted, read_object
from kvarn_cli.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """The index's map from tensor name to file name, or None where there is no index.

    Every file name is a plain name, so that it cannot lead out of the folder.

    Raises:
        CheckpointError: the index is broken, names anything else than a file beside it, or lies
            beside a single file of weights that it does not name.
    """
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map with tensors")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            said = quoted(shard) if isinstance(shard, str) else "no file name"
            raise CheckpointError(
                f"{path} places tensor {quoted(tensor)} in {said}; "
                "it must name a .safetensors file beside it"
            )
    if not names_single_file(weight_map) and (folder / SINGLE_FILE_NAME).exists():
        raise two_models(
            str(folder),
            hint=f"one of the two is out of date: move away {SINGLE_FILE_NAME}, or the index with "
            "the files that it names",
        )
    return weight_map


def names_single_file(weight_map: Mapping[str, str]) -> bool:
    """Whether the index is of the file that transformers loads first, where there is one."""
    return SINGLE_FILE_NAME in weight_map.values()


def two_models(where: str, hint: str) -> CheckpointError:
    """The refusal of an index beside a single file that it does not name."""
    return CheckpointError(
        f"{where} has a {INDEX_NAME} that names other files than the {SINGLE_FILE_NAME} beside it, "
        "which transformers would load in their place",
        hint=hint,
    )


def shard_names(weight_map: dict[str, str] | None) -> list[str]:
    """The weight files that the index names, or the one file of a checkpoint without index."""
    return [SINGLE_FILE_NAME] if weight_map is None else sorted(set(weight_map.values()))


def _is_plain_name(shard: str) -> bool:
    return (
        shard.endswith(".safetensors")
        and shard.isprintable()
        and "\\" not in shard
        and PurePath(shard).name == shard
    )
