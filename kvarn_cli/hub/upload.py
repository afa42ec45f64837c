"""From a checked plan to one commit on the Hub.

Everything is compared with what the branch holds already, so a second run sends only what is
missing; large files that were sent before the commit are not sent again either. huggingface_hub
waits and tries again by itself while it uploads, but not while it creates a repository or a branch,
nor at the commit; here these do as well.
"""

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Final, TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.sha import git_hash

from kvarn_cli import __version__
from kvarn_cli.checkpoint.hub_errors import hub_error
from kvarn_cli.errors import HubError, UsageError
from kvarn_cli.hub.plan import PlannedFile, PushPlan

DEFAULT_BRANCH: Final = "main"

_LARGE_BYTES = 10_000_000
_WAITS_SECONDS = (1, 2, 4, 8, 8)
_LONGEST_WAIT_SECONDS = 310
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_TOKEN = re.compile(r"[!-~]+")

Note = Callable[[str], None]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    Attributes:
        url: of the repository.
        revision: the branch.
        commit: its newest commit, which holds every planned file.
        private: whether the repository can only be seen by its owners.
        uploaded: paths that this run added or replaced.
        unchanged: planned paths that were there already.
        others: paths that the branch holds besides, left as they are.
    """

    url: str
    revision: str
    commit: str
    private: bool
    uploaded: tuple[str, ...]
    unchanged: tuple[str, ...]
    others: tuple[str, ...]


def push(
    plan: PushPlan,
    *,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    note: Note = lambda _: None,
) -> PushResult:
    """Create the repository and the branch where they are missing, and upload the plan's files.

    Args:
        plan: from `plan_push`.
        private: create a private repository; without it the account's own default holds.
        revision: branch to commit to, made from `main` if it is new.
        commit_message: one line.
        token: Hub token with write access; without it the one that the user has logged in with.
        note: told what is going on, a sentence at a time.

    Raises:
        UsageError: the repository is public and `private` was asked for, or it holds other
            weights, which a loader would take for this model's.
        HubError: the Hub or the network failed. The same call continues where it stopped.
    """
    token = _usable_token(token)
    api = HfApi(token=token, library_name="kvarn", library_version=__version__)
    branch = revision or DEFAULT_BRANCH
    message = (
        commit_message or f"Upload {plan.config.base_model.name} for {plan.config.cache.dtype}"
    )
    with _told_plainly(f"cannot push to {plan.repo_id}", token):
        _retried(lambda: ModelCard(plan.card.text).validate(), note)
        url = _retried(
            lambda: api.create_repo(plan.repo_id, private=private or None, exist_ok=True), note
        )
        is_private = bool(_retried(lambda: api.model_info(url.repo_id), note).private)
        if private and not is_private:
            raise UsageError(
                f"{url.repo_id} exists already and is public",
                hint="make it private in its settings on the Hub, or push without --private",
            )
        if branch != DEFAULT_BRANCH and not branch.startswith("refs/"):
            _retried(lambda: api.create_branch(url.repo_id, branch=branch, exist_ok=True), note)
        present = _list_files(api, url.repo_id, branch)
        _refuse_other_weights(present, plan)
        missing = _missing(plan, present)
        if missing:
            commit = _upload(api, url.repo_id, branch, missing, message, note)
            present = _list_files(api, url.repo_id, commit)
            if still_missing := _missing(plan, present):
                raise HubError(
                    f"{url.repo_id} does not hold {still_missing[0].path} after the commit",
                    hint="see whether a .gitignore in the repository excludes it",
                )
        else:
            note(f"{url.repo_id} holds every file already")
            commit = _head(api, url.repo_id, branch, note)
    planned = [file.path for file in plan.files]
    uploaded = tuple(file.path for file in missing)
    return PushResult(
        url=str(url),
        revision=branch,
        commit=commit,
        private=is_private,
        uploaded=uploaded,
        unchanged=tuple(path for path in planned if path not in uploaded),
        others=tuple(sorted(present.keys() - set(planned))),
    )


def _usable_token(token: str | None) -> str:
    """The given token, or that of the login; checked, as an HTTP error would quote a broken one."""
    chosen = token or get_token()
    if not chosen:
        raise HubError(
            "you are not logged in to the Hub",
            hint="run `hf auth login`, set HF_TOKEN, or pass --token; the token needs write access "
            "(https://huggingface.co/settings/tokens)",
        )
    if not _TOKEN.fullmatch(chosen):
        raise UsageError("the token has characters that no token has", hint="copy it once more")
    return chosen


@contextmanager
def _told_plainly(action: str, token: str) -> Iterator[None]:
    """Turn what the client raises into a HubError that shows no token."""
    try:
        yield
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        cause: Exception = error
        while isinstance(cause, RuntimeError) and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        if isinstance(cause, ValueError) and not isinstance(cause, HfHubHTTPError):
            raise HubError(f"{action}: {str(cause).replace(token, '(token)')}") from None
        raise hub_error(cause, action, token=token) from None


def _retried(action: Callable[[], _Result], note: Note) -> _Result:
    """Call, and call again while the Hub is busy or hangs up: a bounded number of times."""
    for planned_wait in _WAITS_SECONDS:
        try:
            return action()
        except HfHubHTTPError as error:
            wait = _wait_seconds(error.response, planned_wait)
            if error.response.status_code not in _TRANSIENT or wait > _LONGEST_WAIT_SECONDS:
                raise
            reason = f"answers with status {error.response.status_code}"
        except JSONDecodeError:
            wait, reason = planned_wait, "answers with something that is no JSON"
        except httpx2.ConnectError:
            raise
        except httpx2.TransportError:
            wait, reason = planned_wait, "hung up"
        note(f"the Hub {reason}; trying again in {wait} s")
        time.sleep(wait)
    return action()


def _wait_seconds(response: httpx2.Response, planned: int) -> int:
    limit = parse_ratelimit_headers(response.headers)
    if limit is not None and limit.remaining == 0:
        return max(planned, limit.reset_in_seconds + 1)
    asked = response.headers.get("retry-after", "")
    return max(planned, int(asked)) if asked.isdigit() else planned


def _list_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _missing(plan: PushPlan, present: dict[str, RepoFile]) -> list[PlannedFile]:
    return [file for file in plan.files if not _is_same(file, present.get(file.path))]


def _is_same(file: PlannedFile, remote: RepoFile | None) -> bool:
    """Whether the Hub holds this content: LFS files are known by SHA-256, others by git's hash."""
    if remote is None or remote.size != file.size_bytes:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == file.sha256)
    content = file.content.read_bytes() if isinstance(file.content, Path) else file.content
    return bool(remote.blob_id == git_hash(content))


def _refuse_other_weights(present: dict[str, RepoFile], plan: PushPlan) -> None:
    planned = {file.path for file in plan.files}
    for path in present:
        is_weights = path.endswith((".safetensors", ".safetensors.index.json"))
        if is_weights and "/" not in path and path not in planned:
            raise UsageError(
                f"{plan.repo_id} holds {path}, which is not this model's: a loader could take it",
                hint="delete it there, or push to another repository or --revision",
            )


def _upload(
    api: HfApi, repo_id: str, branch: str, files: list[PlannedFile], message: str, note: Note
) -> str:
    """Send the large files one by one, then commit them all; returns the commit."""
    operations = {file.path: _operation(file) for file in files}
    large = [file for file in files if file.size_bytes >= _LARGE_BYTES]
    small = [operations[file.path] for file in files if file not in large]
    for number, file in enumerate(large, 1):
        note(f"uploading {file.path} ({file.size_bytes / 1e6:,.0f} MB), {number} of {len(large)}")
        api.preupload_lfs_files(
            repo_id, [operations[file.path]], revision=branch, free_memory=False
        )
    note(f"uploading {len(small)} small files, then committing")
    api.preupload_lfs_files(repo_id, small, revision=branch, free_memory=False)

    def commit() -> str:
        present = _list_files(api, repo_id, branch)
        missing = [
            operations[file.path] for file in files if not _is_same(file, present.get(file.path))
        ]
        if not missing:
            return _head(api, repo_id, branch, note)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = api.create_commit(repo_id, missing, commit_message=message, revision=branch)
        for warning in caught:
            note(str(warning.message))
        return made.oid

    return _retried(commit, note)


def _operation(file: PlannedFile) -> CommitOperationAdd:
    operation = CommitOperationAdd(file.path, file.content)
    operation.upload_info.sha256 = bytes.fromhex(file.sha256)
    return operation


def _head(api: HfApi, repo_id: str, branch: str, note: Note) -> str:
    commit = _retried(lambda: api.model_info(repo_id, revision=branch), note).sha
    if commit is None:
        raise HubError(f"the Hub names no commit of {repo_id} at {branch}")
    return commit
