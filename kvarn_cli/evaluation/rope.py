"""Take RoPE off the keys of an attention call and put it on again.

Both use the function `apply_rotary_pos_emb` of the model's own file, so that its layout (halves or
pairs, scaling) is the model's. RoPE turns pairs of channels and may scale them (YaRN does), so the
function called with −sin and divided by cos² + sin² undoes it. With partial rotary only the first
`rotary_dim` channels are turned, as wide as cos and sin.
"""

import inspect
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import AttentionCall

_FUNCTION = "apply_rotary_pos_emb"
_PARAMETERS = ("q", "k", "cos", "sin")


class Rope:
    """RoPE of some neighbouring tokens of one attention call.

    Args:
        call: of the attention module.
        tokens: which of its tokens.

    Raises:
        UnsupportedModelError: the module was given no cos and sin, does not use them, or its file
            applies them in a way not known here.
    """

    def __init__(self, call: AttentionCall, tokens: slice) -> None:
        self._apply = _function_of(call)
        assert call.position_embeddings is not None
        self._dtype = torch.promote_types(call.key.dtype, torch.float32)
        self._cos, self._sin = (
            table[:, tokens].to(self._dtype) for table in call.position_embeddings
        )

    def undo(self, keys: Tensor) -> Tensor:
        """Keys as they were before RoPE, [batch, kv_heads, tokens, head_dim], float32 or better."""
        square = (self._cos.square() + self._sin.square())[:, None]
        return self._turned(keys, -self._sin, 1 / square)

    def redo(self, keys: Tensor) -> Tensor:
        """Keys after RoPE; the same shape and dtype."""
        return self._turned(keys, self._sin, self._cos.new_ones(()))

    def _turned(self, keys: Tensor, sin: Tensor, factor: Tensor) -> Tensor:
        rotary_dim = self._cos.shape[-1]
        keys = keys.to(self._dtype)
        part, rest = keys[..., :rotary_dim], keys[..., rotary_dim:]
        turned = self._apply(part, part, self._cos, sin)[1] * factor
        return torch.cat((turned, rest), dim=-1)


def _function_of(call: AttentionCall) -> Callable[..., tuple[Tensor, Tensor]]:
    module = call.module
    function = getattr(sys.modules[type(module).__module__], _FUNCTION, None)
    if function is None or tuple(inspect.signature(function).parameters)[:4] != _PARAMETERS:
        reason = f"its file has no {_FUNCTION}({', '.join(_PARAMETERS)})"
    elif call.position_embeddings is None or call.position_embeddings[0].ndim != 3:
        reason = "it gets no cos and sin"
    elif not getattr(module, "use_rope", True):
        reason = f"layer {call.layer} does not use RoPE"
    else:
        return function  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{type(module).__name__} does not show its keys before RoPE: {reason}",
        hint="leave kvquant out, which quantizes those",
    )
