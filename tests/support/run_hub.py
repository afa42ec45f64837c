"""Runs the Hub's half of the core in a process of its own and prints the outcome as JSON.

    python run_hub.py push FOLDER REPO_ID [--private] [--revision R] [--token T] …
    python run_hub.py source MODEL [--revision R] [--token T] [--cache-dir DIR]
    python run_hub.py headers MODEL [--revision R] [--token T] [--cache-dir DIR]

Waiting is cut short; the seconds asked for stand in the outcome. Errors are printed as the command
line prints them, with a traceback besides, and end with their own exit code.
"""

import argparse
import dataclasses
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.remote_headers import RemoteHeaders
from kvarn_cli.checkpoint.source import resolve_source
from kvarn_cli.errors import KvarnError
from kvarn_cli.hub import plan_push, push

waits: list[float] = []


def _sleep(seconds: float, real_sleep: Any = time.sleep) -> None:
    waits.append(seconds)
    real_sleep(0.01)


def _push(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = plan_push(arguments.folder, arguments.repo_id)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        print(text, file=sys.stderr)

    result = push(
        plan,
        private=arguments.private,
        revision=arguments.revision,
        commit_message=arguments.commit_message,
        token=arguments.token,
        note=note,
    )
    print(repr(plan), repr(result), file=sys.stderr)
    return {"result": dataclasses.asdict(result), "notes": notes, "waits": waits}


def _source(arguments: argparse.Namespace) -> dict[str, Any]:
    source = resolve_source(
        arguments.model,
        revision=arguments.revision,
        token=arguments.token,
        cache_dir=arguments.cache_dir,
    )
    return {"folder": str(source.folder), "name": source.name, "revision": source.revision}


def _headers(arguments: argparse.Namespace) -> dict[str, Any]:
    source = resolve_source(
        arguments.model,
        revision=arguments.revision,
        token=arguments.token,
        cache_dir=arguments.cache_dir,
        weights=False,
    )
    remote = RemoteHeaders(source.name, source.revision, arguments.token)
    checkpoint = open_checkpoint(source.folder, remote)
    return {
        "tensors": {name: checkpoint.info(name).shape for name in checkpoint.weight_map},
        "shard_bytes": checkpoint.shard_bytes,
        "requests": remote.requests,
        "received_bytes": remote.received_bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    reading = commands.add_parser("headers")
    reading.add_argument("model")
    reading.add_argument("--cache-dir", type=Path)
    reading.set_defaults(run=_headers)
    pushing = commands.add_parser("push")
    pushing.add_argument("folder", type=Path)
    pushing.add_argument("repo_id")
    pushing.add_argument("--private", action="store_true")
    pushing.add_argument("--commit-message")
    pushing.set_defaults(run=_push)
    finding = commands.add_parser("source")
    finding.add_argument("model")
    finding.add_argument("--cache-dir", type=Path)
    finding.set_defaults(run=_source)
    for command in (pushing, finding, reading):
        command.add_argument("--revision")
        command.add_argument("--token")
    arguments = parser.parse_args()
    time.sleep = _sleep
    try:
        outcome = arguments.run(arguments)
    except KvarnError as error:
        traceback.print_exc()
        print(f"waits: {waits}\nerror: {error}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
