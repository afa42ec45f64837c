"""From what the user calls a model to a folder on disk."""

import contextlib
import glob
import re
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import file_exists, snapshot_download
from huggingface_hub.errors import HFValidationError

from kvarn_cli.checkpoint.hub_errors import hub_error
from kvarn_cli.checkpoint.sidecars import ORIGINAL_FOLDER, OTHER_WEIGHT_SUFFIXES
from kvarn_cli.checkpoint.weight_index import (
    SINGLE_FILE_NAME,
    names_single_file,
    read_weight_map,
    shard_names,
    two_models,
)
from kvarn_cli.errors import UsageError

_SNAPSHOT = re.compile(r"/(?:models--(?P<repo>[^/]+)/)?snapshots/(?P<commit>[0-9a-f]{40})")
_TOKEN = re.compile(r"[!-~]+")
_ALL_WEIGHTS = [f"*{suffix}" for suffix in (".safetensors", *OTHER_WEIGHT_SUFFIXES)]


@dataclass(frozen=True)
class Source:
    """A model's folder and where it came from.

    Attributes:
        folder: holds the files; only to be read, as it may be the Hub's shared cache.
        name: the Hub id, or the name of a local folder.
        revision: the commit on the Hub, or None where it is not known.
        from_hub: whether the folder is a download, and not one that the user named.
    """

    folder: Path
    name: str
    revision: str | None
    from_hub: bool = False


def resolve_source(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    weights: bool = True,
) -> Source:
    """Find a local folder, or else download a model from the Hub into its cache.

    Args:
        model: a path, or a Hub id such as `org/name`. An existing folder goes first.
        revision: branch, tag or commit on the Hub.
        token: Hub token; without it the one that the user has logged in with.
        cache_dir: the Hub's cache, where it is not in its usual place.
        weights: False downloads the small files alone, to be looked at before `fetch_weights`.

    Raises:
        UsageError: no such folder, no valid Hub id, or arguments that contradict each other.
        HubError: the Hub or the network did not deliver.
        CheckpointError: the model's index is broken.
    """
    folder = _find_locally(model)
    if folder is not None:
        if revision is not None:
            raise UsageError(
                f"{model} is a local folder, which has no revisions",
                hint="leave out --revision, or give the model's Hub id",
            )
        return _describe(folder)
    ignored = [*_ALL_WEIGHTS, f"{ORIGINAL_FOLDER}/*"]
    folder = _download(model, revision, token, cache_dir, ignore_patterns=ignored)
    source = Source(folder, model, folder.name, from_hub=True)
    _refuse_two_models(source, token)
    if weights:
        fetch_weights(source, token=token, cache_dir=cache_dir)
    return source


def fetch_weights(
    source: Source, *, token: str | None = None, cache_dir: Path | None = None
) -> None:
    """Complete a download by the weight files that its index names; a local folder is left alone.

    Args:
        source: what `resolve_source` found.
        token: as given to `resolve_source`.
        cache_dir: as given to `resolve_source`.

    Raises:
        HubError: the Hub or the network did not deliver.
        CheckpointError: the model's index is broken.
    """
    if source.from_hub:
        names = [glob.escape(name) for name in shard_names(read_weight_map(source.folder))]
        _download(source.name, source.revision, token, cache_dir, allow_patterns=names)


def _refuse_two_models(source: Source, token: str | None) -> None:
    """Raise where the repository has a single file that its index does not name.

    Where the Hub cannot be asked, the cache is all that any loader sees.
    """
    weight_map = read_weight_map(source.folder)
    if weight_map is None or names_single_file(weight_map):
        return
    with contextlib.suppress(OSError, RuntimeError, httpx2.HTTPError):
        if file_exists(
            source.name, SINGLE_FILE_NAME, revision=source.revision, token=_plain(token)
        ):
            raise two_models(
                f"{source.name} on the Hub",
                hint="download the files that are right into a folder, and name that: "
                f"hf download {source.name} --exclude {SINGLE_FILE_NAME} --local-dir FOLDER",
            )


def _find_locally(model: str) -> Path | None:
    looks_like_path = model.startswith((".", "/", "~"))
    try:
        path = Path(model).expanduser()
        if model and path.is_dir():
            return path
        if model and path.exists():
            raise UsageError(f"{model} is a file", hint="name the folder that holds config.json")
    except (RuntimeError, OSError) as error:
        raise UsageError(f"cannot find {model}: {error}") from error
    if looks_like_path:
        raise UsageError(f"the folder {model} does not exist")
    return None


def _plain(token: str | None) -> str | None:
    token = (token or "").strip() or None
    if token and not _TOKEN.fullmatch(token):
        raise UsageError("the token has characters that no token has", hint="copy it once more")
    return token


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
    model: str,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    *,
    allow_patterns: list[str] | None = None,
    ignore_patterns: list[str] | None = None,
) -> Path:
    """Download what the patterns choose, and give the snapshot's folder, named by its commit."""
    token = _plain(token)
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                allow_patterns=allow_patterns,
                ignore_patterns=ignore_patterns,
            )
        )
    except HFValidationError as error:
        raise UsageError(
            f"{model!r} is neither an existing folder nor a Hub id such as org/name"
        ) from error
    except (OSError, RuntimeError, httpx2.HTTPError) as error:
        raise hub_error(error, f"cannot download {model}", token=token) from None
