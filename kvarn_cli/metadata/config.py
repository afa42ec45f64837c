"""The `kvarn_config` block of a converted config.json.

The block says everything a backend needs to run the cache and everything a reader needs to rebuild
each rotation matrix, in compressed-tensors' words where it has one (`location`, `targets`,
`inverse`, `head_dim`). Its JSON Schema is `docs/kvarn_config.schema.json`.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kvarn_cli.errors import SettingsError
from kvarn_cli.metadata.base import FORMAT_VERSION, Block, read_block
from kvarn_cli.metadata.evidence import Calibration, ProofRecord
from kvarn_cli.metadata.rotations import Rotations
from kvarn_cli.settings import Encoder, KVarNSettings, Layout

CONFIG_KEY = "kvarn_config"


class BaseModelReference(Block):
    """The checkpoint that was converted."""

    name: str = Field(description="Hub id, or the name of the local folder")
    revision: str | None = Field(description="commit hash on the Hub, when it is known")
    index_sha256: str = Field(
        description="SHA-256 of model.safetensors.index.json, or of a single file's header"
    )


class CacheFormat(Block):
    """How K and V of the covered layers are quantized and stored.

    Of an MLA model the latent is what is quantized, as K is, with `key_bits`; the RoPE key beside
    it stays exact, `value_bits` is 16 and `rope_dim` its width.
    """

    dtype: str = Field(description="name that backends take, e.g. kvarn_k4v2_g128")
    key_bits: int
    value_bits: int
    group_size: int = Field(description="tokens in a tile")
    iterations: int = Field(description="passes of the variance normalization")
    log_scale_min: float
    log_scale_max: float
    std_min: float
    std_max: float
    layout: Layout = Field(description="of the record, see docs/cache-format.md")
    head_dim: int = Field(description="channels of K and V, or of the latent")
    rope_dim: int | None = Field(
        default=None, description="channels of the RoPE key beside a latent; null without a latent"
    )
    record_bytes: int = Field(description="bytes of one tile of one KV head, K and V together")
    sink_tokens: int = Field(description="first tokens of a sequence that stay exact")
    residual: Literal["incomplete_tile"] = Field(
        default="incomplete_tile",
        description="the newest tokens stay exact until they fill a tile",
    )
    encoder: Encoder = Field(
        default="reference",
        description="how codes and scales are chosen; decoding is the same for both",
    )

    @classmethod
    def from_settings(
        cls, settings: KVarNSettings, head_dim: int, rope_dim: int | None = None
    ) -> Self:
        """Describe settings for one head width, or for a latent and the RoPE key beside it."""
        return cls(
            dtype=settings.cache_dtype,
            head_dim=head_dim,
            rope_dim=rope_dim,
            record_bytes=settings.record_bytes(head_dim, rope_dim or 0),
            **{name: getattr(settings, name) for name in _SETTINGS_FIELDS},
        )

    @property
    def settings(self) -> KVarNSettings:
        """The quantizer settings that this block describes."""
        return KVarNSettings(**{name: getattr(self, name) for name in _SETTINGS_FIELDS})

    @model_validator(mode="after")
    def _describes_one_record(self) -> Self:
        try:
            settings = self.settings
            record_bytes = settings.record_bytes(self.head_dim, self.rope_dim or 0)
            expected = (settings.cache_dtype, record_bytes)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        if (self.dtype, self.record_bytes) != expected:
            raise ValueError(f"dtype and record_bytes should be {expected[0]} and {expected[1]}")
        if settings.latent != (self.rope_dim is not None):
            raise ValueError("value_bits is 16 where rope_dim is a number, and only there")
        return self


_SETTINGS_FIELDS = tuple(KVarNSettings.__dataclass_fields__.keys() & CacheFormat.model_fields)


class LeftOutLayer(Block):
    """A layer whose cache stays as the engine keeps it."""

    layer: int
    reason: str


class Layers(Block):
    """Which decoder layers the cache format covers."""

    covered: list[int]
    left_out: list[LeftOutLayer] = Field(default=[])


class KVarNConfig(Block):
    """The `kvarn_config` block."""

    format_version: Literal[1] = FORMAT_VERSION
    kvarn_version: str
    base_model: BaseModelReference
    cache: CacheFormat
    layers: Layers
    rotations: Rotations
    proof: ProofRecord | None = Field(description="null when no weight was changed")
    calibration: Calibration | None = Field(description="null when validation was left out")

    @property
    def rotated(self) -> str:
        """What the rotation that can be fused acts on, in words."""
        return "the latent" if self.cache.settings.latent else "V"

    @property
    def fused(self) -> bool:
        """Whether the rotation of V, or of the latent, is already in the weights."""
        return self.rotations.value.where == "fused"

    @model_validator(mode="after")
    def _rotates_what_is_cached(self) -> Self:
        if (self.rotations.key is None) != self.cache.settings.latent:
            raise ValueError("rotations.key is null for a latent cache, and only there")
        return self

    @model_validator(mode="after")
    def _has_one_head_width(self) -> Self:
        for name, rotation in (("key", self.rotations.key), ("value", self.rotations.value)):
            if rotation is not None and rotation.head_dim != self.cache.head_dim:
                raise ValueError(
                    f"rotations.{name} has head_dim {rotation.head_dim}, the cache "
                    f"{self.cache.head_dim}"
                )
        return self

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any]) -> Self | None:
        """Read the block of a config.json.

        Returns:
            None when the configuration has no such block.

        Raises:
            CheckpointError: the block is broken, or of a format version this release cannot read.
        """
        block = config.get(CONFIG_KEY)
        return None if block is None else read_block(cls, block, f"config.json: {CONFIG_KEY}")
