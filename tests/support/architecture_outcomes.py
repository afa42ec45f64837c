"""What becomes of a tiny model of one architecture: its rotation, and its cache.

Every outcome is shown, not assumed: a checkpoint whose V was fused computes the logits of the
original, and a packed cache gives what the pseudo-decode computes in one pass.
"""

import re
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from architectures import CLASSES, save_tiny_architecture, tiny_architecture
from torch import Tensor
from transformers import PreTrainedConfig

from kvarn_cli.conversion.plan import plan_conversion
from kvarn_cli.conversion.run import run_conversion
from kvarn_cli.errors import KvarnError
from kvarn_cli.evaluation.rehearsal import check_agreement
from kvarn_cli.model.cache_layout import find_cache_layout
from kvarn_cli.model.cache_trace import build_without_weights, trace_cache
from kvarn_cli.model.loading import load_model, quiet_transformers
from kvarn_cli.model.shrunken import MODEL_CODE_ERRORS, build_random_model
from kvarn_cli.progress import silent
from kvarn_cli.runtime.coverage import rope_key_dim
from kvarn_cli.settings import DEFAULT_LATENT_PRESET, DEFAULT_PRESET, KVarNSettings

NOT_BUILT = "not instantiable"
EQUAL = "equal"
NUM_TOKENS = 300

_NUM_LOGITS = 24
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """One row of the table.

    Attributes:
        model_type: as in config.json.
        class_name: the class of this type that was run.
        rotation: where V's rotation goes, and why not into the weights.
        cache: whether a packed cache and the pseudo-decode agree, or why that cannot be said;
            empty where there is no cache to pack.
    """

    model_type: str
    class_name: str
    rotation: str
    cache: str

    def row(self) -> str:
        """As a line of a Markdown table."""
        cells = (f"`{self.model_type}`", f"`{self.class_name}`", self.rotation, self.cache)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Convert a tiny checkpoint of a model type, made in an empty folder, and run its cache.

    Raises:
        AssertionError: a result is wrong.
    """
    class_name = CLASSES[model_type]
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        try:
            config = tiny_architecture(model_type)
            source = save_tiny_architecture(model_type, folder / "source")
        except (KvarnError, *MODEL_CODE_ERRORS) as error:
            return Outcome(model_type, class_name, f"{NOT_BUILT}: {_reason(error)}", "")
        return Outcome(
            model_type, class_name, _rotation(config, source, folder / "converted"), _cache(config)
        )


def _rotation(config: PreTrainedConfig, source: Path, output: Path) -> str:
    preset = DEFAULT_PRESET if rope_key_dim(config) is None else DEFAULT_LATENT_PRESET
    settings = KVarNSettings.from_name(preset)
    try:
        plan = plan_conversion(str(source), settings=settings, rotation="auto", output=output)
        if plan.proof is None:
            return f"online: {_reason(plan.not_fused)}"
        run_conversion(plan, force=False, report=silent)
    except KvarnError as error:
        return f"refused: {_reason(error)}"
    before, after = _logits(source), _logits(output)
    difference = float((after - before).abs().max() / before.abs().max())
    assert difference <= _TOLERANCE, f"fusing {source} moved logits by {difference:.1e}"
    return "fused"


def _cache(config: PreTrainedConfig) -> str:
    try:
        find_cache_layout(config, trace_cache(build_without_weights(config)))
    except KvarnError:
        return ""
    try:
        model = build_random_model(config, seed=0, trust_remote_code=False)
        check_agreement(model, NUM_TOKENS)
    except KvarnError as error:
        return _reason(error)
    return EQUAL


@torch.inference_mode()
def _logits(folder: Path) -> Tensor:
    model = load_model(folder, dtype=None, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(8, 120, (1, _NUM_LOGITS), generator=generator)
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _reason(error: object) -> str:
    """One line without numbers that differ between machines."""
    line = " ".join(str(error).split())
    return re.sub(r"[0-9.]+e[+-][0-9]+", "…", textwrap.shorten(line, 200, placeholder=" …"))
