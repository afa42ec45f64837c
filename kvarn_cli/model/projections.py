"""Find V and O in the modules of a model, by their names and shapes.

Everything here is a *proposal*. Names cannot tell what an attention class computes between V and
the output projection, nor how a joined projection is divided among its heads; `proof` runs the
class with each proposal and keeps the one that changes nothing.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import TracedLayer
from kvarn_cli.model.layout import ONLINE_HINT, AttentionLayer, HeadSlices, ModelLayout

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


def find_layout(
    model: PreTrainedModel, traced: Mapping[int, TracedLayer], head_dim: int, arrangement: str
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
    model: PreTrainedModel, attention_modules: Iterable[str]
) -> dict[str, str | None]:
    """The output projection of each attention module, by path; None where its name is unknown."""
    paths = {module: path for path, module in model.named_modules()}
    found = {path: _output_projection(model, path) for path in attention_modules}
    return {path: None if linear is None else paths[linear] for path, linear in found.items()}


def has_joined_projections(model: PreTrainedModel, traced: Mapping[int, TracedLayer]) -> bool:
    """Whether some module computes V with Q and K in one projection."""
    return any(
        _child(model.get_submodule(layer.module), _VALUE_NAMES) is None
        and _child(model.get_submodule(layer.module), _JOINED_NAMES) is not None
        for layer in traced.values()
    )


def _attention_layer(
    model: PreTrainedModel,
    path: str,
    index: int,
    traced: TracedLayer,
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


def _output_projection(model: PreTrainedModel, path: str) -> Linear | None:
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
