"""The model card of a converted model: what was changed, what it costs, how to run it."""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from kvarn_cli.errors import UsageError
from kvarn_cli.metadata import MODEL_CARD_NAME, BaseModelReference, KVarNConfig, LeftOutLayer

MARKER = "<!-- model card by kvarn: push-to-hub uploads this file as it is, edits included -->"

_INHERITED_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")
_TAGS = ["kvarn", "kv-cache", "kv-cache-quantization"]
_FORK_BITS, _FORK_GROUPS, _FORK_HEAD_DIMS = ((4, 2), (4, 4)), (64, 128), (128, 256, 512)
_FORK_LATENTS = ("mla_k4_g128",)
_PULL_REQUEST_HEAD_DIMS = (64, 128, 256)
_FORK_ITERATIONS, _FORK_SINK_TOKENS = 8, 128
_CONTEXTS = (4096, 32768)


@dataclass(frozen=True)
class ModelCardText:
    """A model card.

    Attributes:
        text: the whole file, front matter first.
        origin: one sentence on where it comes from and what it replaces.
    """

    text: str = field(repr=False)
    origin: str


def write_card(config: KVarNConfig, repo_id: str, existing: bytes | None) -> ModelCardText:
    """The model card to upload.

    A README.md in the folder that carries `MARKER` is a card of ours, perhaps edited, and is kept
    as it is. Any other is the base model's: a new card takes its place and keeps its licence,
    language and task.

    Args:
        config: of the converted folder.
        repo_id: where the card will stand.
        existing: content of the folder's README.md, if there is one.

    Raises:
        UsageError: the front matter of a kept card is broken.
    """
    known = existing.decode("utf-8-sig", errors="replace") if existing is not None else ""
    if MARKER in known:
        _front_matter(known)
        return ModelCardText(known, f"{MODEL_CARD_NAME} of the folder, as it is")
    origin = "written new"
    inherited: dict[str, Any] = {}
    if existing is not None:
        try:
            inherited = _inherited(_front_matter(known))
            kept = ", ".join(inherited) or "nothing"
            origin += f"; replaces the base model's, of which it keeps {kept}"
        except UsageError:
            origin += "; replaces the base model's, whose front matter cannot be read"
    front_matter = _front_matter_of(config.base_model, inherited).to_yaml()
    body = _environment().get_template("model_card.md.jinja").render(_facts(config, repo_id))
    return ModelCardText(f"---\n{front_matter}\n---\n{MARKER}\n\n{body}", origin)


def _front_matter(text: str) -> dict[str, Any]:
    if not text.startswith("---"):
        return {}
    try:
        metadata: dict[str, Any] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UsageError(
            f"the front matter of {MODEL_CARD_NAME} is broken: {error}",
            hint=f"mend it, or remove {MODEL_CARD_NAME} to have a new card written",
        ) from error
    return metadata


def _inherited(metadata: dict[str, Any]) -> dict[str, Any]:
    """The keys to keep, as far as their values are text."""
    kept = {}
    for key in _INHERITED_KEYS:
        value = metadata.get(key)
        words = value if isinstance(value, list) else [value]
        if words and all(isinstance(word, str) for word in words):
            kept[key] = value
    return kept


def _front_matter_of(base_model: BaseModelReference, inherited: dict[str, Any]) -> ModelCardData:
    origin: dict[str, Any] = {}
    if _is_hub_id(base_model):
        origin = {"base_model": base_model.name, "base_model_relation": "quantized"}
    defaults = {"pipeline_tag": "text-generation"}
    return ModelCardData(
        library_name="transformers", tags=_TAGS, **origin, **(defaults | inherited)
    )


def _is_hub_id(base_model: BaseModelReference) -> bool:
    return base_model.name.count("/") == 1


def _facts(config: KVarNConfig, repo_id: str) -> dict[str, Any]:
    cache, settings = config.cache, config.cache.settings
    bits = (settings.key_bits, settings.value_bits)
    widths = (cache.head_dim, cache.rope_dim or 0)
    elements = cache.head_dim + (cache.head_dim if cache.rope_dim is None else cache.rope_dim)
    return {
        "config": config,
        "repo_id": repo_id,
        "title": repo_id.rpartition("/")[2],
        "base_is_on_hub": _is_hub_id(config.base_model),
        "rotation": config.rotations.value,
        "left_out": _group_by_reason(config.layers.left_out),
        "bits_per_element": settings.bits_per_element(*widths),
        "bits_by_context": {
            tokens: settings.cache_bytes(tokens, *widths) * 8 / (tokens * elements)
            for tokens in _CONTEXTS
        },
        "fork": {
            "takes_type": settings.name in _FORK_LATENTS
            or (bits in _FORK_BITS and settings.group_size in _FORK_GROUPS),
            "takes_width": cache.head_dim in _FORK_HEAD_DIMS,
            "pull_request_takes_width": cache.head_dim in _PULL_REQUEST_HEAD_DIMS,
            "two_bit": bits == (2, 2),
            "environment": ""
            if settings.latent
            else _fork_environment(settings.iterations, settings.sink_tokens),
        },
        "even_spread": cache.head_dim.bit_length() % 2 == 1,
    }


def _fork_environment(iterations: int, sink_tokens: int) -> str:
    changed = []
    if iterations != _FORK_ITERATIONS:
        changed.append(f"KVARN_SINKHORN_ITERS={iterations} ")
    if sink_tokens != _FORK_SINK_TOKENS:
        changed.append(f"KVARN_SINK_TOKENS={sink_tokens} ")
    return "".join(changed)


def _group_by_reason(left_out: list[LeftOutLayer]) -> dict[str, list[int]]:
    by_reason = sorted(left_out, key=lambda layer: layer.reason)
    return {
        reason: sorted(layer.layer for layer in layers)
        for reason, layers in groupby(by_reason, key=lambda layer: layer.reason)
    }


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvarn_cli"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["code"] = _code
    environment.filters["number"] = lambda value: f"{value:.3g}"
    return environment


def _code(text: str) -> str:
    """Text as a code span of one line, whatever it holds."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
