from pathlib import Path

import pytest
from converted_folder import write_converted_folder
from fake_hub import FakeHub
from hub_process import Outcome, Run, run_python
from sharded_model import model

__all__ = ["model"]

_RUNNER = Path(__file__).parents[1] / "support" / "run_hub.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_converted_folder(tmp_path / "converted")


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path) -> Run:
    """Run the core in a process of its own against the fake Hub."""

    def run(*arguments: str | Path, **options: str | None) -> Outcome:
        return run_python(hub, tmp_path / "home", [_RUNNER, *arguments], **options)  # type: ignore[arg-type]

    return run
