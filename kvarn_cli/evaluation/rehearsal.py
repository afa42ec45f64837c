"""Whether a model can be measured, found out before its weights are downloaded or loaded.

A measurement runs a window in one pass and computes what a cache would have given back. That this
equals decoding with `KVarNCache` is shown for each architecture on a small random instance: model
code may do with its cached states what one pass does not reproduce, such as masks made from V.
"""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.attention import NOT_MEASURED_HINT, attention_tap
from kvarn_cli.evaluation.pseudo_decode import record_exact
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention, decode_steps
from kvarn_cli.model.loading import quiet_transformers
from kvarn_cli.model.shrunken import MODEL_CODE_ERRORS, build_random_model, shrink_config
from kvarn_cli.model.shrunken_config import VOCAB_SIZE
from kvarn_cli.quantization.methods import KVarN
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.runtime.coverage import covered_layers, rope_key_dim
from kvarn_cli.settings import DEFAULT_LATENT_PRESET, DEFAULT_PRESET, KVarNSettings

_NUM_TOKENS = 80
_SMALL_TILES = {"group_size": 32, "sink_tokens": 32}
_LARGEST_SHARE = 0.1


def rehearse(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Run a small random instance of a model the way a measurement runs the model.

    Whatever the code of its attention does that a pseudo-decode cannot reproduce is refused here.
    A class of which no small instance can be built or run is left to the measurement itself.

    Args:
        config: of the model; a text model nested inside it is found.
        trust_remote_code: whether code from the checkpoint may run.

    Raises:
        UnsupportedModelError: naming what stands in the way.
    """
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        try:
            small = shrink_config(config)
            model = build_random_model(small, seed=0, trust_remote_code=trust_remote_code)
            with torch.inference_mode():
                model(input_ids=_tokens(model, 2), use_cache=False)
        except (UnsupportedModelError, *MODEL_CODE_ERRORS):
            return
        check_agreement(model, _NUM_TOKENS)


def check_agreement(model: PreTrainedModel, num_tokens: int) -> None:
    """Decode random tokens with `KVarNCache`, and compare with the pseudo-decode's one pass.

    Attention in one step and in many rounds differently, and a value on the border of two codes
    may then get the other one. So the two ways agree when what is between them is small against
    what quantization does.

    Args:
        model: in eval mode.
        num_tokens: to decode; fewer where the model has fewer positions.

    Raises:
        UnsupportedModelError: the model cannot be measured, or the two ways differ.
    """
    name = type(model).__name__
    text_config = model.config.get_text_config(decoder=True)
    positions = getattr(text_config, "max_position_embeddings", None)
    if isinstance(positions, int):
        num_tokens = min(num_tokens, positions)
    tokens = _tokens(model, num_tokens)
    covered = covered_layers(model.config)
    settings = _settings(model.config)
    method = KVarN.from_settings(settings)
    plain = DynamicCache(config=text_config)
    lengths = [step.end - step.start for step in decode_steps(num_tokens, settings)]
    if any(isinstance(layer, LinearAttentionLayer) for layer in plain.layers):
        lengths[1:] = [1] * sum(lengths[1:])  # states take a prompt and then single tokens
    with contextlib.suppress(ValueError):
        model.set_attn_implementation("sdpa")
    try:
        exact = record_exact(model, tokens).logits
        one_pass = _one_pass(model, tokens, QuantizedAttention(covered, method))
        effect = float((one_pass - exact).abs().max())
        inputs: dict[str, Tensor] = {}
        decoded = _decode(model, tokens, plain, lengths, inputs)
        if float((decoded - exact).abs().max()) > _LARGEST_SHARE * effect:
            inputs = {"position_ids": torch.arange(num_tokens)[None]}
            decoded = _decode(model, tokens, DynamicCache(config=text_config), lengths, inputs)
        cache = KVarNCache(model.config, settings)
        stepped = _decode(model, tokens, cache, lengths, inputs)
    except MODEL_CODE_ERRORS as error:
        raise UnsupportedModelError(
            f"{name} does not decode step by step with transformers' caches: {error}",
            hint=NOT_MEASURED_HINT,
        ) from error
    if not covered or not effect:
        return
    if not (decoded - exact).abs().max() <= _LARGEST_SHARE * effect:
        raise UnsupportedModelError(
            f"{name} computes other logits in one pass than step by step with transformers' own "
            "cache, so nothing can be said of a quantized one",
            hint=NOT_MEASURED_HINT,
        )
    if not (stepped - one_pass).abs().max() <= _LARGEST_SHARE * effect:
        raise UnsupportedModelError(
            f"what {name} computes with a packed cache is not what a pseudo-decode computes",
            hint=NOT_MEASURED_HINT,
        )


def _settings(config: PreTrainedConfig) -> KVarNSettings:
    preset = DEFAULT_PRESET if rope_key_dim(config) is None else DEFAULT_LATENT_PRESET
    return KVarNSettings.from_name(preset).with_(**_SMALL_TILES)


def _tokens(model: PreTrainedModel, num_tokens: int) -> Tensor:
    """Without the first and last ids, which may mean padding, an end or an image."""
    embeddings: Any = model.get_input_embeddings()
    last = min(embeddings.num_embeddings, VOCAB_SIZE) - 8
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(8, last - 1), last, (1, num_tokens), generator=generator)


@torch.inference_mode()
def _one_pass(model: PreTrainedModel, tokens: Tensor, tap: QuantizedAttention) -> Tensor:
    """Logits of tokens that a tap's cache gives back, [tokens, vocabulary]."""
    with attention_tap(model, tap):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0]


@torch.inference_mode()
def _decode(
    model: PreTrainedModel,
    tokens: Tensor,
    cache: Cache,
    lengths: list[int],
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """Logits of tokens that come in steps, [tokens, vocabulary].

    Args:
        model: in eval mode.
        tokens: int64 [1, tokens].
        cache: empty.
        lengths: of the steps.
        inputs: further inputs of the model, [1, tokens]; generation gives positions to every model.
    """
    steps = {name: value.split(lengths, dim=1) for name, value in inputs.items()}
    logits = [
        model(
            input_ids=step,
            cache=cache,
            use_cache=True,
            **{name: values[index] for name, values in steps.items()},
        ).logits
        for index, step in enumerate(tokens.split(lengths, dim=1))
    ]
    return torch.cat(logits, dim=1)[0]
