import math
import os
from pathlib import Path

import pytest

from kvarn_cli.checkpoint.strict_json import parse_object, quoted, read_object
from kvarn_cli.errors import CheckpointError


def test_reads_what_configurations_hold(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"name": "Ünï", "limits": [0, Infinity], "nested": {"a": null}}', "utf-8")
    assert read_object(path) == {"name": "Ünï", "limits": [0, math.inf], "nested": {"a": None}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[1]", "must be a JSON object, not a list"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
        (b'{"a": ' * 100_000, "nested too deeply"),
    ],
)
def test_refuses_everything_else_by_name(content: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match="the index") as refusal:
        parse_object(content, "the index")
    assert words in str(refusal.value)


def test_refuses_files_too_large_to_be_meant(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    os.truncate(path, 10**10)
    with pytest.raises(CheckpointError, match="more than 32000000 bytes"):
        read_object(path)


def test_a_quoted_name_has_no_control_codes() -> None:
    assert quoted("a\x1b[31m\ud800") == r"'a\x1b[31m\ud800'"
