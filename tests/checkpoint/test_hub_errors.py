import errno

import httpx2
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import hf_raise_for_status

from kvarn_cli.checkpoint.hub_errors import hub_error
from kvarn_cli.errors import HubError

SECRET = "hf_" + "Secret" * 6


def raised_for(status: int, headers: dict[str, str] | None = None) -> errors.HfHubHTTPError:
    """The error that the Hub's own client makes of an answer."""
    request = httpx2.Request("GET", "https://huggingface.co/api/models/org/name")
    with pytest.raises(errors.HfHubHTTPError) as refusal:
        hf_raise_for_status(httpx2.Response(status, headers=headers, request=request))
    return refusal.value


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


LOCAL = errors.LocalEntryNotFoundError("not in the cache")
CASES: dict[str, tuple[Exception, str, str]] = {
    "no login, or no such name": (raised_for(401), "does not exist, or is private", "--token"),
    "no such name": (
        raised_for(404, {"X-Error-Code": "RepoNotFound"}),
        "does not exist, or is private",
        "hf auth login",
    ),
    "gated": (raised_for(403, {"X-Error-Code": "GatedRepo"}), "gated", "ask for access"),
    "revision": (raised_for(404, {"X-Error-Code": "RevisionNotFound"}), "revision", "--revision"),
    "wrong token": (
        raised_for(401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "status 401 (Invalid credentials in Authorization header)",
        "hf auth login",
    ),
    "forbidden": (raised_for(403), "status 403", "what the token may do"),
    "rate limit": (raised_for(429), "status 429", "wait some minutes"),
    "server": (raised_for(503), "status 503", "again later"),
    "server, nothing in the cache": (caused(LOCAL, raised_for(500)), "status 500", "again later"),
    "offline mode": (errors.OfflineModeIsEnabled("no"), "the Hub is offline", "HF_HUB_OFFLINE"),
    "part of a snapshot": (
        errors.IncompleteSnapshotError("part", "/cache"),
        "the cache does not hold it whole",
        "local folder",
    ),
    "no network": (
        caused(errors.LocalEntryNotFoundError("x"), httpx2.ConnectError("unknown host")),
        "the network failed (ConnectError: unknown host)",
        "check the network",
    ),
    "hang-up": (httpx2.ReadTimeout("slow"), "ReadTimeout: slow", "continues where it stopped"),
    "disk full": (OSError(errno.ENOSPC, "No space left on device"), "No space left", "space"),
    "storage client": (RuntimeError("CAS refused"), "RuntimeError: CAS refused", "network"),
}


@pytest.mark.parametrize("case", CASES)
def test_says_what_failed_and_what_to_do(case: str) -> None:
    error, words, hint = CASES[case]
    told = hub_error(error, "cannot download org/name")
    assert isinstance(told, HubError)
    assert told.exit_code == 4
    assert str(told).startswith("cannot download org/name: ")
    assert words in str(told)
    assert hint in told.hint


@pytest.mark.parametrize(
    ("secret", "token"), [(SECRET, None), (SECRET, SECRET), ("no-usual-form", "no-usual-form")]
)
def test_a_token_in_the_error_is_blotted_out(secret: str, token: str | None) -> None:
    error = httpx2.LocalProtocolError(f"Illegal header value b'Bearer {secret} '")
    told = hub_error(error, "cannot download org/name", token=token)
    assert secret not in str(told) + told.hint
    assert "Bearer (token) " in str(told)
