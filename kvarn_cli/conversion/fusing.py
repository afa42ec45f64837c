"""Whether V's rotation goes into a checkpoint's weights, and why not."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from transformers import PreTrainedModel

from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from kvarn_cli.checkpoint.strict_json import read_object
from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import TracedLayer
from kvarn_cli.model.layout import ONLINE_HINT, ModelLayout, check_dtypes
from kvarn_cli.model.parameter_names import checkpoint_names
from kvarn_cli.model.proof import Proof, prove_attention, prove_fusion
from kvarn_cli.model.proposals import proposed_layout
from kvarn_cli.model.quantized_weights import quantized_format
from kvarn_cli.model.shrunken import NoInstanceError

RotationPlace = Literal["auto", "fused", "online"]
_Found = TypeVar("_Found")
_MODELOPT_NAME = "hf_quant_config.json"


def unless_refused(
    rotation: RotationPlace, step: Callable[[], _Found]
) -> tuple[_Found | None, str | None]:
    """What a step of the fusion found, or why V's rotation is left to the engine.

    Args:
        rotation: with `fused`, a refusal is the end.
        step: may raise `UnsupportedModelError`.

    Raises:
        UnsupportedModelError: as the step, with `fused`.
    """
    try:
        return step(), None
    except UnsupportedModelError as error:
        if rotation == "fused":
            raise
        return None, str(error)


def prove_unquantized(
    folder: Path,
    model: PreTrainedModel,
    traced: Mapping[int, TracedLayer],
    head_dim: int,
    *,
    trust_remote_code: bool,
) -> Proof:
    """Prove the fusion of a checkpoint of which only the small files are there.

    Args:
        folder: holds config.json.
        model: the class that loads it, at full size on the meta device.
        traced: what that class caches.
        head_dim: width of the heads that are fused.
        trust_remote_code: whether code from the checkpoint may run.

    Raises:
        UnsupportedModelError: its weights are quantized, or the fusion is not proven.
    """
    _refuse_quantized(folder, {})
    try:
        return prove_fusion(model.config, head_dim, trust_remote_code=trust_remote_code)
    except NoInstanceError:
        return prove_attention(model, traced, head_dim)


def find_tensors(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    traced: Mapping[int, TracedLayer],
    proof: Proof,
) -> tuple[ModelLayout, dict[str, str]]:
    """The tensors to rotate, and the parameter that each is loaded into.

    Args:
        checkpoint: the source.
        model: the class that loads it, on any device.
        traced: what that class caches.
        proof: that its kind of fusion changes nothing.

    Raises:
        UnsupportedModelError: the checkpoint's V and O cannot be rotated.
    """
    infos = {name: checkpoint.info(name) for name in checkpoint.weight_map}
    dtypes = {name: info.dtype for name, info in infos.items()}
    _refuse_quantized(checkpoint.folder, dtypes)
    layout = proposed_layout(model, traced, proof.head_dim, proof.arrangement)
    proof.check_kinds(model, layout)
    names = checkpoint_names(model, layout, {name: info.shape for name, info in infos.items()})
    layout = layout.renamed(names)
    check_dtypes(layout, dtypes)
    return layout, {tensor: parameter for parameter, tensor in names.items()}


def format_of_weights(folder: Path, dtypes: Mapping[str, str]) -> str | None:
    """The format of quantized weights, with the place that shows it; None for plain weights.

    Args:
        folder: holds config.json, and perhaps ModelOpt's own description.
        dtypes: safetensors' name of each tensor's dtype, by tensor name.
    """
    found = quantized_format(read_object(folder / CONFIG_NAME), dtypes)
    if found is None and (folder / _MODELOPT_NAME).is_file():
        return f"ModelOpt ({_MODELOPT_NAME})"
    return found


def _refuse_quantized(folder: Path, dtypes: Mapping[str, str]) -> None:
    found = format_of_weights(folder, dtypes)
    if found is not None:
        raise UnsupportedModelError(
            f"the weights are quantized already: {found}",
            hint=f"fuse the unquantized checkpoint and quantize the result, or {ONLINE_HINT}",
        )
