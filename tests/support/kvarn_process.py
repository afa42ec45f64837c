"""The real `kvarn`, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hub_process import Outcome

KVARN = [sys.executable, "-m", "kvarn_cli"]
_NOT_PASSED_ON = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TERM", "COLUMNS", "HF_TOKEN")


def environment(**more: str) -> dict[str, str]:
    """The environment of a `kvarn` that is offline, plain and on one thread."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more


def run_kvarn(*arguments: str | Path, **more_environment: str) -> Outcome:
    """Run `kvarn` with its output piped; whatever happens, no control characters may come."""
    done = subprocess.run(
        [*KVARN, *map(str, arguments)],
        env=environment(**more_environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert_plain(done.stdout + done.stderr)
    return Outcome(done.returncode, done.stdout, done.stderr)


def assert_plain(text: str) -> None:
    """No control characters but the end of a line."""
    assert all(character.isprintable() or character == "\n" for character in text)


def assert_refused(outcome: Outcome, exit_code: int, *words: str) -> None:
    """The exit code, and an explanation on stderr that holds the words; nothing on stdout."""
    assert outcome.exit_code == exit_code, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "error: " in outcome.stderr
    for word in words:
        assert word in outcome.stderr
    assert outcome.stdout == ""


def error_of(outcome: Outcome) -> dict[str, Any]:
    """What the one JSON document on stdout says went wrong; it agrees with the exit code."""
    error: dict[str, Any] = json.loads(outcome.stdout)["error"]
    assert error["exit_code"] == outcome.exit_code
    assert error["message"] in outcome.stderr
    assert error["hint"] in outcome.stderr
    return error
