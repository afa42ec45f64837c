"""What the Hub's client raises, told in one sentence with what to do about it."""

import re

from huggingface_hub import errors

from kvarn_cli.errors import HubError

_LOG_IN = "log in with `hf auth login` or pass --token"
_OFFLINE = (
    "the Hub is offline or cannot be reached, and the cache does not hold it whole",
    "check the network and HF_HUB_OFFLINE, or name a local folder",
)
_ANSWERS: dict[type[Exception], tuple[str, str]] = {
    errors.GatedRepoError: (
        "access to it is gated",
        f"ask for access on its page, then {_LOG_IN}",
    ),
    errors.RepositoryNotFoundError: (
        "it does not exist, or is private",
        f"check the name; if it is private, {_LOG_IN}",
    ),
    errors.RevisionNotFoundError: (
        "it has no such revision",
        "--revision takes a branch, a tag or a commit",
    ),
    errors.OfflineModeIsEnabled: _OFFLINE,
    errors.LocalEntryNotFoundError: _OFFLINE,
}
_STATUS_HINTS = {
    401: _LOG_IN,
    403: f"check what the token may do, or {_LOG_IN}",
    429: "the Hub limits requests; wait some minutes, then run the same command again",
}
_TOKEN = re.compile(r"\bhf_\w{16,}")


def hub_error(error: Exception, action: str, *, token: str | None = None) -> HubError:
    """Translate an error of huggingface_hub, or of the HTTP client under it.

    Args:
        error: what was raised.
        action: what failed, e.g. `cannot download org/name`.
        token: the token in use; it, and whatever looks like a token, is blotted out.

    Returns:
        The error to raise `from None`: the original may show the token in a traceback.
    """
    reason, hint = _explain(error)
    message = f"{action}: {reason}"
    if token:
        message = message.replace(token, "(token)")
    return HubError(_TOKEN.sub("(token)", message), hint=hint)


def _explain(error: BaseException) -> tuple[str, str]:
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        return _explain(error.__cause__)
    for kind, answer in _ANSWERS.items():
        if isinstance(error, kind):
            return answer
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror, "check the space and the rights of the folder it is stored in"
    return (
        f"the network failed ({type(error).__name__}: {error})",
        "check the network; the same command continues where it stopped",
    )


def _explain_status(error: errors.HfHubHTTPError) -> tuple[str, str]:
    status = error.response.status_code
    reason = f"the Hub answered with status {status}"
    if error.server_message:
        reason += f" ({error.server_message})"
    return reason, _STATUS_HINTS.get(status, "run the same command again later")
