"""Which tensor of a checkpoint each parameter of the model class is loaded from.

A checkpoint may spell names differently from the class that loads it: without the prefix under
which the class keeps its decoder, or in an older way that transformers renames while loading. The
names that count are the checkpoint's, and the rule between both is transformers' own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.layout import ONLINE_HINT, ModelLayout

_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
"""What old checkpoints store beside the weights, and no class loads."""


def checkpoint_names(
    model: PreTrainedModel, layout: ModelLayout, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """The checkpoint's tensor for each parameter that the fused rotation changes.

    Args:
        model: the class that loads the checkpoint, on any device.
        layout: where V and O live in its parameters.
        shapes: of the checkpoint's tensors, by name.

    Returns:
        Tensor names by parameter name.

    Raises:
        UnsupportedModelError: the class would not load V or O from the checkpoint as they are, or
            would leave out a tensor that the checkpoint keeps beside them.
    """
    parameters = model.state_dict()
    own_names = {parameter: name for name, parameter in model.named_parameters()}
    aliases = {
        name: own_names[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    wanted = set(layout.tensors)
    found: dict[str, str] = {}
    unknown = []
    for tensor, parameter, rearranged in _renamed(model, shapes):
        if parameter not in parameters and not rearranged:
            unknown.append((parameter, tensor))
        own_name = aliases.get(parameter, parameter)
        if own_name in wanted and not rearranged:
            if own_name in found:
                raise UnsupportedModelError(
                    f"{type(model).__name__} loads {own_name} from both {found[own_name]} and "
                    f"{tensor}",
                    hint=ONLINE_HINT,
                )
            found[own_name] = tensor
    for parameter in layout.tensors:
        if parameter not in found:
            raise UnsupportedModelError(
                f"the checkpoint has no tensor that {type(model).__name__} loads into "
                f"{parameter} as it is",
                hint=f"the weights may belong to another class than config.json names; "
                f"or {ONLINE_HINT}",
            )
        expected = tuple(parameters[parameter].shape)
        if shapes[found[parameter]] != expected:
            raise UnsupportedModelError(
                f"{found[parameter]} has shape {list(shapes[found[parameter]])}; the "
                f"configuration needs {list(expected)}",
                hint=ONLINE_HINT,
            )
    modules = tuple(f"{layer.module}." for layer in layout.layers)
    declared = model._keys_to_ignore_on_load_unexpected or ()
    for parameter, tensor in unknown:
        harmless = parameter.endswith(_BUFFERS) or any(
            re.search(pattern, parameter) for pattern in declared
        )
        if parameter.startswith(modules) and not harmless:
            raise UnsupportedModelError(
                f"{tensor} may act between attention and W_O, and {type(model).__name__} does not "
                "load it",
                hint=ONLINE_HINT,
            )
    return found


def checkpoint_modules(
    model: PreTrainedModel, modules: Iterable[str], tensors: Iterable[str]
) -> dict[str, str]:
    """How a checkpoint spells the paths of modules.

    Args:
        model: the class that loads the checkpoint.
        modules: paths in it.
        tensors: names of the checkpoint's tensors.

    Returns:
        By path in the class; its own path where the checkpoint has no tensor of the module.
    """
    spelled = {module: module for module in modules}
    for tensor, parameter, _ in _renamed(model, tensors):
        parts = parameter.split(".")
        for depth in range(1, len(parts)):
            module = ".".join(parts[:-depth])
            if module in spelled:
                spelled[module] = tensor.rsplit(".", depth)[0]
    return spelled


def _renamed(model: PreTrainedModel, tensors: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """Each tensor, the parameter it is loaded into, and whether it is rearranged on the way."""
    conversions = get_model_conversion_mapping(model)
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
    parameters = dict(model.state_dict())
    for tensor in tensors:
        parameter, rearranged = rename_source_key(
            tensor, renamings, converters, model.base_model_prefix, parameters
        )
        yield tensor, parameter, rearranged is not None
