"""A proof by experiment that fusing V's rotation leaves an architecture's function unchanged.

`layout` only proposes, from names and shapes. What an attention class computes between V and W_O
is decided by its code, so that code is run: on a shrunken instance of the architecture in float64,
with everything drawn at random, the logits before and after the fusion must agree to within
rounding. The fusion is done by the very code that rewrites the checkpoint. Where Q, K and V share
a projection, each known way of dividing it is tried; only the right one can pass. So it is with
what the norm of a latent does with its weight.

V, or the latent of an MLA model, is drawn a thousand times larger than its input. A clamp on V or
on the attention output (OLMo's `clip_qkv`) acts on the outlier channels of trained models only;
here it must act, and be seen.

Agreement alone could also mean that the tensors do not matter. So each fused tensor in turn is
put back unrotated, and each time the logits must move clearly; otherwise the proof is void.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import trace_cache
from kvarn_cli.model.float64_mode import Float64Mode
from kvarn_cli.model.fusion import TensorReader, TensorRotation, tensor_rotations
from kvarn_cli.model.layout import ONLINE_HINT, AttentionLayer, ModelLayout
from kvarn_cli.model.loading import quiet_transformers
from kvarn_cli.model.proposals import arrangements_of, proposed_layout
from kvarn_cli.model.shrunken import (
    MODEL_CODE_ERRORS,
    build_random_model,
    shrink_config,
)
from kvarn_cli.model.shrunken_config import VOCAB_SIZE

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5
SMALLEST_CONTROL = 1e-2

_SEED = 20_260_603
_NUM_TOKENS = 24
_VALUE_SCALE = 1000.0
_HARMLESS_MODULES = {"q_proj", "k_proj", "q_norm", "k_norm", "rotary_emb"}

RotationSet = Callable[[ModelLayout, TensorReader], Mapping[str, TensorRotation]]


def _all_rotations(layout: ModelLayout, read: TensorReader) -> Mapping[str, TensorRotation]:
    return tensor_rotations(layout, read=read)


@dataclass(frozen=True)
class Proof:
    """The numbers of a passed proof; differences are relative to the largest logit.

    Attributes:
        architecture: class of the model that was run.
        head_dim: width of the rotation that was fused.
        arrangement: the proposal that passed, see `arrangements_of`.
        tolerance: what `largest_difference` had to stay under.
        largest_difference: largest change of a logit by the fusion.
        smallest_control: smallest change when one fused tensor was left unrotated.
        float32_upcast: an operation narrowed float64 to float32, which set the wider tolerance.
        elapsed_seconds: time the proof took.
    """

    architecture: str
    head_dim: int
    arrangement: str
    tolerance: float
    largest_difference: float
    smallest_control: float
    float32_upcast: bool
    elapsed_seconds: float


def prove_fusion(
    config: PreTrainedConfig,
    head_dim: int,
    *,
    trust_remote_code: bool = False,
    rotations: RotationSet = _all_rotations,
) -> Proof:
    """Prove on a shrunken random instance that the fusion changes nothing.

    Args:
        config: the model's configuration.
        head_dim: width of the heads that are fused.
        trust_remote_code: run modeling code that comes with the checkpoint.
        rotations: from a layout and a reader of its tensors to the rotation of each, as
            `tensor_rotations`.

    Raises:
        UnsupportedModelError: the instance cannot be built or laid out, its logits change, or a
            tensor left unrotated does not change them.
    """
    start = time.perf_counter()
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        small = shrink_config(config)
        model = build_random_model(small, seed=_SEED, trust_remote_code=trust_remote_code)
        traced = trace_cache(model)
        refusals = []
        for arrangement in arrangements_of(model, traced):
            try:
                layout = proposed_layout(model, traced, head_dim, arrangement)
                found = _compare(model, layout, rotations)
            except UnsupportedModelError as error:
                refusals.append(error)
            else:
                return Proof(
                    architecture=type(model).__name__,
                    head_dim=head_dim,
                    arrangement=arrangement,
                    tolerance=found.tolerance,
                    largest_difference=found.difference,
                    smallest_control=found.smallest_control,
                    float32_upcast=found.tolerance != FLOAT64_TOLERANCE,
                    elapsed_seconds=time.perf_counter() - start,
                )
    raise refusals[0]


@dataclass(frozen=True)
class _Comparison:
    tolerance: float
    difference: float
    smallest_control: float


def _compare(model: PreTrainedModel, layout: ModelLayout, rotations: RotationSet) -> _Comparison:
    """Logits before and after the fusion; the model's weights are left as they were."""
    weights = {name: weight.data for name, weight in model.named_parameters()}
    originals = {name: weights[name].clone() for name in layout.tensors}
    try:
        return _compare_fused(model, layout, rotations, weights)
    finally:
        for name, weight in originals.items():
            weights[name].copy_(weight)


def _compare_fused(
    model: PreTrainedModel,
    layout: ModelLayout,
    rotations: RotationSet,
    weights: Mapping[str, Tensor],
) -> _Comparison:
    for layer in layout.layers:
        _magnify(layer, weights)
    originals, fused = {}, {}
    for name, rotated in rotations(layout, weights.__getitem__).items():
        originals[name] = weights[name].clone()
        fused[name] = rotated(originals[name])
    mode = Float64Mode()
    before = _logits(model, mode)
    for name, weight in fused.items():
        weights[name].copy_(weight)
    difference = _relative_change(before, _logits(model, mode))
    tolerance = FLOAT32_TOLERANCE if mode.narrowed else FLOAT64_TOLERANCE
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"fusing {layout.layers[0].rotated} would change what {type(model).__name__} "
            f"computes: logits move by {difference:.1e} of the largest, rounding explains "
            f"{tolerance:.0e}; "
            f"{_suspects(model, layout)}",
            hint=ONLINE_HINT,
        )
    controls = {}
    for name, weight in originals.items():
        weights[name].copy_(weight)
        controls[name] = _relative_change(before, _logits(model, mode))
        weights[name].copy_(fused[name])
    weakest = min(controls, key=controls.__getitem__)
    if not controls[weakest] > SMALLEST_CONTROL:
        raise UnsupportedModelError(
            f"the proof is void: leaving {weakest} unrotated moves the logits of "
            f"{type(model).__name__} by only {controls[weakest]:.1e} of the largest",
            hint=ONLINE_HINT,
        )
    return _Comparison(tolerance, difference, controls[weakest])


def _magnify(layer: AttentionLayer, weights: Mapping[str, Tensor]) -> None:
    """Make what is cached large; the latent, whose size attention sees, smaller again behind it."""
    if layer.norm is None:
        for heads in layer.value:
            weights[heads.tensor].mul_(_VALUE_SCALE)
    else:
        weights[layer.norm.tensor].mul_(_VALUE_SCALE)
        weights[layer.output.tensor].div_(_VALUE_SCALE)


def _logits(model: PreTrainedModel, mode: Float64Mode) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    vocab_size = getattr(model.config.get_text_config(decoder=True), "vocab_size", VOCAB_SIZE)
    tokens = torch.randint(min(VOCAB_SIZE, vocab_size), (1, _NUM_TOKENS), generator=generator)
    try:
        with torch.no_grad(), mode:
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    except MODEL_CODE_ERRORS as error:
        raise UnsupportedModelError(
            f"a small instance of {type(model).__name__} does not run: {error}", hint=ONLINE_HINT
        ) from error
    if not logits.isfinite().all():
        raise UnsupportedModelError(
            f"a small random instance of {type(model).__name__} computes NaN or infinity, so "
            "nothing can be proven",
            hint="a number in config.json may be wrong, such as rms_norm_eps or rope_theta",
        )
    return logits


def _relative_change(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())


def _suspects(model: PreTrainedModel, layout: ModelLayout) -> str:
    """What may stand between V and W_O, by name."""
    path = layout.layers[0].module
    attention = model.get_submodule(path)
    expected = {name.removeprefix(f"{path}.").split(".")[0] for name in layout.layers[0].tensors}
    unexpected = [
        name
        for name, child in attention.named_children()
        if name not in expected | _HARMLESS_MODULES and not isinstance(child, nn.Dropout)
    ]
    if unexpected:
        return f"in {type(attention).__name__} stands {', '.join(unexpected)}"
    return f"{type(attention).__name__}.forward does more than attend between V and W_O"
