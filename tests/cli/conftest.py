import json

import pytest
from awkward_checkpoint import CALIBRATION_TEXT, build_awkward_checkpoint
from kvarn_process import run_kvarn


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the checkpoints lie that several tests look at."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama(folder):
    return build_awkward_checkpoint(folder / "llama")


@pytest.fixture(scope="session")
def short_run(folder):
    """Options of a calibration run that takes a moment."""
    text = folder / "text.txt"
    text.write_text(CALIBRATION_TEXT)
    return ["--dataset", text, "--num-samples", "1", "--sequence-length", "192"]


@pytest.fixture(scope="session")
def conversion(llama, short_run, folder):
    """The one conversion that many tests look at: its outcome, with --json."""
    output = folder / "converted"
    return run_kvarn("convert", llama, "-o", output, "--preset", "k4v4_g32", *short_run, "--json")


@pytest.fixture(scope="session")
def converted(conversion, folder):
    """The converted folder."""
    assert conversion.exit_code == 0, conversion.stderr
    assert json.loads(conversion.stdout)["output"] == str(folder / "converted")
    return folder / "converted"
