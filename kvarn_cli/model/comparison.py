"""Run a model, or a part of one, before and after a fusion, and put each tensor back in turn.

V, or the latent of an MLA model, is drawn a thousand times larger than its input. A clamp on V or
on the attention output (OLMo's `clip_qkv`) acts on the outlier channels of trained models only;
here it must act, and be seen.

Agreement alone could also mean that the tensors do not matter. So each fused tensor in turn is
put back unrotated, and each time the output must move clearly; otherwise nothing is shown.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.float64_mode import Float64Mode
from kvarn_cli.model.fusion import TensorReader, TensorRotation, tensor_rotations
from kvarn_cli.model.layout import ONLINE_HINT, AttentionLayer, ModelLayout

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5
SMALLEST_CONTROL = 1e-2

_VALUE_SCALE = 1000.0
_HARMLESS_MODULES = {"q_proj", "k_proj", "q_norm", "k_norm", "rotary_emb"}

RotationSet = Callable[[ModelLayout, TensorReader], Mapping[str, TensorRotation]]


def all_rotations(layout: ModelLayout, read: TensorReader) -> Mapping[str, TensorRotation]:
    """The fusion as it is written into checkpoints."""
    return tensor_rotations(layout, read=read)


@dataclass(frozen=True)
class Comparison:
    """What a fusion changed; differences are relative to the largest output.

    Attributes:
        tolerance: what `difference` had to stay under.
        difference: largest change of an output by the fusion.
        smallest_control: smallest change when one fused tensor was left unrotated.
        float32_upcast: an operation narrowed float64 to float32, which set the wider tolerance.
    """

    tolerance: float
    difference: float
    smallest_control: float
    float32_upcast: bool


def compare_fused(
    run: Callable[[], Tensor],
    weights: Mapping[str, Tensor],
    layout: ModelLayout,
    rotations: RotationSet,
    *,
    attention: nn.Module,
    subject: str,
) -> Comparison:
    """Compare outputs before and after a fusion; the weights are left as they were.

    Args:
        run: computes the outputs from the weights as they are, in float64.
        weights: float64 parameters by name; changed and changed back.
        layout: where V and O live in them.
        rotations: from a layout and a reader of its tensors to the rotation of each.
        attention: the first attention module, looked at to name what stands in the way.
        subject: of the error messages: what is run.

    Raises:
        UnsupportedModelError: the outputs change, or a tensor left unrotated does not change them.
    """
    originals = {name: weights[name].clone() for name in layout.tensors}
    try:
        for layer in {layer.value: layer for layer in layout.layers}.values():
            _magnify(layer, weights)
        return _compare(run, weights, layout, rotations, attention, subject)
    finally:
        for name, weight in originals.items():
            weights[name].copy_(weight)


def _compare(
    run: Callable[[], Tensor],
    weights: Mapping[str, Tensor],
    layout: ModelLayout,
    rotations: RotationSet,
    attention: nn.Module,
    subject: str,
) -> Comparison:
    originals, fused = {}, {}
    for name, rotated in rotations(layout, weights.__getitem__).items():
        originals[name] = weights[name].clone()
        fused[name] = rotated(originals[name])
    mode = Float64Mode()
    with torch.no_grad(), mode:
        before = run()
        for name, weight in fused.items():
            weights[name].copy_(weight)
        difference = _relative_change(before, run())
        tolerance = FLOAT32_TOLERANCE if mode.narrowed else FLOAT64_TOLERANCE
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"fusing {layout.layers[0].rotated} would change what {subject} computes: "
                f"outputs move by {difference:.1e} of the largest, rounding explains "
                f"{tolerance:.0e}; {_suspects(attention, layout.layers[0])}",
                hint=ONLINE_HINT,
            )
        controls = {}
        for name, weight in originals.items():
            weights[name].copy_(weight)
            controls[name] = _relative_change(before, run())
            weights[name].copy_(fused[name])
    weakest = min(controls, key=controls.__getitem__)
    if not controls[weakest] > SMALLEST_CONTROL:
        raise UnsupportedModelError(
            f"the proof is void: leaving {weakest} unrotated moves the outputs of {subject} by "
            f"only {controls[weakest]:.1e} of the largest",
            hint=ONLINE_HINT,
        )
    return Comparison(tolerance, difference, controls[weakest], mode.narrowed)


def _magnify(layer: AttentionLayer, weights: Mapping[str, Tensor]) -> None:
    """Make what is cached large; the latent, whose size attention sees, smaller again behind it."""
    if layer.norm is None:
        for heads in layer.value:
            weights[heads.tensor].mul_(_VALUE_SCALE)
    else:
        weights[layer.norm.tensor].mul_(_VALUE_SCALE)
        weights[layer.output.tensor].div_(_VALUE_SCALE)


def _relative_change(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())


def _suspects(attention: nn.Module, layer: AttentionLayer) -> str:
    """What may stand between V and W_O, by name."""
    expected = {name.removeprefix(f"{layer.module}.").split(".")[0] for name in layer.tensors}
    unexpected = [
        name
        for name, child in attention.named_children()
        if name not in expected | _HARMLESS_MODULES and not isinstance(child, nn.Dropout)
    ]
    if unexpected:
        return f"in {type(attention).__name__} stands {', '.join(unexpected)}"
    name = type(attention).__name__
    queries = dict(attention.named_parameters()).get("q_proj.weight")
    if queries is not None and len(queries) == 2 * layer.num_heads * layer.output.head_dim:
        return f"{name}.q_proj makes twice the channels of the queries, as for a gate"
    return f"{name}.forward does more than attend between V and W_O"
