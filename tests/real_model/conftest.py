import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.model.loading import load_model, load_tokenizer

PREPARE = Path(__file__).parents[2] / "scripts" / "prepare_smollm2.py"


@pytest.fixture(scope="session")
def smollm2():
    """Folder of SmolLM2-135M-Instruct, dequantized from Q4_1 and stored in bfloat16."""
    prepared = subprocess.run(
        [sys.executable, str(PREPARE)], check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(prepared.stdout.strip())


@pytest.fixture(scope="session")
def smollm2_model(smollm2):
    """The model, computing in float32; tests leave it as they found it."""
    return load_model(smollm2, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def calibration_windows(smollm2):
    """Four windows of 768 tokens, int64 [4, 768]."""
    text = CalibrationText(None, "text", num_samples=4, sequence_length=768, seed=0)
    return text.windows(load_tokenizer(smollm2))
