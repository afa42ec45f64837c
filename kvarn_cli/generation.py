"""Generate text with the KV cache packed."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.source import fetch_weights, resolve_source
from kvarn_cli.errors import CheckpointError, UsageError
from kvarn_cli.metadata import KVarNConfig
from kvarn_cli.model.cache_trace import build_without_weights, trace_cache
from kvarn_cli.model.loading import (
    check_token_ids,
    load_config,
    load_model,
    load_tokenizer,
    parse_device,
    parse_dtype,
    quiet_transformers,
)
from kvarn_cli.model.shrunken import MODEL_CODE_ERRORS, NoInstanceError
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.runtime.coverage import (
    architecture_of,
    check_fit,
    check_widths,
    covered_layers,
)
from kvarn_cli.runtime.description import described_cache
from kvarn_cli.settings import DEFAULT_PRESET, Encoder, KVarNSettings

_STOPS = ("eos_token_id", "pad_token_id")
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class Generation:
    """A generated text and what its cache took.

    Attributes:
        text: the new text, special tokens left out.
        prompt_tokens: tokens of the prompt, chat template included.
        new_tokens: tokens generated.
        elapsed_seconds: of the whole generation, prompt included.
        cache_dtype: name of the cache's settings.
        encoder: that packed the tiles.
        saturated_scales: stored scales that had to be clamped, by layer, where there are any.
        cache_bytes: bytes that the cache held at the end.
        sixteen_bit_cache_bytes: bytes of the same tokens in float16.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    elapsed_seconds: float
    cache_dtype: str
    encoder: Encoder
    saturated_scales: dict[int, int]
    cache_bytes: int
    sixteen_bit_cache_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, prompt included."""
        return self.new_tokens / self.elapsed_seconds


class _Streamer(TextStreamer):
    """Hands finished pieces of text to a function."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


def generate_text(
    model_name: str,
    prompt: str,
    *,
    preset: str | None = None,
    encoder: Encoder | None = None,
    max_new_tokens: int = 256,
    chat_template: bool = True,
    seed: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    on_text: Callable[[str], None] = lambda _: None,
) -> Generation:
    """Continue a prompt with a `KVarNCache`.

    Args:
        model_name: local folder or Hub id; converted, or any supported one when `preset` is given.
        prompt: the user's message, or plain text to continue without a chat template.
        preset: settings of the cache; None takes those of the conversion.
        encoder: that packs tiles; None takes that of the conversion, or the reference encoder.
        max_new_tokens: where to stop at the latest.
        chat_template: wrap the prompt as the model's chat template says, if it has one.
        seed: sample, with this seed; None decodes greedily.
        device: where to run.
        dtype: of the model's own arithmetic; see `parse_dtype`.
        revision: branch, tag or commit on the Hub.
        token: Hub token.
        cache_dir: where downloads are kept.
        trust_remote_code: run model code that the checkpoint brings.
        on_text: called with each finished piece of the text.

    Raises:
        UsageError: the model is not converted and no preset is given, or the prompt is empty.
        KvarnError: the model cannot be loaded or its cache cannot be packed.
    """
    named = KVarNSettings.from_name(preset) if preset else None
    torch_device = parse_device(device)
    torch_dtype = parse_dtype(dtype, torch_device)
    source = resolve_source(
        model_name, revision=revision, token=token, cache_dir=cache_dir, weights=False
    )
    config = load_config(source.folder, trust_remote_code=trust_remote_code)
    block = described_cache(config)
    settings = _settings(block, source.name, named, encoder)
    check_fit(config, settings)
    if block is None:
        _check_widths(config, latent=settings.latent, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    tokens = _prompt_tokens(tokenizer, prompt, chat_template).to(torch_device)
    fetch_weights(source, token=token, cache_dir=cache_dir)
    model = load_model(
        open_checkpoint(source.folder).folder,
        dtype=torch_dtype,
        device=torch_device,
        trust_remote_code=trust_remote_code,
    )
    check_token_ids(model, tokens)
    cache = KVarNCache.from_model(model, settings)
    if seed is not None:
        torch.manual_seed(seed)
    generate: Any = model.generate
    started = time.perf_counter()
    with quiet_transformers(), torch.inference_mode():
        output = generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            cache=cache,
            generation_config=_generation_config(
                source.folder, config, max_new_tokens=max_new_tokens, sample=seed is not None
            ),
            streamer=_Streamer(tokenizer, on_text),
        )
    elapsed_seconds = time.perf_counter() - started
    new_tokens = output[0, tokens.shape[1] :]
    memory = cache.memory_bytes()
    return Generation(
        text=str(tokenizer.decode(new_tokens, skip_special_tokens=True)),
        prompt_tokens=tokens.shape[1],
        new_tokens=len(new_tokens),
        elapsed_seconds=elapsed_seconds,
        cache_dtype=cache.settings.cache_dtype,
        encoder=cache.settings.encoder,
        saturated_scales=cache.saturated_scales(),
        cache_bytes=memory.held_bytes,
        sixteen_bit_cache_bytes=memory.sixteen_bit_bytes,
    )


def _settings(
    block: KVarNConfig | None, name: str, named: KVarNSettings | None, encoder: Encoder | None
) -> KVarNSettings:
    """Named settings, else those of the conversion; likewise the encoder."""
    described = None if block is None else block.cache.settings
    settings = named or described
    if settings is None:
        raise UsageError(
            f"{name} is not converted, so its cache has no settings",
            hint=f"convert it, or pass --preset {DEFAULT_PRESET}",
        )
    if encoder is None and described is not None:
        encoder = described.encoder
    return settings if encoder is None else settings.with_(encoder=encoder)


def _check_widths(config: PreTrainedConfig, *, latent: bool, trust_remote_code: bool) -> None:
    """Refuse before the weights are fetched what the cache would refuse at the first token.

    A class that does not run without its weights is left to the cache.
    """
    with suppress(NoInstanceError):
        traced = trace_cache(build_without_weights(config, trust_remote_code=trust_remote_code))
        for index in sorted(traced.keys() & set(covered_layers(config))):
            widths = traced[index].key_width, traced[index].value_width
            check_widths(architecture_of(config), index, *widths, latent=latent)


def _generation_config(
    folder: Path, config: PreTrainedConfig, *, max_new_tokens: int, sample: bool
) -> GenerationConfig:
    """What the model says of stopping and sampling; nothing else of it fits a packed cache."""
    try:
        own = GenerationConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except MODEL_CODE_ERRORS:
        own = {}
    stops = {name: own.get(name) or getattr(config, name, None) for name in _STOPS}
    sampling = {
        name: own[name]
        for name in _SAMPLING
        if sample and isinstance(own.get(name), int | float) and own[name] > 0
    }
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=sample, use_cache=True, **stops, **sampling
    )


def _prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat_template: bool
) -> torch.Tensor:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not UTF-8 text") from error
    templated = chat_template and bool(tokenizer.chat_template)
    if templated:
        message = [{"role": "user", "content": prompt}]
        try:
            prompt = str(
                tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            )
        except (TemplateError, *MODEL_CODE_ERRORS) as error:
            raise CheckpointError(
                f"the model's chat template fails: {' '.join(str(error).split())[:200]}",
                hint="pass --ignore-chat-template to continue the prompt as plain text",
            ) from error
    tokens = tokenizer(prompt, add_special_tokens=not templated).input_ids
    if not tokens:
        raise UsageError("the prompt is empty")
    return torch.tensor([tokens])
