"""Where V and O live in a model: names and slices, no mathematics.

Everything here is a *proposal*. Names cannot tell what an attention class computes between V and
the output projection, nor how a joined projection is divided among its heads; `proof` runs the
class with each proposal and keeps the one that changes nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvarn_cli.errors import UnsupportedModelError

if TYPE_CHECKING:  # the classes of models take two seconds and 100 MB, which writing can spare
    from transformers import PreTrainedModel

    from kvarn_cli.model.cache_trace import TracedLayer

FUSIBLE_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes whose tensors can be rotated, by their name in safetensors."""

ONLINE_HINT = "use --rotation online, which changes no weight"

_VALUE_NAMES = ("v_proj", "value", "value_proj", "project_v", "Wv")
_JOINED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "Wo", "wo", "attention_out")
_OUTPUT_BESIDE = "output.dense"

Linear = nn.Linear | Conv1D
HeadStarts = Callable[[int, int, int], Iterable[int]]


def _values_alone(num_heads: int, num_kv_heads: int, head_dim: int) -> Iterable[int]:
    """A projection that makes nothing but V."""
    return range(0, num_kv_heads * head_dim, head_dim)


def _values_last(num_heads: int, num_kv_heads: int, head_dim: int) -> Iterable[int]:
    """All queries, then all keys, then all values."""
    return ((num_heads + num_kv_heads + head) * head_dim for head in range(num_kv_heads))


def _by_group(num_heads: int, num_kv_heads: int, head_dim: int) -> Iterable[int]:
    """KV head after KV head: its queries, its key, its value."""
    group = num_heads // num_kv_heads
    return ((head * (group + 2) + group + 1) * head_dim for head in range(num_kv_heads))


def _in_quarters(num_heads: int, num_kv_heads: int, head_dim: int) -> Iterable[int]:
    """Four blocks, each with a quarter of the queries, values and keys in this order."""
    if num_heads % 4 or num_heads != num_kv_heads:
        return ()
    quarter = num_heads // 4
    return (
        (block * 3 * quarter + quarter + head) * head_dim
        for block in range(4)
        for head in range(quarter)
    )


ARRANGEMENTS: Mapping[str, HeadStarts] = {
    "values last": _values_last,
    "by KV head": _by_group,
    "in quarters": _in_quarters,
}
"""How a joined projection of Q, K and V may be divided: Phi-3, GPT-2, MPT, DBRX; GPT-NeoX, Bloom,
Falcon; CodeGen. From query heads, KV heads and head_dim to the first channel of each head of V."""


@dataclass(frozen=True)
class HeadSlices:
    """The channels of attention heads along one axis of a tensor.

    Attributes:
        tensor: its name.
        axis: 0 where rows are channels of heads, 1 where columns are.
        starts: first channel of each head, multiples of `head_dim`.
        head_dim: channels of a head.
    """

    tensor: str
    axis: Literal[0, 1]
    starts: tuple[int, ...]
    head_dim: int


@dataclass(frozen=True)
class FoldedNorm:
    """A norm between the latent and what reads it, whose weight moves into the latter.

    Attributes:
        tensor: name of its weight w.
        unit: the weight with which it scales nothing; it multiplies by w + 1 - unit.
    """

    tensor: str
    unit: Literal[0, 1]

    def gain(self, weight: Tensor) -> Tensor:
        """What it multiplies the channels of the latent by, float64 [width]."""
        return weight.double() + (1 - self.unit)


@dataclass(frozen=True)
class AttentionLayer:
    """The tensors of one attention module that the fused rotation changes.

    Of an MLA module the latent stands in V's place, as one head: `value` makes it and `output`
    reads it.

    Attributes:
        index: its first layer in the cache, or the one that it reads.
        module: its path; in a checkpoint's layout, as the checkpoint spells it.
        value: V's heads in W_V and, where there is one, in b_V.
        output: the heads that W_O reads; its bias is never changed.
        norm: between the latent and `output`; None of V.
    """

    index: int
    module: str
    value: tuple[HeadSlices, ...]
    output: HeadSlices
    norm: FoldedNorm | None = None

    @property
    def slices(self) -> tuple[HeadSlices, ...]:
        """All that is rotated."""
        return (*self.value, self.output)

    @property
    def rotated(self) -> str:
        """What is rotated, in words."""
        return "V" if self.norm is None else "the latent"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that change."""
        names = tuple(part.tensor for part in self.slices)
        return names if self.norm is None else (*names, self.norm.tensor)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return len(self.output.starts)

    @property
    def num_kv_heads(self) -> int:
        """Heads of V in the weights; a class may cache more."""
        return len(self.value[0].starts)


@dataclass(frozen=True)
class ModelLayout:
    """V and O of each attention module whose heads are `head_dim` wide.

    Layers outside the quantized cache are listed too, so that all of them hold V in one basis.
    """

    head_dim: int
    layers: tuple[AttentionLayer, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that change."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.tensors))

    def row_step(self, tensor: str) -> int:
        """Rows of a tensor that can only be rotated together: those of a head, or any."""
        by_rows = {part.tensor for layer in self.layers for part in layer.slices if part.axis == 0}
        return self.head_dim if tensor in by_rows else 1

    def renamed(self, names: Mapping[str, str]) -> "ModelLayout":
        """The same layout with other tensor names.

        Args:
            names: the new name of each tensor.
        """

        def rename(part: HeadSlices) -> HeadSlices:
            return replace(part, tensor=names[part.tensor])

        return ModelLayout(
            self.head_dim,
            tuple(
                replace(
                    layer,
                    module=rename(layer.output).tensor.rpartition(".")[0].rpartition(".")[0],
                    value=tuple(map(rename, layer.value)),
                    output=rename(layer.output),
                    norm=layer.norm and replace(layer.norm, tensor=names[layer.norm.tensor]),
                )
                for layer in self.layers
            ),
        )


def find_layout(
    model: "PreTrainedModel", traced: "Mapping[int, TracedLayer]", head_dim: int, arrangement: str
) -> ModelLayout:
    """Find V and O of every attention module whose values are `head_dim` wide.

    A module that attends to another one's V is listed with that V and its own O.

    Args:
        model: on any device; its parameters name the tensors.
        traced: from `trace_cache`, of this model.
        head_dim: channels of a head.
        arrangement: key of `ARRANGEMENTS`, for joined projections.

    Raises:
        UnsupportedModelError: a module has no V or O of a known name, or their shapes do not fit
            the heads that it caches.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    layers = {}
    for index, layer in traced.items():
        if layer.value_width == head_dim and layer.module not in layers:
            for path in (layer.module, *layer.readers):
                layers[path] = _attention_layer(
                    model, path, index, layer, names, ARRANGEMENTS[arrangement]
                )
    unique = {layer.output.tensor: layer for layer in reversed(layers.values())}
    return ModelLayout(head_dim, tuple(reversed(unique.values())))


def output_projections(
    model: "PreTrainedModel", attention_modules: Iterable[str]
) -> dict[str, str | None]:
    """The output projection of each attention module, by path; None where its name is unknown."""
    paths = {module: path for path, module in model.named_modules()}
    found = {path: _output_projection(model, path) for path in attention_modules}
    return {path: None if linear is None else paths[linear] for path, linear in found.items()}


def has_joined_projections(model: "PreTrainedModel", traced: "Mapping[int, TracedLayer]") -> bool:
    """Whether some module computes V with Q and K in one projection."""
    return any(
        _child(model.get_submodule(layer.module), _VALUE_NAMES) is None
        and _child(model.get_submodule(layer.module), _JOINED_NAMES) is not None
        for layer in traced.values()
    )


def check_dtypes(layout: ModelLayout, dtypes: Mapping[str, str]) -> None:
    """Refuse V and O that are not stored as plain floating-point numbers.

    Args:
        layout: where V and O live.
        dtypes: safetensors' name of each tensor's dtype, such as `BF16`, by tensor name.

    Raises:
        UnsupportedModelError: a tensor to be fused has another dtype than `FUSIBLE_DTYPES`.
    """
    for name in layout.tensors:
        if dtypes[name] not in FUSIBLE_DTYPES:
            raise UnsupportedModelError(
                f"{name} is stored as {dtypes[name]}; a rotation needs {', '.join(FUSIBLE_DTYPES)}",
                hint=f"fuse the checkpoint before quantizing it, or {ONLINE_HINT}",
            )


def _attention_layer(
    model: "PreTrainedModel",
    path: str,
    index: int,
    traced: "TracedLayer",
    names: Mapping[Tensor, str],
    head_starts: HeadStarts,
) -> AttentionLayer:
    attention = model.get_submodule(traced.module)
    width = traced.value_width
    own_value = _child(attention, _VALUE_NAMES)
    value = own_value or _child(attention, _JOINED_NAMES)
    output = _output_projection(model, path)
    if output is None or value is None:
        missing = "output projection" if output is None else "projection to V"
        raise UnsupportedModelError(
            f"{path} ({type(attention).__name__}) has no {missing} of a known name",
            hint=ONLINE_HINT,
        )
    joined = own_value is None
    read_channels = _input_and_output_channels(output)[0]
    value_channels = _input_and_output_channels(value)[1]
    num_heads = read_channels // width
    num_kv_heads = (value_channels // width - joined * num_heads) // (1 + joined)
    fits = (
        num_kv_heads > 0
        and num_heads % num_kv_heads == 0
        and traced.num_kv_heads in (num_kv_heads, num_heads)
        and read_channels == num_heads * width
        and value_channels == (num_kv_heads + joined * (num_heads + num_kv_heads)) * width
    )
    arrange = head_starts if joined else _values_alone
    starts = tuple(arrange(num_heads, num_kv_heads, width)) if fits else ()
    if not starts:
        raise UnsupportedModelError(
            f"{path}: its projections make {value_channels} channels and read "
            f"{read_channels}, which does not fit the {traced.num_kv_heads} heads of width "
            f"{width} that it caches",
            hint=ONLINE_HINT,
        )
    parameters = [value.weight] if value.bias is None else [value.weight, value.bias]
    return AttentionLayer(
        index=index,
        module=path,
        value=tuple(
            HeadSlices(
                tensor=names[parameter],
                axis=1 if isinstance(value, Conv1D) and parameter.ndim == 2 else 0,
                starts=starts,
                head_dim=width,
            )
            for parameter in parameters
        ),
        output=HeadSlices(
            tensor=names[output.weight],
            axis=0 if isinstance(output, Conv1D) else 1,
            starts=tuple(range(0, num_heads * width, width)),
            head_dim=width,
        ),
    )


def _output_projection(model: "PreTrainedModel", path: str) -> Linear | None:
    """Inside the attention module, or beside it, as in BERT's relatives."""
    found = _child(model.get_submodule(path), _OUTPUT_NAMES)
    if found is not None:
        return found
    beside = f"{path.rpartition('.')[0]}.{_OUTPUT_BESIDE}"
    return _linear(dict(model.named_modules()).get(beside))


def _child(module: nn.Module, names: Iterable[str]) -> Linear | None:
    children = dict(module.named_children())
    found = (_linear(children.get(name)) for name in names)
    return next((linear for linear in found if linear is not None), None)


def _linear(module: nn.Module | None) -> Linear | None:
    """A linear layer, or the one that a thin wrapper keeps as `linear`."""
    candidates: tuple[object, ...] = (module, getattr(module, "linear", None))
    return next((found for found in candidates if isinstance(found, nn.Linear | Conv1D)), None)


def _input_and_output_channels(linear: Linear) -> tuple[int, int]:
    rows, columns = linear.weight.shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)
