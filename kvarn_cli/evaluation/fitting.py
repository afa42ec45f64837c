"""Fit methods on calibration text, and check that K before RoPE is what it claims to be."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import AttentionCall, attention_tap
from kvarn_cli.evaluation.rope import Rope
from kvarn_cli.quantization.hadamard import rotate
from kvarn_cli.quantization.methods import Method
from kvarn_cli.runtime.coverage import covered_layers

_REPEATS = 16
_TOLERANCE = 0.02


def fit_methods(
    model: PreTrainedModel,
    tokens: Tensor,
    methods: Sequence[Method],
    *,
    fused_rotation: Tensor | None = None,
    covered: Collection[int] | None = None,
) -> list[Method]:
    """Let the methods that need it see K and V of calibration text.

    Args:
        model: in evaluation mode.
        tokens: int64 [windows, tokens] of text that is not measured.
        methods: all of them; those that fit nothing come back as they are.
        fused_rotation: R [head_dim, head_dim] if V of the model is fused with it.
        covered: layers to fit; None means every full-attention layer.

    Raises:
        UnsupportedModelError: a method wants K before RoPE, and the model does not show it.
    """
    if not any(method.needs_fit for method in methods):
        return list(methods)
    if covered is None:
        covered = covered_layers(model.config)
    before_rope = any(method.keys_before_rope for method in methods if method.needs_fit)
    if before_rope:
        _check_rope(model, covered, tokens[0, -1])
    states = _states(model, tokens, covered, before_rope=before_rope)
    if fused_rotation is not None:
        width = len(fused_rotation)
        states = {
            layer: (keys, rotate(values, fused_rotation.T) if values.shape[-1] == width else values)
            for layer, (keys, values) in states.items()
        }
    return [method.fit(states) if method.needs_fit else method for method in methods]


@torch.inference_mode()
def _states(
    model: PreTrainedModel, tokens: Tensor, covered: Collection[int], *, before_rope: bool
) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer → K and V, [windows, kv_heads, tokens, head_dim]."""
    states: dict[int, tuple[Tensor, Tensor]] = {}

    def tap(call: AttentionCall) -> Tensor:
        if call.layer is not None and call.layer in covered:
            keys = Rope(call, slice(None)).undo(call.key) if before_rope else call.key
            states[call.layer] = (keys, call.value)
        return call.attend(0, call.key.shape[2], call.key, call.value)

    with attention_tap(model, tap):
        model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1)
    return states


def _check_rope(model: PreTrainedModel, covered: Collection[int], token: Tensor) -> None:
    """One token repeated has the same K before RoPE at every position, in every layer.

    Attention over equal values gives equal outputs, so the positions of such a text differ by RoPE
    alone. Layers that leave RoPE out or turn other channels are found by that.
    """
    tokens = token.expand(1, _REPEATS)
    for layer, (keys, _) in _states(model, tokens, covered, before_rope=True).items():
        spread = (keys - keys[:, :, :1]).abs().max() / keys.abs().max()
        if spread > _TOLERANCE:
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__} does not apply RoPE to K the way its "
                f"file's function does: K before RoPE differs by {spread:.1%} between positions",
                hint="leave kvquant out, which quantizes K before RoPE",
            )
