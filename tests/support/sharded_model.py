"""Fixtures: one tiny sharded model, and its proof made once for a whole session."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_checkpoint

from kvarn_cli.conversion import fusing as fusing_module
from kvarn_cli.model.proof import Proof, prove_fusion

__all__ = ["model", "proof_made_once"]

_proofs: dict[str, Proof] = {}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 (V has a bias) in bfloat16, in several shards."""
    folder = tmp_path_factory.mktemp("models") / "ein Modell, größer"
    return build_tiny_checkpoint(folder, "qwen2", dtype=torch.bfloat16, sharded=True)


@pytest.fixture
def proof_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof depends on the configuration alone, so one for each is enough."""

    def prove(config: Any, head_dim: int, **options: Any) -> Proof:
        key = config.to_json_string()
        if key not in _proofs:
            _proofs[key] = prove_fusion(config, head_dim, **options)
        return _proofs[key]

    monkeypatch.setattr(fusing_module, "prove_fusion", prove)
