"""A tap on transformers' attention: one function sees every attention call of a forward pass.

The tap is registered with transformers' attention and mask interfaces under one name (without a
mask function of the same name, padding and sliding windows would be lost in silence) and chosen
for the length of a `with` block. Attention itself stays transformers' own sdpa function, except
where scores are capped or sinks take part, which that function leaves out.

MLA modules cache a latent and compute K and V from it with a method of their own, `expand_kv`. It
is listened to for the same time, so that a tap sees the latent and can expand another one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.explicit_attention import EXPLICIT_OPTIONS, explicit_attention

ATTENTION_NAME = "kvarn_tap"
NOT_MEASURED_HINT = (
    "its cache errors cannot be measured with this release; convert --no-validate leaves that out"
)

_UNKNOWN_OPTIONS = ("sinks", "position_bias", "head_mask")


@dataclass(frozen=True)
class CachedLatent:
    """What an MLA module caches of all tokens.

    Attributes:
        states: the latent, [batch, 1, tokens, latent_dim].
        rope_key: the RoPE key, [batch, 1, tokens, rope_dim].
        expand: the module's own way from such a pair to K and V of all heads.
    """

    states: Tensor
    rope_key: Tensor
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class AttentionCall:
    """What one attention module hands to its attention function.

    Attributes:
        module: the attention module.
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, tokens, head_dim], after RoPE.
        value: the same shape as key.
        mask: what may be attended to, bool [batch, 1, tokens, tokens]; None means plain causal.
        options: further keyword arguments, such as scaling.
        position_embeddings: cos and sin of RoPE as the module got them, each
            [batch, tokens, rotary_dim]; None where it got none.
        latent: what an MLA module caches instead of K and V; None of other modules.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    position_embeddings: tuple[Tensor, Tensor] | None = None
    latent: CachedLatent | None = None

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer, None outside the decoder."""
        return getattr(self.module, "layer_idx", None)

    @property
    def cached(self) -> tuple[Tensor, Tensor]:
        """What a cache holds of all tokens: K and V, or the latent and the RoPE key."""
        if self.latent is None:
            return self.key, self.value
        return self.latent.states, self.latent.rope_key

    def expand(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of what a cache gives back; `first` and `second` as in `cached`."""
        return (first, second) if self.latent is None else self.latent.expand(first, second)

    def attend(self, start: int, end: int, key: Tensor, value: Tensor, *, every: int = 1) -> Tensor:
        """Attention of the queries of one step, by the call a step with a cache would make.

        Args:
            start: first query.
            end: behind the last query.
            key: [batch, kv_heads, end, head_dim].
            value: the same shape.
            every: 1, or more to leave queries out: those whose position it does not divide.

        Returns:
            [batch, end - start, heads, head_dim]; fewer queries with `every`.
        """
        rows = slice(-start % every, None, every)
        query = self.query[:, :, start:end][:, :, rows]
        explicit = {
            name: self.options[name]
            for name in EXPLICIT_OPTIONS
            if self.options.get(name) is not None
        }
        if self.mask is None:
            mask = sdpa_mask(
                len(query),
                end - start,
                end,
                q_offset=start,
                allow_is_causal_skip=every == 1 and not explicit,
                device=query.device,
            )
        else:
            mask = self.mask[:, :, start:end, :end]
        if every > 1:
            assert mask is not None, "causality is only implied where no row is left out"
            mask = mask[:, :, rows]
        if explicit:
            assert mask is not None, "causality is only implied where sdpa can imply it"
            scaling = self.options.get("scaling")
            return explicit_attention(query, key, value, mask, scaling=scaling, **explicit)
        output: Tensor = sdpa_attention_forward(
            self.module, query, key, value, mask, **self.options
        )[0]
        return output


Tap = Callable[[AttentionCall], Tensor]
"""Answers an attention call with its output, [batch, tokens, heads, head_dim]."""


@dataclass
class _Listener:
    """The tap, and what modules were seen to get since their last attention call."""

    tap: Tap
    positions: dict[nn.Module, Any] = field(default_factory=dict)
    latents: dict[nn.Module, CachedLatent] = field(default_factory=dict)


_LISTENER: ContextVar[_Listener] = ContextVar("kvarn_attention_listener")


@contextmanager
def attention_tap(model: PreTrainedModel, tap: Tap) -> Iterator[None]:
    """Answer every attention call of the model through `tap`; restore the model afterwards.

    Raises:
        UnsupportedModelError: the model's classes do not use transformers' attention interface.
    """
    before = _attention_implementations(model)
    listener = _Listener(tap)
    reset = _LISTENER.set(listener)

    def remember(module: nn.Module, _: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        listener.positions[module] = arguments.get("position_embeddings")

    latent_modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for module in latent_modules:
        vars(module)["expand_kv"] = _remembering(module, listener)
    hooks = [
        module.register_forward_pre_hook(remember, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "layer_idx")
    ]
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not use transformers' attention interface",
                hint=NOT_MEASURED_HINT,
            )
        yield
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
        for module in latent_modules:
            del vars(module)["expand_kv"]
        _LISTENER.reset(reset)


def _remembering(module: nn.Module, listener: _Listener) -> Callable[..., Any]:
    expand = cast("Callable[..., Any]", module.expand_kv)

    def remember(kv_nope: Tensor, k_rot: Tensor) -> Any:
        listener.latents[module] = CachedLatent(kv_nope, k_rot, expand)
        return expand(kv_nope, k_rot)

    return remember


def _attention_implementations(model: PreTrainedModel) -> dict[str, str]:
    config = model.config
    parts = {key: getattr(config, key) for key in config.sub_configs}
    return {"": config._attn_implementation} | {
        key: part._attn_implementation for key, part in parts.items() if part is not None
    }


def _answer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    for name in _UNKNOWN_OPTIONS:
        if options.get(name) is not None:
            raise _unsupported(module, f"uses {name}")
    if query.shape[2] != key.shape[2]:
        raise _unsupported(module, "attends to tokens other than its own")
    if not (options.get("is_causal") or getattr(module, "is_causal", True)):
        raise _unsupported(module, "attends to later tokens")
    listener = _LISTENER.get()
    call = AttentionCall(
        module,
        query,
        key,
        value,
        _selected(attention_mask, options.pop("indices", None)),
        options,
        listener.positions.get(module),
        listener.latents.pop(module, None),
    )
    return listener.tap(call), None


def _selected(mask: Tensor | None, indices: Tensor | None) -> Tensor | None:
    """Narrow a mask to the tokens that sparse attention chose, [batch, tokens, chosen]."""
    if indices is None:
        return mask
    assert mask is not None, "sparse attention is given a mask"
    chosen = torch.zeros_like(mask[:, 0]).scatter(-1, indices.long(), True)
    return mask & chosen[:, None]


def _unsupported(module: nn.Module, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(module).__name__} {what}, which a pseudo-decode does not reproduce",
        hint=NOT_MEASURED_HINT,
    )


AttentionInterface.register(ATTENTION_NAME, _answer)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
