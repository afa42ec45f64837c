"""What a conversion will do, and every refusal that needs no weight to be downloaded or read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvarn_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from kvarn_cli.checkpoint.output_folder import check_before_work
from kvarn_cli.checkpoint.remote_headers import RemoteHeaders
from kvarn_cli.checkpoint.source import Source, fetch_weights, resolve_source
from kvarn_cli.checkpoint.tensor_blocks import rows_at_once
from kvarn_cli.conversion.fusing import (
    RotationPlace,
    find_tensors,
    format_of_weights,
    prove_unquantized,
    unless_refused,
)
from kvarn_cli.conversion.refusals import (
    refuse_adapter,
    refuse_converted,
    refuse_layout,
    refuse_unmeasurable,
)
from kvarn_cli.errors import UnsupportedModelError, UsageError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.metadata import Thresholds
from kvarn_cli.model.cache_layout import CacheLayout, find_cache_layout
from kvarn_cli.model.cache_trace import TracedLayer, build_without_weights, trace_cache
from kvarn_cli.model.latent_layout import latent_readers
from kvarn_cli.model.layout import FUSIBLE_DTYPES, ModelLayout
from kvarn_cli.model.loading import load_config, load_tokenizer
from kvarn_cli.model.parameter_names import checkpoint_modules
from kvarn_cli.model.projections import output_projections
from kvarn_cli.model.proof import Proof
from kvarn_cli.runtime.coverage import check_fit
from kvarn_cli.settings import KVarNSettings
from kvarn_cli.tensor_bytes import read_rows, to_tensor

Note = Callable[[str], None]
_OUTPUT_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Validation:
    """How a conversion is validated.

    Attributes:
        text: calibration text and the windows to take from it.
        thresholds: what is allowed.
        device: where the model runs.
        dtype: of the model's arithmetic; None is the stored one.
    """

    text: CalibrationText
    thresholds: Thresholds
    device: torch.device
    dtype: torch.dtype | None

    @property
    def identity(self) -> dict[str, object]:
        """What decides the result of the validation, JSON-ready."""
        return {
            "text": {name: str(value) for name, value in asdict(self.text).items()},
            "thresholds": self.thresholds.model_dump(mode="json"),
            "dtype": str(self.dtype),
        }


@dataclass(frozen=True)
class ConversionPlan:
    """A checkpoint and what is going to happen to it.

    Attributes:
        source: where the checkpoint came from.
        checkpoint: its opened folder.
        config: its configuration as transformers reads it.
        settings: of the quantizer.
        cache: which layers the packed cache covers.
        layout: the tensors to rotate; None when V is rotated online and no weight changes.
        attention_modules: of the covered layers, with their output projections where these are
            known, as the checkpoint spells them.
        parameters: by tensor to rotate, the parameter that the model class loads it into.
        not_fused: why V's rotation is not fused although it was to be where that is right.
        dtype: safetensors' name of the one that the output's plain floats get; None keeps theirs.
        proof: that rotating them changes nothing; None where there is no layout.
        output: the folder to write; None for a plan that is only looked at.
        overwrite: whether the output may replace an earlier checkpoint.
        validation: how the result is validated; None leaves that out.
        windows: its calibration tokens, int64 [num_samples, sequence_length]; None as well in a
            plan that is only shown.
        trust_remote_code: whether code from the checkpoint may run.
        header_requests: range requests that the plan took.
        header_bytes_received: bytes that they brought.
    """

    source: Source
    checkpoint: Checkpoint
    config: PreTrainedConfig
    settings: KVarNSettings
    cache: CacheLayout
    layout: ModelLayout | None
    attention_modules: Mapping[str, str | None]
    parameters: Mapping[str, str]
    not_fused: str | None
    dtype: str | None
    proof: Proof | None
    output: Path | None
    overwrite: bool
    validation: Validation | None
    windows: Tensor | None
    trust_remote_code: bool
    header_requests: int = 0
    header_bytes_received: int = 0

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """`dtype` as torch has it."""
        return None if self.dtype is None else FUSIBLE_DTYPES[self.dtype]

    @property
    def rotated_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that change."""
        return self.layout.tensors if self.layout else ()

    def read(self, name: str) -> Tensor:
        """A tensor of the source, in its stored dtype."""
        return to_tensor(self.checkpoint.read(name), self.checkpoint.info(name))

    def rows(self, name: str) -> Iterator[Tensor]:
        """The rows of a tensor that is rotated, in blocks that start and end between two heads."""
        step = self.layout.row_step(name) if self.layout else 1
        return read_rows(self.checkpoint, name, rows_at_once(self.checkpoint.info(name), step))

    def cache_bytes(self, sequence_length: int) -> int:
        """Bytes of the covered layers' packed cache for one sequence, sink and tail in 16 bits."""
        heads = self.cache.total_kv_heads
        return heads * self.settings.cache_bytes(sequence_length, *self.cache.widths)

    def sixteen_bit_cache_bytes(self, sequence_length: int) -> int:
        """Bytes of the same layers' cache in float16."""
        exact = self.settings.with_(sink_tokens=sequence_length)
        return self.cache.total_kv_heads * exact.cache_bytes(sequence_length, *self.cache.widths)

    @property
    def packed_bytes_per_token(self) -> float:
        """Bytes of the covered layers' packed tiles for one of their tokens."""
        record_bytes = self.settings.record_bytes(*self.cache.widths)
        return self.cache.total_kv_heads * record_bytes / self.settings.group_size


def plan_conversion(
    model: str,
    *,
    settings: KVarNSettings,
    rotation: RotationPlace,
    dtype: str | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    validation: Validation | None = None,
    headers_only: bool = False,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    note: Note = lambda _: None,
) -> ConversionPlan:
    """Resolve a model and decide what to do with it, before any weight is read.

    A model on the Hub is downloaded last: once the output can be written, the calibration text is
    long enough, and its configuration can be converted, with the fusion proven on a small instance.

    Args:
        model: local folder or Hub id.
        settings: of the quantizer.
        rotation: whether V's rotation goes into the weights; `auto` puts it there where that is
            proven to change nothing, and leaves it to the engine elsewhere.
        dtype: float16, bfloat16 or float32: the output's plain floats get it; None keeps theirs.
        output: the folder to write; None for a plan that is only looked at.
        overwrite: whether the output may replace an earlier checkpoint.
        validation: how to validate the result; None leaves that out.
        headers_only: of a model on the Hub, read the headers of its weights and nothing else of
            them, and leave the calibration text unread; such a plan can be shown, not run.
        revision: branch, tag or commit on the Hub.
        token: Hub token.
        cache_dir: where downloads are kept.
        trust_remote_code: whether code from the checkpoint may run.
        note: told what is going on, a sentence at a time.

    Raises:
        UsageError: the output or the calibration text cannot be used, or no engine stores records
            in the layout of `settings`.
        UnsupportedModelError: the model cannot be converted like this.
        CheckpointError: a file is broken.
        HubError: the download failed.
    """
    output_dtype = _output_dtype(dtype)
    refuse_layout(settings)
    if validation is not None:
        validation.text.check_length(settings)
    source = resolve_source(
        model, revision=revision, token=token, cache_dir=cache_dir, weights=False
    )
    if output is not None:
        check_before_work(source.folder, output, overwrite=overwrite)
    config = load_config(source.folder, trust_remote_code=trust_remote_code)
    refuse_converted(config.to_dict(), source)
    refuse_adapter(source)
    model_class = build_without_weights(config, trust_remote_code=trust_remote_code)
    traced = trace_cache(model_class)
    cache = find_cache_layout(config, traced)
    check_fit(config, settings)
    windows = None
    if validation is not None and not headers_only:
        tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
        windows = validation.text.windows(tokenizer)
    proof, layout, not_fused = None, None, None
    if rotation != "online":
        note("Proving the fusion on a small random instance of the model")
        proof, not_fused = unless_refused(
            rotation,
            lambda: prove_unquantized(
                source.folder,
                model_class,
                traced,
                cache.head_dim,
                trust_remote_code=trust_remote_code,
            ),
        )
    if validation is not None:
        refuse_unmeasurable(config, trust_remote_code=trust_remote_code)
    remote = None
    if headers_only and source.from_hub:
        remote = RemoteHeaders(source.name, source.revision, token)
    elif source.from_hub:
        note("Downloading the weights, as far as they are not in the cache")
        fetch_weights(source, token=token, cache_dir=cache_dir)
    checkpoint = open_checkpoint(source.folder, remote)
    if proof is not None:
        proven = proof
        layout, not_fused = unless_refused(
            rotation, lambda: find_tensors(checkpoint, model_class, traced, proven)
        )
    dtypes = {name: checkpoint.info(name).dtype for name in checkpoint.weight_map}
    quantized = format_of_weights(source.folder, dtypes)
    if output_dtype is not None and quantized is not None:
        raise UnsupportedModelError(
            f"{source.name} has quantized weights, whose scales must keep their dtype: {quantized}",
            hint="leave out --dtype",
        )
    return ConversionPlan(
        source=source,
        checkpoint=checkpoint,
        config=config,
        settings=settings,
        cache=cache,
        layout=layout[0] if layout else None,
        attention_modules=_attention_modules(checkpoint, model_class, traced, cache),
        parameters=layout[1] if layout else {},
        not_fused=not_fused,
        dtype=output_dtype,
        proof=proof if layout else None,
        output=output,
        overwrite=overwrite,
        validation=validation,
        windows=windows,
        trust_remote_code=trust_remote_code,
        header_requests=remote.requests if remote else 0,
        header_bytes_received=remote.received_bytes if remote else 0,
    )


def _output_dtype(name: str | None) -> str | None:
    if name is None:
        return None
    if name not in _OUTPUT_DTYPES:
        raise UsageError(f"dtype {name!r} is none of {', '.join(_OUTPUT_DTYPES)}")
    return _OUTPUT_DTYPES[name]


def _attention_modules(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    traced: Mapping[int, TracedLayer],
    cache: CacheLayout,
) -> dict[str, str | None]:
    layers = [traced[index] for index in cache.covered]
    modules = [path for layer in layers for path in (layer.module, *layer.readers)]
    find_readers = output_projections if cache.rope_dim is None else latent_readers
    outputs = find_readers(model, modules)
    paths = {path for pair in outputs.items() for path in pair if path is not None}
    spelled = checkpoint_modules(model, paths, checkpoint.weight_map)
    return {
        spelled[attention]: None if output is None else spelled[output]
        for attention, output in outputs.items()
    }
