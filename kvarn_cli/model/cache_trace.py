"""What a model class puts into its KV cache, found by running it.

Configurations name heads and widths in dozens of ways, and no list of them stays complete. But
every class hands its keys and values to `cache.update`. So the class is run on a few tokens, on
the meta device and therefore at full size without memory, and what arrives there is written down:
from which module, for which layer, in what shape.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvarn_cli.model.loading import quiet_transformers
from kvarn_cli.model.shrunken import MODEL_CODE_ERRORS, NoInstanceError, build_model

_NUM_TOKENS = 8


@dataclass(frozen=True)
class TracedLayer:
    """What one layer of the cache was given.

    Attributes:
        module: path of the attention module that gave it.
        num_kv_heads: heads of keys and values, as they are cached.
        key_width: channels of a head of keys.
        value_width: channels of a head of values.
        readers: paths of further attention modules, which cache nothing and attend to this layer.
    """

    module: str
    num_kv_heads: int
    key_width: int
    value_width: int
    readers: tuple[str, ...] = ()


def build_without_weights(
    config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model at full size on the meta device, ready to be traced.

    Raises:
        UnsupportedModelError: the architecture's class cannot be built from the configuration.
    """
    with quiet_transformers():
        model = build_model(config, torch.device("meta"), trust_remote_code=trust_remote_code)
        model.set_experts_implementation("batched_mm")
        model.train(False)
    return model


def trace_cache(model: PreTrainedModel) -> dict[int, TracedLayer]:
    """Run a model on a few tokens and note what each layer of its cache is given.

    Args:
        model: on any device; on `meta` nothing is computed.

    Returns:
        By index in the cache, in its order; empty for a model that keeps no keys and values.

    Raises:
        NoInstanceError: the model does not run on tokens alone.
    """
    text_config = model.config.get_text_config(decoder=True)
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=model.device)
    try:
        with (
            quiet_transformers(),
            fx_config.patch(meta_nonzero_assume_all_nonzero=True),  # type: ignore[attr-defined]
            _WithoutData(),  # type: ignore[no-untyped-call]
            _running_modules(model) as running,
            torch.no_grad(),
        ):
            cache = _TracingCache(text_config, running)
            with _Reads(cache, running) as reads:
                model(input_ids=tokens, cache=cache, use_cache=True)
    except MODEL_CODE_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NoInstanceError(
            f"{type(model).__name__} does not run on a few tokens, so what it caches is not "
            f"known: {reason}",
            hint="supported are models that transformers runs as decoders with its DynamicCache",
        ) from error
    return {
        index: replace(cache.traced[index], readers=_readers(model, index, cache, reads.found))
        for index in sorted(cache.traced)
    }


class _TracingCache(DynamicCache):
    """Keeps what each layer was given, and by which tensors it answered."""

    def __init__(self, config: PreTrainedConfig, running: list[str]) -> None:
        super().__init__(config=config)
        self.running = running
        self.traced: dict[int, TracedLayer] = {}
        self.answers: dict[int, tuple[int, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.traced[layer_idx] = TracedLayer(
            module=self.running[-1],
            num_kv_heads=key_states.shape[1],
            key_width=key_states.shape[-1],
            value_width=value_states.shape[-1],
        )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.answers |= {id(tensor): (layer_idx, tensor) for tensor in (keys, values)}
        return keys, values


class _Reads(TorchFunctionMode):
    """Which modules compute with the tensors that each layer of the cache answered."""

    def __init__(self, cache: _TracingCache, running: list[str]) -> None:
        super().__init__()
        self.cache, self.running = cache, running
        self.found: dict[tuple[int, str], None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for argument in args:
                if id(argument) in self.cache.answers and self.running:
                    self.found[self.cache.answers[id(argument)][0], self.running[-1]] = None
        return result


def _readers(
    model: nn.Module, index: int, cache: _TracingCache, reads: Iterable[tuple[int, str]]
) -> tuple[str, ...]:
    """Modules of the same class as the one that filled a layer that read it and fill none."""
    kind = type(model.get_submodule(cache.traced[index].module))
    givers = {layer.module for layer in cache.traced.values()}
    paths = (path for layer, path in reads if layer == index and path not in givers)
    return tuple(path for path in paths if type(model.get_submodule(path)) is kind)


class _WithoutData(TorchDispatchMode):
    """Answer what only data can tell, on the meta device, as if all of it were 0.

    What attention caches does not depend on it; which experts run does.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


@contextmanager
def _running_modules(model: nn.Module) -> Iterator[list[str]]:
    """A list of the modules whose forward is running, outermost first."""
    running: list[str] = []
    handles = []
    for path, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, path=path: running.append(path)),
            module.register_forward_hook(lambda *_: _leave(running), always_call=True),
        ]
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _leave(running: list[str]) -> None:
    running.pop()
