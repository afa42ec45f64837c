"""An attention module that is run without its model, at full size."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache, PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import trace_cache
from kvarn_cli.model.layout import ONLINE_HINT
from kvarn_cli.model.shrunken import MAX_PARAMETERS, MODEL_CODE_ERRORS, draw


@dataclass(frozen=True)
class ModuleCall:
    """What a module was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def attention_calls(model: PreTrainedModel, paths: Iterable[str]) -> dict[str, ModuleCall]:
    """What each attention module is given when the model runs.

    Args:
        model: on any device.
        paths: of the attention modules.
    """
    calls: dict[str, ModuleCall] = {}

    def note(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[path] = ModuleCall(args, kwargs)

    handles = [
        model.get_submodule(path).register_forward_pre_hook(partial(note, path), with_kwargs=True)
        for path in paths
    ]
    try:
        trace_cache(model)
    finally:
        for handle in handles:
            handle.remove()
    return calls


class AttentionAlone:
    """An attention module with random weights, and random inputs of the shapes that it was given.

    Attributes:
        weights: its float64 parameters, by their names in the model.
    """

    def __init__(self, attention: nn.Module, path: str, call: ModuleCall, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = sum(parameter.numel() for parameter in attention.parameters())
        if size > MAX_PARAMETERS:
            raise UnsupportedModelError(
                f"{path} has {size:,} parameters, too many to be run alone in float64",
                hint=ONLINE_HINT,
            )
        self.module = copy.deepcopy(attention).to_empty(device="cpu").double()
        draw(self.module, generator)
        for buffer in self.module.buffers():
            if not buffer.is_floating_point():
                buffer.fill_(1)
        self.weights = {f"{path}.{name}": p.data for name, p in self.module.named_parameters()}
        self.args, self.kwargs = tree_map(
            lambda leaf: _random_like(leaf, generator), (call.args, call.kwargs)
        )

    def output(self) -> Tensor:
        """The attention output behind W_O, [batch, tokens, hidden_size]."""
        try:
            result = self.module(*self.args, **self.kwargs)
        except MODEL_CODE_ERRORS as error:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} cannot be run alone: {error}", hint=ONLINE_HINT
            ) from error
        output: Tensor = tree_leaves(result)[0]
        return output


def _random_like(leaf: Any, generator: torch.Generator) -> Any:
    if isinstance(leaf, Cache):
        return None
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
    return torch.ones(leaf.shape, dtype=leaf.dtype)
