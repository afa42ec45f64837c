"""From what the user calls a model to a folder on disk."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from kvarn_cli.checkpoint.hub_errors import hub_error
from kvarn_cli.checkpoint.sidecars import ORIGINAL_FOLDER, OTHER_WEIGHT_SUFFIXES
from kvarn_cli.checkpoint.weight_index import read_weight_map, shard_names
from kvarn_cli.errors import UsageError

_SNAPSHOT = re.compile(r"/(?:models--(?P<repo>[^/]+)/)?snapshots/(?P<commit>[0-9a-f]{40})")
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Source:
    """A model's folder and where it came from.

    Attributes:
        folder: holds the files; only to be read, as it may be the Hub's shared cache.
        name: the Hub id, or the name of a local folder.
        revision: the commit on the Hub, or None where it is not known.
    """

    folder: Path
    name: str
    revision: str | None


def resolve_source(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
) -> Source:
    """Find a local folder, or else download a model from the Hub into its cache.

    Args:
        model: a path, or a Hub id such as `org/name`. An existing folder goes first.
        revision: branch, tag or commit on the Hub.
        token: Hub token; without it the one that the user has logged in with.
        cache_dir: the Hub's cache, where it is not in its usual place.

    Raises:
        UsageError: no such folder, no valid Hub id, or arguments that contradict each other.
        HubError: the Hub or the network did not deliver.
        CheckpointError: the model's index is broken.
    """
    folder = _find_locally(model)
    if folder is None:
        return _download(model, revision, token, cache_dir)
    if revision is not None:
        raise UsageError(
            f"{model} is a local folder, which has no revisions",
            hint="leave out --revision, or give the model's Hub id",
        )
    return _describe(folder)


def _find_locally(model: str) -> Path | None:
    looks_like_path = model.startswith((".", "/", "~"))
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise UsageError(f"cannot find {model}: {error}") from error
    if model and path.is_dir():
        return path
    if model and path.exists():
        raise UsageError(f"{model} is a file", hint="name the folder that holds config.json")
    if looks_like_path:
        raise UsageError(f"the folder {model} does not exist")
    return None


def _describe(folder: Path) -> Source:
    """A local folder's source; a snapshot in a Hub cache still tells its id and commit."""
    resolved = folder.resolve()
    name = resolved.name if folder.name in ("", "..") else folder.name
    snapshot = _SNAPSHOT.search(resolved.as_posix())
    if snapshot is None or snapshot.end() != len(resolved.as_posix()):
        return Source(folder, name, None)
    repository = snapshot["repo"]
    return Source(folder, repository.replace("--", "/") if repository else name, snapshot["commit"])


def _download(
    model: str, revision: str | None, token: str | None, cache_dir: Path | None
) -> Source:
    """Fetch the small files, then the weights that they name: nothing twice, nothing unused."""
    token = (token or "").strip() or None
    if token and not _TOKEN.fullmatch(token):
        raise UsageError("the token has characters that no token has", hint="copy it once more")
    other_weights = [f"*{suffix}" for suffix in (".safetensors", *OTHER_WEIGHT_SUFFIXES)]
    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                ignore_patterns=[*other_weights, f"{ORIGINAL_FOLDER}/*"],
            )
        )
        shards = shard_names(read_weight_map(folder))
        snapshot_download(
            model,
            revision=folder.name,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=[glob.escape(shard) for shard in shards],
        )
    except HFValidationError as error:
        raise UsageError(
            f"{model!r} is neither an existing folder nor a Hub id such as org/name"
        ) from error
    except (OSError, RuntimeError, httpx2.HTTPError) as error:
        raise hub_error(error, f"cannot download {model}", token=token) from None
    return Source(folder, model, folder.name)
