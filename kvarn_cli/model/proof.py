"""A proof by experiment that fusing V's rotation leaves an architecture's function unchanged.

`layout` only proposes, from names and shapes. What an attention class computes between V and W_O
is decided by its code, so that code is run: on a shrunken instance of the architecture in float64,
with everything drawn at random, the logits before and after the fusion must agree to within
rounding. The fusion is done by the very code that rewrites the checkpoint. Where Q, K and V share
a projection, each known way of dividing it is tried; only the right one can pass. So it is with
what the norm of a latent does with its weight.

Of a class that cannot be shrunk the attention modules are run alone, at their full size, on random
inputs like those that the model gave them. That shows as much about V and W_O, but nothing about
another path from V to the logits.

What was shown holds for attention modules like those that were run. One that has other parameters
is refused.
"""

import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.attention_alone import AttentionAlone, attention_calls
from kvarn_cli.model.cache_trace import TracedLayer, trace_cache
from kvarn_cli.model.comparison import Comparison, RotationSet, all_rotations, compare_fused
from kvarn_cli.model.layout import ONLINE_HINT, ModelLayout
from kvarn_cli.model.loading import quiet_transformers
from kvarn_cli.model.proposals import arrangements_of, proposed_layout
from kvarn_cli.model.shrunken import (
    MODEL_CODE_ERRORS,
    NoInstanceError,
    build_random_model,
    shrink_config,
)
from kvarn_cli.model.shrunken_config import VOCAB_SIZE

_SEED = 20_260_603
_NUM_TOKENS = 24

AttentionKind = tuple[str, tuple[str, ...]]
"""Class of an attention module, and the names of its parameters, whatever their number."""


@dataclass(frozen=True)
class Proof:
    """The numbers of a passed proof; differences are relative to the largest output.

    Attributes:
        architecture: class of the model.
        checked: what was run: a small instance of the model, or its attention modules alone.
        head_dim: width of the rotation that was fused.
        arrangement: the proposal that passed, see `arrangements_of`.
        attention_kinds: of the attention modules that were run.
        tolerance: what `largest_difference` had to stay under.
        largest_difference: largest change of an output by the fusion.
        smallest_control: smallest change when one fused tensor was left unrotated.
        float32_upcast: an operation narrowed float64 to float32, which set the wider tolerance.
        elapsed_seconds: time the proof took.
    """

    architecture: str
    checked: Literal["model", "attention modules"]
    head_dim: int
    arrangement: str
    attention_kinds: tuple[AttentionKind, ...]
    tolerance: float
    largest_difference: float
    smallest_control: float
    float32_upcast: bool
    elapsed_seconds: float

    def check_kinds(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        """Refuse attention modules that are of no kind that was run.

        Args:
            model: at full size, on any device.
            layout: in its parameters.

        Raises:
            UnsupportedModelError: naming the first module.
        """
        for layer in layout.layers:
            if _kind(model, layer.module) not in self.attention_kinds:
                raise UnsupportedModelError(
                    f"{layer.module} has other parts than the attention modules of the instance "
                    "that the fusion was proven on",
                    hint=ONLINE_HINT,
                )


def prove_fusion(
    config: PreTrainedConfig,
    head_dim: int,
    *,
    trust_remote_code: bool = False,
    rotations: RotationSet = all_rotations,
) -> Proof:
    """Prove on a shrunken random instance that the fusion changes nothing.

    Args:
        config: the model's configuration.
        head_dim: width of the heads that are fused.
        trust_remote_code: run modeling code that comes with the checkpoint.
        rotations: from a layout and a reader of its tensors to the rotation of each.

    Raises:
        NoInstanceError: no small instance can be built and run.
        UnsupportedModelError: its logits change, or a tensor left unrotated does not change them.
    """
    start = time.perf_counter()
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        small = shrink_config(config)
        model = build_random_model(small, seed=_SEED, trust_remote_code=trust_remote_code)
        run = partial(_logits, model)
        traced = trace_cache(model)
        if all(layer.key_width != head_dim for layer in traced.values()):
            raise NoInstanceError(
                f"a small instance of {type(model).__name__} has no heads {head_dim} wide",
                hint=ONLINE_HINT,
            )
        weights = {name: weight.data for name, weight in model.named_parameters()}

        def compare(layout: ModelLayout) -> Iterable[Comparison]:
            attention = model.get_submodule(layout.layers[0].module)
            subject = type(model).__name__
            yield compare_fused(
                run, weights, layout, rotations, attention=attention, subject=subject
            )

        return _first_proposal(model, traced, head_dim, compare, "model", start)


def prove_attention(
    model: PreTrainedModel,
    traced: Mapping[int, TracedLayer],
    head_dim: int,
    *,
    rotations: RotationSet = all_rotations,
) -> Proof:
    """Prove on the attention modules alone that the fusion changes nothing.

    One module of each kind is given random weights and random inputs.

    Args:
        model: at full size on the meta device.
        traced: from `trace_cache`, of this model.
        head_dim: width of the heads that are fused.
        rotations: from a layout and a reader of its tensors to the rotation of each.

    Raises:
        UnsupportedModelError: a module's output changes, a tensor left unrotated does not change
            it, or a module cannot be run alone.
    """
    start = time.perf_counter()
    calls = attention_calls(model, {layer.module for layer in traced.values()})

    def compare(layout: ModelLayout) -> Iterable[Comparison]:
        kinds = {_kind(model, layer.module): layer for layer in reversed(layout.layers)}
        for layer in kinds.values():
            if layer.module not in calls:
                raise UnsupportedModelError(
                    f"{layer.module} reads what another module caches; nothing can be proven of "
                    "it alone",
                    hint=ONLINE_HINT,
                )
            attention = model.get_submodule(layer.module)
            alone = AttentionAlone(attention, layer.module, calls[layer.module], seed=_SEED)
            yield compare_fused(
                alone.output,
                alone.weights,
                replace(layout, layers=(layer,)),
                rotations,
                attention=attention,
                subject=type(attention).__name__,
            )

    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        return _first_proposal(model, traced, head_dim, compare, "attention modules", start)


def _first_proposal(
    model: PreTrainedModel,
    traced: Mapping[int, TracedLayer],
    head_dim: int,
    compare: Callable[[ModelLayout], Iterable[Comparison]],
    checked: Literal["model", "attention modules"],
    start: float,
) -> Proof:
    """The first proposed layout that changes nothing."""
    refusals = []
    for arrangement in arrangements_of(model, traced):
        try:
            layout = proposed_layout(model, traced, head_dim, arrangement)
            found = tuple(compare(layout))
        except UnsupportedModelError as error:
            refusals.append(error)
            continue
        return Proof(
            architecture=type(model).__name__,
            checked=checked,
            head_dim=head_dim,
            arrangement=arrangement,
            attention_kinds=tuple({_kind(model, layer.module) for layer in layout.layers}),
            tolerance=max(each.tolerance for each in found),
            largest_difference=max(each.difference for each in found),
            smallest_control=min(each.smallest_control for each in found),
            float32_upcast=any(each.float32_upcast for each in found),
            elapsed_seconds=time.perf_counter() - start,
        )
    raise refusals[0]


def _kind(model: PreTrainedModel, path: str) -> AttentionKind:
    attention = model.get_submodule(path)
    names = {re.sub("[0-9]+", "N", name) for name, _ in attention.named_parameters()}
    return type(attention).__name__, tuple(sorted(names))


def _logits(model: PreTrainedModel) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    vocab_size = getattr(model.config.get_text_config(decoder=True), "vocab_size", VOCAB_SIZE)
    tokens = torch.randint(min(VOCAB_SIZE, vocab_size), (1, _NUM_TOKENS), generator=generator)
    try:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    except MODEL_CODE_ERRORS as error:
        raise NoInstanceError(
            f"a small instance of {type(model).__name__} does not run: {error}", hint=ONLINE_HINT
        ) from error
    if not logits.isfinite().all():
        raise UnsupportedModelError(
            f"a small random instance of {type(model).__name__} computes NaN or infinity, so "
            "nothing can be proven",
            hint="a number in config.json may be wrong, such as rms_norm_eps or rope_theta",
        )
    return logits
