import pytest
import torch
from awkward_checkpoint import CALIBRATION_TEXT, build_awkward_checkpoint
from conversions import convert
from sharded_model import model, proof_made_once

from kvarn_cli.conversion.plan import Validation
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.metadata import Thresholds

__all__ = ["model", "proof_made_once"]

MODELS = {
    "llama": {},
    "mistral": {"dtype": torch.bfloat16},
    "qwen2": {"sharded": True},
    "qwen3": {"head_dim": 64},
}


@pytest.fixture(scope="session")
def fused_models(tmp_path_factory):
    """One conversion of each family, by name."""
    folder = tmp_path_factory.mktemp("fused")
    return {
        family: convert(
            build_awkward_checkpoint(folder / family, family, **options), folder / f"{family}-out"
        )
        for family, options in MODELS.items()
    }


@pytest.fixture(params=MODELS)
def fused(request, fused_models):
    """Each of the conversions."""
    return fused_models[request.param]


@pytest.fixture
def llama(tmp_path):
    """A checkpoint of its own for each test, which may break it."""
    return build_awkward_checkpoint(tmp_path / "llama")


@pytest.fixture
def short_validation(tmp_path):
    """Two windows of 192 tokens, with limits to choose."""
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION_TEXT)

    def short_validation(*, max_kl=1.0):
        return Validation(
            CalibrationText(text, "text", num_samples=2, sequence_length=192, seed=0),
            Thresholds(max_kl=max_kl, min_top1=0, max_loss_increase=1),
            torch.device("cpu"),
            torch.float32,
        )

    return short_validation
