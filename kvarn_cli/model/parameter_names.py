"""Which parameter of the model class each tensor of a checkpoint is loaded into.

Names in a checkpoint may lack, or have on top, the prefix under which the class keeps its decoder
(`model.` for Llama); transformers adds or drops it while loading. Any other difference means that
the class would not load the tensor, and that a fusion of it would be lost.
"""

import torch
from transformers import PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.layout import ModelLayout, find_layout
from kvarn_cli.model.loading import quiet_transformers
from kvarn_cli.model.shrunken import build_model


def parameter_names(
    config: PreTrainedConfig, layout: ModelLayout, *, trust_remote_code: bool
) -> dict[str, str]:
    """The parameter for each tensor that the fused rotation changes, by the tensor's name.

    The class is built from its configuration without memory for its weights.

    Args:
        config: of the model.
        layout: where V and O live in the checkpoint.
        trust_remote_code: whether code from the checkpoint may run.

    Raises:
        UnsupportedModelError: the class would not load a tensor, or loads V or O of more tensors
            than the checkpoint has.
    """
    with quiet_transformers():
        model = build_model(config, torch.device("meta"), trust_remote_code=trust_remote_code)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    own = [name for layer in find_layout(config, shapes).layers for name in layer.tensors]
    prefix = f"{model.base_model_prefix}."
    names = {}
    for tensor in (name for layer in layout.layers for name in layer.tensors):
        spellings = {tensor, prefix + tensor, tensor.removeprefix(prefix)}
        found = spellings.intersection(own)
        if not found:
            raise UnsupportedModelError(
                f"{type(model).__name__} would not load {tensor}; the tensors that it loads are "
                f"called like {own[0]}",
                hint="the weights belong to another class than config.json names",
            )
        names[tensor] = found.pop()
    if missing := sorted(set(own) - set(names.values())):
        raise UnsupportedModelError(
            f"{type(model).__name__} loads {missing[0]}, which the checkpoint lacks",
            hint="the weights belong to another configuration than config.json",
        )
    return names
