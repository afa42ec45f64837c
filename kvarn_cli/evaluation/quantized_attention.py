"""Attention that sees packed tiles the way a cache would give them back, for all steps at once.

With given tokens, every layer's K and V can be computed at once; only attention must respect what
a cache would have packed by then. The tokens of one step attend exactly to one another, to the
sink and to the tail, and to reconstructed tiles from before the step: a step that starts at token
`a` finds the `KVarNSettings.packed_tokens(a)` tokens behind the sink packed.

The default steps are the tiles themselves, which is also what decoding token by token amounts to:
every token of a tile finds the same tiles packed.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn_cli.evaluation.attention import AttentionCall
from kvarn_cli.evaluation.vector_errors import VectorErrors, vector_errors
from kvarn_cli.quantization.hadamard import rotate
from kvarn_cli.quantization.methods import Exact, Method
from kvarn_cli.settings import KVarNSettings


@dataclass(frozen=True)
class Step:
    """Tokens [start, end) of one forward step, and how many tokens it finds packed."""

    start: int
    end: int
    packed_tokens: int


def decode_steps(
    num_tokens: int, settings: KVarNSettings, step_tokens: int | None = None
) -> list[Step]:
    """Cut a sequence into the steps in which a cache would see it.

    Args:
        num_tokens: length of the sequence.
        settings: its sink_tokens and group_size.
        step_tokens: tokens a step; None means the sink, then one tile a step.
    """
    if step_tokens is None:
        starts = sorted({0, *range(settings.sink_tokens, num_tokens, settings.group_size)})
    else:
        starts = list(range(0, num_tokens, step_tokens))
    return [
        Step(start, end, settings.packed_tokens(start))
        for start, end in zip(starts, [*starts[1:], num_tokens], strict=True)
    ]


class QuantizedAttention:
    """A tap (see `attention_tap`) under which one forward pass equals decoding with a cache.

    Args:
        covered: layers to quantize; the others attend exactly.
        method: what packed tiles come back as.
        step_tokens: see `decode_steps`.
        fused_rotation: R [head_dim, head_dim] if V of the model is fused with it. Methods that
            want V in the plain basis then get V Rᵀ, and their result goes back through R.

    Attributes:
        key_errors: layer → errors of K over the packed tokens that a later step sees.
        value_errors: the same of V.
    """

    def __init__(
        self,
        covered: Collection[int],
        method: Method,
        *,
        step_tokens: int | None = None,
        fused_rotation: Tensor | None = None,
    ) -> None:
        self.covered = covered
        self.method = method
        self.step_tokens = step_tokens
        self.value_rotation = fused_rotation if method.plain_basis else None
        self.key_errors: dict[int, VectorErrors] = {}
        self.value_errors: dict[int, VectorErrors] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attention output of one layer, [batch, tokens, heads, head_dim]."""
        layer, num_tokens = call.layer, call.key.shape[2]
        if layer is None or layer not in self.covered or isinstance(self.method, Exact):
            return call.attend(0, num_tokens, call.key, call.value)
        settings = self.method.settings
        steps = decode_steps(num_tokens, settings, self.step_tokens)
        sink = settings.sink_tokens
        tiles = slice(sink, sink + steps[-1].packed_tokens)
        keys, values = self._reconstruct(call.key[:, :, tiles], call.value[:, :, tiles])
        self.key_errors[layer] = vector_errors(call.key[:, :, tiles], keys)
        self.value_errors[layer] = vector_errors(call.value[:, :, tiles], values)
        return torch.cat(
            [
                call.attend(
                    step.start,
                    step.end,
                    _seen(step, sink, call.key, keys),
                    _seen(step, sink, call.value, values),
                )
                for step in steps
            ],
            dim=1,
        )

    def _reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not keys.shape[2]:
            return keys, values
        if self.value_rotation is None:
            packed_keys, packed_values = self.method.reconstruct(keys, values)
        else:
            plain_values = rotate(values, self.value_rotation.T)
            packed_keys, packed_values = self.method.reconstruct(keys, plain_values)
            packed_values = rotate(packed_values, self.value_rotation)
        return packed_keys.to(keys.dtype), packed_values.to(values.dtype)


def _seen(step: Step, sink: int, exact: Tensor, packed: Tensor) -> Tensor:
    tiles = packed[:, :, : step.packed_tokens]
    tail = exact[:, :, sink + step.packed_tokens : step.end]
    return torch.cat((exact[:, :, : min(sink, step.end)], tiles, tail), dim=2)
