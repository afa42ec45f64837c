"""Subprocesses that take the fake Hub for the real one."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_hub import READ_TOKEN, WRITE_TOKEN, FakeHub

Run = Callable[..., "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What a subprocess did."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> dict[str, Any]:
        """The JSON document it printed, after it ended well."""
        assert self.exit_code == 0, self.stderr
        answer: dict[str, Any] = json.loads(self.stdout)
        return answer


def run_python(
    hub: FakeHub,
    home: Path,
    arguments: list[str | Path],
    *,
    token: str | None = WRITE_TOKEN,
    **environment: str,
) -> Outcome:
    """Run this Python with the fake Hub's environment; whatever happens, no token may show.

    Args:
        hub: running.
        home: the process's HF_HOME.
        arguments: of the interpreter.
        token: in HF_TOKEN, or None to be logged out.
        environment: further variables.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=hub.environment(home, token) | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for secret in {WRITE_TOKEN, READ_TOKEN, token} - {None}:
        assert str(secret) not in done.stdout + done.stderr
    return Outcome(done.returncode, done.stdout, done.stderr)
