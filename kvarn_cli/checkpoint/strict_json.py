"""JSON objects from files that nobody vouches for, read by the standard library."""

import json
from pathlib import Path
from typing import Any

from kvarn_cli.errors import CheckpointError

MAX_JSON_BYTES = 32_000_000
"""A parsed document takes up to ten times its bytes; no index or header in use comes near this."""

_MAX_VALUES = 2_000_000
_MAX_DEPTH = 100
_QUOTED_CHARACTERS = 200


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of at most `MAX_JSON_BYTES`; see `parse_object`.

    Raises:
        CheckpointError: the file is missing, unreadable, too large, or no JSON object.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing or no regular file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_JSON_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return parse_object(content, str(path))


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top level is an object and whose keys are unique.

    `Infinity` is taken, as some configurations hold it; text that cannot be encoded is not. The
    values are counted before any is made: a byte or two of JSON can become a hundred in memory.

    Args:
        content: the bytes of the document.
        where: what the errors call it, e.g. the path of the file.

    Raises:
        CheckpointError: the bytes are anything else.
    """
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(f"{where} has more than {MAX_JSON_BYTES} bytes")
    if sum(content.count(mark) for mark in b",[{") > _MAX_VALUES:
        raise CheckpointError(f"{where} has more than {_MAX_VALUES} values")
    try:
        document = json.loads(content.decode(), object_pairs_hook=_checked_object)
        if isinstance(document, dict):
            _check_nesting(document, where)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{where} must be a JSON object, not a {type(document).__name__}")
    return document


def quoted(name: str) -> str:
    """The name as it may stand in a message: escaped, and cut where it is absurdly long."""
    if len(name) <= _QUOTED_CHARACTERS:
        return repr(name)
    return f"{name[:_QUOTED_CHARACTERS]!r}… ({len(name)} characters)"


def _check_nesting(document: Any, where: str) -> None:
    """Refuse what later code could not write again: deep nesting, text that is no Unicode."""
    level = [document]
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        children = [
            child for one in level for child in (one.values() if isinstance(one, dict) else one)
        ]
        for child in children:
            if isinstance(child, str):
                child.encode()
        level = [child for child in children if isinstance(child, dict | list)]
    raise CheckpointError(f"{where} is nested too deeply")


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in pairs:
        if key in checked:
            raise ValueError(f"the key {quoted(key)} stands twice in one object")
        key.encode()
        checked[key] = value
    return checked
