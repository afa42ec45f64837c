"""Load a configuration, tokenizer or model from a folder, without its code and without noise."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kvarn_cli.errors import CheckpointError, UnsupportedModelError, UsageError
from kvarn_cli.model.config_file import check_config_file
from kvarn_cli.model.shrunken import MODEL_CODE_ERRORS, named_class

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_device(name: str) -> torch.device:
    """Read a device name; `auto` is the first GPU, or the CPU without one.

    Raises:
        UsageError: no such device on this machine.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used: {reason}", hint="try cpu") from error
    return device


def parse_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """Read the name of a compute dtype; None keeps the one that the weights are stored in.

    `auto` is the stored one on a GPU and float32 on a CPU, where half precision is slow.

    Raises:
        UsageError: not auto, float32, bfloat16 or float16.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in _DTYPES:
        raise UsageError(f"dtype {name!r} is none of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a checkpoint, as transformers reads it.

    Raises:
        UnsupportedModelError: transformers does not know the model type.
        CheckpointError: there is none, or its values are absurd or do not fit together.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds no config.json", hint="name a folder that transformers can load"
        )
    check_config_file(folder / "config.json")
    with quiet_transformers():
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except MODEL_CODE_ERRORS as error:
            raise _loading_error(error, "config.json") from error
    return config


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is broken.
    """
    with quiet_transformers():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except MODEL_CODE_ERRORS as error:
            raise _loading_error(
                error,
                "the tokenizer",
                hint="its files, such as tokenizer.json, belong beside config.json; "
                "kvarn convert needs none with --no-validate",
            ) from error
    return tokenizer


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model of a checkpoint, in evaluation mode.

    The checkpoint chooses neither the attention kernel nor how to generate.

    Args:
        folder: holds the checkpoint.
        dtype: of the weights in memory; None keeps the one they are stored in.
        device: where to put it.
        trust_remote_code: run model code that the checkpoint brings.

    Raises:
        UnsupportedModelError: transformers does not know the architecture.
        CheckpointError: the weights do not fit the configuration.
    """
    loaded: Any
    config = load_config(folder, trust_remote_code=trust_remote_code)
    with quiet_transformers():
        try:
            model_class: Any = named_class(config) or AutoModelForCausalLM
            loaded = model_class.from_pretrained(
                folder,
                dtype=dtype or "auto",
                attn_implementation=_attention(config),
                generation_config=GenerationConfig(),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except MODEL_CODE_ERRORS as error:
            raise _loading_error(error, "the model") from error
    model: PreTrainedModel = loaded[0]
    if missing := loaded[1]["missing_keys"]:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors of the model, first {min(missing)}"
        )
    model.requires_grad_(False)
    model.train(False)
    model.to(device)  # type: ignore[arg-type]
    return model


def _attention(config: PreTrainedConfig) -> str:
    """sdpa, except for classes of transformers that compute attention themselves."""
    model_class: Any = named_class(config)
    if model_class is None and type(config) in AutoModelForCausalLM._model_mapping:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    return "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"


def check_token_ids(model: PreTrainedModel, tokens: Tensor) -> None:
    """Refuse tokens that the model has no embedding for.

    Args:
        model: that will read them.
        tokens: int64, any shape.

    Raises:
        CheckpointError: the tokenizer does not belong to the model.
    """
    embeddings: Any = model.get_input_embeddings()
    largest = int(tokens.max())
    if largest >= embeddings.num_embeddings:
        raise CheckpointError(
            f"the tokenizer gives token {largest}, and the model embeds "
            f"{embeddings.num_embeddings} tokens",
            hint="the tokenizer's files belong to another model",
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and advice off stderr for a while."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _loading_error(
    error: Exception, what: str, hint: str = ""
) -> CheckpointError | UnsupportedModelError:
    message = " ".join(str(error).split())
    if "trust_remote_code" in message or "custom code" in message:
        return UnsupportedModelError(
            f"{what} needs code that the checkpoint brings along",
            hint="read that code, then pass --trust-remote-code to run it",
        )
    if "does not recognize this architecture" in message:
        return UnsupportedModelError(
            f"{what} cannot be loaded: {message.partition('. ')[0]}",
            hint="a newer transformers may: pip install --upgrade transformers",
        )
    if isinstance(error, ImportError):
        return UnsupportedModelError(
            f"{what} cannot be loaded: {message[:300]}",
            hint="install what it asks for; kvarn convert does without it with --no-validate",
        )
    return CheckpointError(f"{what} cannot be loaded: {message[:300]}", hint=hint)
