"""Attention that sees packed tiles the way a cache would give them back, for all steps at once.

With given tokens, every layer's K and V can be computed at once; only attention must respect what
a cache would have packed by then. The tokens of one step attend exactly to one another, to the
sink and to the tail, and to reconstructed tiles from before the step: a step that starts at token
`a` finds the `KVarNSettings.packed_tokens(a)` tokens behind the sink packed.

Of an MLA model the latent is quantized, and the module itself expands what comes back to K and V.

Layers that read the cache of another layer get the very tensors of that layer, and see in their
place what its cache would give back.

The default steps are the tiles themselves, which is also what decoding token by token amounts to:
every token of a tile finds the same tiles packed.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvarn_cli.evaluation.attention import AttentionCall
from kvarn_cli.evaluation.rope import Rope
from kvarn_cli.evaluation.vector_errors import VectorErrors, vector_errors
from kvarn_cli.quantization.hadamard import rotate
from kvarn_cli.quantization.methods import Exact, Method
from kvarn_cli.quantization.saturation import watch_saturation
from kvarn_cli.settings import KVarNSettings


@dataclass(frozen=True)
class Restoration:
    """An oracle that gives some tokens back exactly.

    Attributes:
        share: which share of the packed tokens of a head counts as worst, by ‖x − x̂‖².
        restored: those, or all but those.
    """

    share: float
    restored: Literal["worst", "others"]

    def apply(self, exact: Tensor, packed: Tensor) -> Tensor:
        """Put exact tokens in the place of packed ones; [batch, kv_heads, tokens, head_dim]."""
        error = (exact - packed).float().square().sum(-1)
        count = math.ceil(self.share * error.shape[-1])
        worst = torch.zeros_like(error, dtype=torch.bool)
        worst.scatter_(-1, error.topk(count).indices, True)
        chosen = worst if self.restored == "worst" else ~worst
        return torch.where(chosen[..., None], exact, packed)


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
        settings: which tokens stay exact.
        step_tokens: tokens a step; None means a step for each time that a tile is packed.
    """
    if step_tokens is None:
        first = settings.sink_tokens + settings.residual_tokens
        starts = sorted({0, *range(first, num_tokens, settings.group_size)})
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
        fused_rotation: R [head_dim, head_dim] if V of the model, or its latent, is fused with it.
            Methods that want the plain basis then get V Rᵀ, and their result goes back through R.
        restoration: tokens to give back exactly in spite of the method.
        record_errors: whether to keep the errors of K and V.
        every: 1, or more to answer only queries whose position it divides.

    Attributes:
        key_errors: layer → errors of K, or of the latent, over the packed tokens that a later step
            sees.
        value_errors: the same of V; none of a layer with a latent.
        saturated_scales: layer → stored scales that had to be clamped, where there are any.
    """

    def __init__(
        self,
        covered: Collection[int],
        method: Method,
        *,
        step_tokens: int | None = None,
        fused_rotation: Tensor | None = None,
        restoration: Restoration | None = None,
        record_errors: bool = True,
        every: int = 1,
    ) -> None:
        self.covered = covered
        self.method = method
        self.step_tokens = step_tokens
        self.restoration = restoration
        self.record_errors = record_errors
        self.every = every
        self.fused_rotation = fused_rotation if method.plain_basis else None
        self.key_errors: dict[int, VectorErrors] = {}
        self.value_errors: dict[int, VectorErrors] = {}
        self.saturated_scales: dict[int, int] = {}
        self._packed = WeakTensorKeyDictionary()

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attention output of one layer, [batch, tokens, heads, head_dim]."""
        num_tokens = call.key.shape[2]
        if isinstance(self.method, Exact):
            return call.attend(0, num_tokens, call.key, call.value)[:, :: self.every]
        steps, sink = self._steps(num_tokens), self.method.sink_tokens
        packed = self._packed_states(call, slice(sink, sink + steps[-1].packed_tokens))
        if packed is None:
            return call.attend(0, num_tokens, call.key, call.value)[:, :: self.every]
        keys, values = packed
        return torch.cat(
            [
                call.attend(
                    step.start,
                    step.end,
                    _seen(step, sink, call.key, keys),
                    _seen(step, sink, call.value, values),
                    every=self.every,
                )
                for step in steps
            ],
            dim=1,
        )

    def _packed_states(self, call: AttentionCall, tiles: slice) -> tuple[Tensor, Tensor] | None:
        """K and V of the tokens in tiles as attention gets them back; None where it gets its own.

        A layer that reads the cache of a covered layer is handed that layer's very tensors.
        """
        layer = call.layer
        if call.key in self._packed:
            shared: tuple[Tensor, Tensor] = self._packed[call.key]
            return shared
        if layer is None or layer not in self.covered:
            return None
        keys, values = self._reconstruct(call, layer, tiles)
        exact_keys, exact_values = (states[:, :, tiles] for states in call.cached)
        if self.record_errors:
            self.key_errors[layer] = vector_errors(exact_keys, keys)
            if call.latent is None:
                self.value_errors[layer] = vector_errors(exact_values, values)
        if self.restoration is not None:
            keys = self.restoration.apply(exact_keys, keys)
            values = self.restoration.apply(exact_values, values)
        keys, values = call.expand(keys, values)
        self._packed[call.key] = keys, values
        return keys, values

    def _steps(self, num_tokens: int) -> list[Step]:
        method = self.method
        if method.tail == "packed":
            ends = [*range(method.group_size, num_tokens, method.group_size), num_tokens]
            return [
                Step(start, end, method.packed_tokens(end))
                for start, end in zip([0, *ends], ends, strict=False)
            ]
        return decode_steps(num_tokens, method.settings, self.step_tokens)

    def _reconstruct(self, call: AttentionCall, layer: int, tiles: slice) -> tuple[Tensor, Tensor]:
        """What the cache gives back for the tokens in tiles, in the dtype and basis of the model.

        K and V, or the latent and the RoPE key.

        An incomplete last tile is filled up with copies of its last token.
        """
        keys, values = (states[:, :, tiles] for states in call.cached)
        num_tokens = keys.shape[2]
        if not num_tokens:
            return keys, values
        method, dtype = self.method.for_layer(layer), keys.dtype
        rope = Rope(call, tiles) if method.keys_before_rope else None
        if rope is not None:
            keys = rope.undo(keys)
        if self.fused_rotation is not None:
            keys, values = _turned(call, keys, values, self.fused_rotation.T)
        missing = -num_tokens % method.group_size
        if missing:
            keys, values = (
                torch.cat((states, states[:, :, -1:].expand(-1, -1, missing, -1)), dim=2)
                for states in (keys, values)
            )
        with watch_saturation() as saturated:
            keys, values = method.reconstruct(keys, values)
        if saturated.count:
            self.saturated_scales[layer] = saturated.count
        keys, values = keys[:, :, :num_tokens], values[:, :, :num_tokens]
        if rope is not None:
            keys = rope.redo(keys)
        if self.fused_rotation is not None:
            keys, values = _turned(call, keys, values, self.fused_rotation)
        return keys.to(dtype), values.to(dtype)


def _turned(
    call: AttentionCall, keys: Tensor, values: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Multiply by a matrix what a fused rotation acts on: V of its width, or the latent."""
    if call.latent is not None:
        return rotate(keys, matrix), values
    return keys, rotate(values, matrix) if values.shape[-1] == len(matrix) else values


def _seen(step: Step, sink: int, exact: Tensor, packed: Tensor) -> Tensor:
    tiles = packed[:, :, : step.packed_tokens]
    tail = exact[:, :, sink + step.packed_tokens : step.end]
    return torch.cat((exact[:, :, : min(sink, step.end)], tiles, tail), dim=2)
