"""The promise of `kvarn_cli.errors`: every refusal of a model says what would work instead."""

import ast
from pathlib import Path

import kvarn_cli

REFUSALS = {"UnsupportedModelError", "NoInstanceError"}


def refusals() -> list[tuple[str, ast.Call]]:
    """Every place that makes such an error, and its call."""
    package = Path(kvarn_cli.__file__).parent
    return [
        (f"{path.relative_to(package)}:{node.lineno}", node)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in REFUSALS
    ]


def test_every_refusal_of_a_model_has_a_hint() -> None:
    assert len(refusals()) > 30
    without = [
        place
        for place, call in refusals()
        if "hint" not in {keyword.arg for keyword in call.keywords}
    ]
    assert without == []
