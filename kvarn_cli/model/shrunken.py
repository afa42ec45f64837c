"""A small random instance of a model's architecture, for proofs that need no weights.

The instance is built by the model's own classes from its own configuration. What decides the
arithmetic is kept: head width, grouping of queries (up to four per KV head), the kinds of layers,
norms, biases, RoPE, tied embeddings. What only costs time is cut: layers, heads, widths,
vocabulary. Every parameter and every float buffer is drawn at random, because a bias at 0 or a
gate at 1 would hide exactly what a proof looks for.
"""

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError

VOCAB_SIZE = 128

_NUM_LAYERS = 2
_NUM_KV_HEADS = 2
_INTERMEDIATE_SIZE = 64
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


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the configuration with few layers, few heads and small widths.

    Layers: the first of each kind in `layer_types`, two at least. Heads: two KV heads and at most
    four query heads for each. `head_dim` stays, so the proof runs with the very rotation that is
    fused; the hidden size equals heads * head_dim where it does in the original.

    Args:
        config: has num_hidden_layers, num_attention_heads and hidden_size; left as it is.
    """
    small = copy.deepcopy(config)
    _keep_layers(small)
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    group = min(num_heads // num_kv_heads, max(2, min(4, 512 // head_dim)))
    small_kv_heads = min(num_kv_heads, _NUM_KV_HEADS)
    small.num_attention_heads = small_kv_heads * group
    if getattr(config, "num_key_value_heads", None) is not None:
        small.num_key_value_heads = small_kv_heads
    small.hidden_size = small_kv_heads * group * head_dim
    if config.hidden_size != num_heads * head_dim:
        small.hidden_size //= 2
    small.vocab_size = VOCAB_SIZE
    for name, value in vars(config).items():
        if name.endswith("intermediate_size") and isinstance(value, int):
            setattr(small, name, min(value, _INTERMEDIATE_SIZE))
        elif name.endswith("_token_id"):
            setattr(small, name, _clamp_ids(value))
    return small


def build_random_model(
    config: PreTrainedConfig, *, seed: int, trust_remote_code: bool
) -> PreTrainedModel:
    """A float64 model in eval mode with every parameter and float buffer drawn from `seed`.

    Matrices keep the variance of what they multiply, vectors get magnitudes from 0.5 to 1.5 with
    random signs, buffers values from 0.1 to 1. The caller's random state is left alone.

    Raises:
        UnsupportedModelError: the architecture's class cannot be built from the configuration.
    """
    model = build_model(config, torch.device("cpu"), trust_remote_code=trust_remote_code)
    model.double().eval()
    _draw(model, torch.Generator().manual_seed(seed))
    return model


def build_model(
    config: PreTrainedConfig, device: torch.device, *, trust_remote_code: bool
) -> PreTrainedModel:
    """A float64 model of the class that loads checkpoints with this configuration.

    Args:
        config: of the model.
        device: where it is built; on `meta` the model takes no memory.
        trust_remote_code: whether code from the checkpoint may run.

    Raises:
        UnsupportedModelError: the class cannot be built from the configuration.
    """
    try:
        with torch.random.fork_rng(devices=[]), device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float64,
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=trust_remote_code,
            )
    except MODEL_CODE_ERRORS as error:
        raise UnsupportedModelError(
            f"no model of {type(config).__name__} can be built: {_first_line(error)}",
            hint="a fusion is only written when it has been proven; use --rotation online",
        ) from error
    return model


def _keep_layers(config: PreTrainedConfig) -> None:
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or []
    kept = {kinds.index(kind) for kind in kinds}
    for index in range(num_layers):
        if len(kept) >= _NUM_LAYERS:
            break
        kept.add(index)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == num_layers:
            setattr(config, name, [value[index] for index in sorted(kept)])
    config.num_hidden_layers = len(kept)


def _clamp_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_clamp_ids(item) for item in value]
    return min(value, VOCAB_SIZE - 1) if isinstance(value, int) else value


def _draw(model: nn.Module, generator: torch.Generator) -> None:
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
