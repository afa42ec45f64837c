"""What a conversion will do, and every refusal that needs no weight to be downloaded or read."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvarn_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from kvarn_cli.checkpoint.output_folder import check_output
from kvarn_cli.checkpoint.source import Source, fetch_weights, resolve_source
from kvarn_cli.conversion.tensor_bytes import to_tensor
from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.rehearsal import rehearse
from kvarn_cli.metadata import KVarNConfig, Thresholds
from kvarn_cli.model.cache_layout import CacheLayout, find_cache_layout
from kvarn_cli.model.layout import ModelLayout, check_dtypes, find_layout
from kvarn_cli.model.loading import load_config, load_tokenizer
from kvarn_cli.model.parameter_names import parameter_names
from kvarn_cli.model.proof import Proof, prove_fusion
from kvarn_cli.runtime.coverage import architecture_of
from kvarn_cli.settings import KVarNSettings

RotationPlace = Literal["fused", "online"]
Note = Callable[[str], None]


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
        parameters: by tensor to rotate, the parameter that the model class loads it into.
        proof: that rotating them changes nothing; None where there is no layout.
        output: the folder to write; None for a plan that is only looked at.
        overwrite: whether the output may replace an earlier checkpoint.
        validation: how the result is validated; None leaves that out.
        windows: its calibration tokens, int64 [num_samples, sequence_length].
        trust_remote_code: whether code from the checkpoint may run.
    """

    source: Source
    checkpoint: Checkpoint
    config: PreTrainedConfig
    settings: KVarNSettings
    cache: CacheLayout
    layout: ModelLayout | None
    parameters: Mapping[str, str]
    proof: Proof | None
    output: Path | None
    overwrite: bool
    validation: Validation | None
    windows: Tensor | None
    trust_remote_code: bool

    @property
    def rotated_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that change."""
        layers = self.layout.layers if self.layout else ()
        return tuple(name for layer in layers for name in layer.tensors)

    def read(self, name: str) -> Tensor:
        """A tensor of the source, in its stored dtype."""
        return to_tensor(self.checkpoint.read(name), self.checkpoint.info(name))

    def cache_bytes(self, sequence_length: int) -> int:
        """Bytes of the covered layers' packed cache for one sequence, sink and tail in 16 bits."""
        heads = len(self.cache.covered) * self.cache.num_kv_heads
        return heads * self.settings.cache_bytes(sequence_length, self.cache.head_dim)

    def sixteen_bit_cache_bytes(self, sequence_length: int) -> int:
        """Bytes of the same layers' cache in float16."""
        heads = len(self.cache.covered) * self.cache.num_kv_heads
        return heads * sequence_length * 2 * self.cache.head_dim * 2

    def summary(self) -> dict[str, object]:
        """The plan as JSON-ready data."""
        checkpoint = self.checkpoint
        return {
            "model": self.source.name,
            "revision": self.source.revision,
            "architecture": architecture_of(self.config),
            "cache_dtype": self.settings.cache_dtype,
            "encoder": self.settings.encoder,
            "rotation": "fused" if self.layout else "online",
            "proof": asdict(self.proof) if self.proof else None,
            "head_dim": self.cache.head_dim,
            "record_bytes": self.settings.record_bytes(self.cache.head_dim),
            "bits_per_element": self.settings.bits_per_element(self.cache.head_dim),
            "layers_covered": list(self.cache.covered),
            "layers_left_out": [
                {"layer": layer.index, "reason": layer.reason} for layer in self.cache.left_out
            ],
            "tensors_rotated": list(self.rotated_tensors),
            "bytes_rotated": sum(checkpoint.info(n).size_bytes for n in self.rotated_tensors),
            "bytes_copied": checkpoint.shard_bytes,
            "files": sorted([*checkpoint.shards, *map(str, checkpoint.sidecars)]),
            "files_left_out": [
                {"path": str(path), "reason": reason} for path, reason in checkpoint.left_out
            ],
            "cache_bytes": {
                str(length): {
                    "packed": self.cache_bytes(length),
                    "float16": self.sixteen_bit_cache_bytes(length),
                }
                for length in (32_768, 131_072)
            },
        }


def plan_conversion(
    model: str,
    *,
    settings: KVarNSettings,
    rotation: RotationPlace,
    output: Path | None = None,
    overwrite: bool = False,
    validation: Validation | None = None,
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
        rotation: whether V's rotation goes into the weights.
        output: the folder to write; None for a plan that is only looked at.
        overwrite: whether the output may replace an earlier checkpoint.
        validation: how to validate the result; None leaves that out.
        revision: branch, tag or commit on the Hub.
        token: Hub token.
        cache_dir: where downloads are kept.
        trust_remote_code: whether code from the checkpoint may run.
        note: told what is going on, a sentence at a time.

    Raises:
        UsageError: the output or the calibration text cannot be used.
        UnsupportedModelError: the model cannot be converted like this.
        CheckpointError: a file is broken.
        HubError: the download failed.
    """
    if validation is not None:
        validation.text.check_length(settings)
    source = resolve_source(
        model, revision=revision, token=token, cache_dir=cache_dir, weights=False
    )
    if output is not None:
        check_output(source.folder, output, overwrite=overwrite)
    config = load_config(source.folder, trust_remote_code=trust_remote_code)
    _refuse_converted(config.to_dict(), source)
    cache = find_cache_layout(config)
    if not cache.covered:
        raise UnsupportedModelError(
            f"{source.name} has no layer whose cache grows with the sequence: "
            f"{cache.left_out[0].reason}",
            hint="its cache is small already; there is nothing to convert",
        )
    windows = None
    if validation is not None:
        tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
        windows = validation.text.windows(tokenizer)
    proof = None
    if rotation == "fused":
        note("Proving the fusion on a small random instance of the model")
        proof = prove_fusion(config, trust_remote_code=trust_remote_code)
    if validation is not None:
        _rehearse_validation(config, trust_remote_code=trust_remote_code)
    if source.from_hub:
        note("Downloading the weights, as far as they are not in the cache")
    fetch_weights(source, token=token, cache_dir=cache_dir)
    checkpoint = open_checkpoint(source.folder)
    layout, parameters = None, {}
    if rotation == "fused":
        layout = _find_layout(config, checkpoint)
        parameters = parameter_names(config, layout, trust_remote_code=trust_remote_code)
    return ConversionPlan(
        source=source,
        checkpoint=checkpoint,
        config=config,
        settings=settings,
        cache=cache,
        layout=layout,
        parameters=parameters,
        proof=proof,
        output=output,
        overwrite=overwrite,
        validation=validation,
        windows=windows,
        trust_remote_code=trust_remote_code,
    )


def _refuse_converted(config: dict[str, object], source: Source) -> None:
    block = KVarNConfig.from_config_dict(config)
    if block is not None:
        raise UnsupportedModelError(
            f"{source.name} was converted already, to {block.cache.dtype} with V's rotation "
            f"{block.rotations.value.where}; converting it twice would rotate V twice",
            hint=f"convert the original again: {block.base_model.name}",
        )


def _rehearse_validation(config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    try:
        rehearse(config, trust_remote_code=trust_remote_code)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"the conversion cannot be validated: {error}",
            hint="convert without validation: --no-validate",
        ) from error


def _find_layout(config: PreTrainedConfig, checkpoint: Checkpoint) -> ModelLayout:
    infos = {name: checkpoint.info(name) for name in checkpoint.weight_map}
    layout = find_layout(config, {name: info.shape for name, info in infos.items()})
    check_dtypes(layout, {name: info.dtype for name, info in infos.items()})
    return layout
