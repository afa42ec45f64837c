"""A small random instance of a model's architecture, for proofs that need no weights.

The instance is built by the model's own classes from its own configuration, shrunken by
`shrunken_config`. Every parameter and every float buffer is drawn at random, because a bias at 0
or a gate at 1 would hide exactly what a proof looks for.
"""

import copy
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.shrunken_config import cut_config

MODEL_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What the code of a model may raise when a configuration does not fit it."""


_FLOAT32_SCORES = "reorder_and_upcast_attn"
"""GPT-2's switch to compute scores in float32, under which its code takes no other dtype."""

MAX_PARAMETERS = 2**28
"""Of a random instance, which takes eight bytes for each."""


class NoInstanceError(UnsupportedModelError):
    """No instance of the model can be built, or none that runs."""


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the configuration with few layers, few heads and small widths.

    Layers: the first of each kind, two at least. Heads: two KV heads, and for each at most four
    query heads, or two where heads are wider than 64; four heads where none shares K and V.
    Head widths stay, so the proof runs with the very rotation that is fused.

    Args:
        config: of a model, with or without parts for images and sound; left as it is.

    Raises:
        NoInstanceError: its values are of kinds that the configuration's own code, or this
            one, cannot read.
    """
    try:
        return cut_config(config)
    except MODEL_CODE_ERRORS as error:
        raise NoInstanceError(
            f"no small instance of {type(config).__name__} can be made: {_first_line(error)}",
            hint="a value in config.json may be wrong",
        ) from error


def build_random_model(
    config: PreTrainedConfig, *, seed: int, trust_remote_code: bool
) -> PreTrainedModel:
    """A float64 model in eval mode with every parameter and float buffer drawn from `seed`.

    Matrices keep the variance of what they multiply, vectors get magnitudes from 0.5 to 1.5 with
    random signs, buffers values from 0.1 to 1. The caller's random state is left alone.

    Raises:
        NoInstanceError: the architecture's class cannot be built from the configuration.
    """
    shapes = build_model(config, torch.device("meta"), trust_remote_code=trust_remote_code)
    size = sum(parameter.numel() for parameter in shapes.parameters())
    if size > MAX_PARAMETERS:
        raise NoInstanceError(
            f"a small instance of {type(shapes).__name__} would have {size:,} parameters",
            hint="a number in config.json may be wrong",
        )
    model = build_model(config, torch.device("cpu"), trust_remote_code=trust_remote_code)
    model.double().eval()
    draw(model, torch.Generator().manual_seed(seed))
    return model


def build_model(
    config: PreTrainedConfig, device: torch.device, *, trust_remote_code: bool
) -> PreTrainedModel:
    """A float64 model of the class that loads checkpoints with this configuration.

    A switch that takes attention scores to float32, and does nothing else, is off in it.

    Args:
        config: of the model.
        device: where it is built; on `meta` the model takes no memory.
        trust_remote_code: whether code from the checkpoint may run.

    Raises:
        UnsupportedModelError: the class cannot be built from the configuration.
    """
    if getattr(config, _FLOAT32_SCORES, False):
        config = copy.copy(config)
        setattr(config, _FLOAT32_SCORES, False)
    try:
        with torch.random.fork_rng(devices=[]), no_init_weights(), device:
            model = _build(config, trust_remote_code=trust_remote_code)
        model.tie_weights()
    except MODEL_CODE_ERRORS as error:
        raise NoInstanceError(
            f"no model of {type(config).__name__} can be built: {_first_line(error)}",
            hint="transformers' own code refuses this configuration; a newer release may take it",
        ) from error
    return model


def named_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Transformers' own class that a configuration names, where none is registered as causal.

    So models that also read images or sound are found, such as Qwen3-VL.
    """
    if type(config) in AutoModelForCausalLM._model_mapping or hasattr(config, "auto_map"):
        return None
    names = config.architectures or [""]
    named = getattr(transformers, str(names[0]), None)
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        return None
    return named if named.config_class is type(config) else None


def _build(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    options: dict[str, Any] = {
        "dtype": torch.float64,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    model: PreTrainedModel
    named = named_class(config)
    if named is not None:
        model = named._from_config(config, **options)
        return model
    if type(config) not in AutoModelForCausalLM._model_mapping and not hasattr(config, "auto_map"):
        config = config.get_text_config(decoder=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    return model


def draw(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter and float buffer of a float64 model as `build_random_model` says."""

    def uniform(shape: torch.Size, low: float, high: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            else:
                sign = uniform(parameter.shape, -1, 1).sign()
                parameter.copy_(sign * uniform(parameter.shape, 0.5, 1.5))
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(uniform(buffer.shape, 0.1, 1))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
