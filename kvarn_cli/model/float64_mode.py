"""Run a model in float64 from end to end, whatever it casts to on the way.

Model code takes parts of its arithmetic to float32 on purpose (RMSNorm, softmax). In a model
whose parameters are float64 such a cast *narrows*, and its rounding would hide differences below
1e-7. Under this mode a request for a smaller float dtype is answered with float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class Float64Mode(TorchDispatchMode):
    """Answer every request for a smaller float dtype with float64.

    Attributes:
        narrowed: an operation nevertheless turned float64 into a smaller float, for example by
            writing into a float32 buffer; results then carry float32 rounding.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowed = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(_widen, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if _any_dtype((args, kwargs), _WIDER.values()) and _any_dtype(result, _WIDER.keys()):
            self.narrowed = True
        return result


def _widen(argument: Any) -> Any:
    return _WIDER.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _any_dtype(tree: Any, dtypes: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype in dtypes for leaf in tree_leaves(tree))
