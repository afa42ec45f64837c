import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import save_checkpoint

DRIVER = Path(__file__).parents[1] / "support" / "kill_points.py"


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_a_kill_at_any_point_can_be_continued(mode: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    folder = tmp_path / "results"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, DRIVER, model, folder, mode],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60
