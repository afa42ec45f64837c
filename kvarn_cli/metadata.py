"""The `kvarn_config` block of a converted config.json, and the manifest of the folder.

The block says everything a backend needs to run the cache and everything a reader needs to rebuild
each rotation matrix, in compressed-tensors' words where it has one (`location`, `targets`,
`inverse`, `head_dim`). Its JSON Schema is `docs/kvarn_config.schema.json`.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvarn_cli.errors import CheckpointError, SettingsError
from kvarn_cli.settings import Encoder, KVarNSettings, Layout

FORMAT_VERSION: Final = 1
CONFIG_KEY = "kvarn_config"
MANIFEST_NAME = "kvarn_manifest.json"
MODEL_CARD_NAME = "README.md"

HashName = Literal["sha256", "xxh3_128"]
_SHA256: Final = r"^[0-9a-f]{64}$"


_LayerKey = Annotated[int, Field(ge=0, strict=False)]
"""JSON has no keys but strings."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class BaseModelReference(_Block):
    """The checkpoint that was converted."""

    name: str = Field(description="Hub id, or the name of the local folder")
    revision: str | None = Field(description="commit hash on the Hub, when it is known")
    index_sha256: str = Field(
        description="SHA-256 of model.safetensors.index.json, or of a single file's header"
    )


class CacheFormat(_Block):
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


class LeftOutLayer(_Block):
    """A layer whose cache stays as the engine keeps it."""

    layer: int
    reason: str


class Layers(_Block):
    """Which decoder layers the cache format covers."""

    covered: list[int]
    left_out: list[LeftOutLayer] = []


class Application(_Block):
    """One place where a rotation is applied."""

    targets: list[str] = Field(
        description="modules, named as in the checkpoint; re: starts a regular expression"
    )
    location: Literal[
        "weight_output", "weight_input", "input", "q_attn", "k_cache", "v_cache", "latent_cache"
    ] = Field(
        description="as in compressed-tensors; v_cache and latent_cache are this format's own"
    )
    inverse: bool = False


class RotatedTensor(_Block):
    """Where the channels of heads lie in a tensor that holds a fused rotation.

    Along `axis`, the `head_dim` channels of each head, as a row vector, were multiplied by R.
    """

    axis: Literal[0, 1] = Field(description="0: rows are channels of heads; 1: columns are")
    first_channels: list[Annotated[int, Field(ge=0)]] = Field(
        description="first channel of each head along that axis"
    )


class FoldedNorm(_Block):
    """A norm between a latent and what reads it, whose weight g was moved into the latter.

    The columns of `into` were multiplied by g before they were rotated, g = weight + 1 - `unit`,
    and the weight itself was set to `unit`, with which the norm scales nothing.
    """

    into: str = Field(description="the tensor that reads the latent")
    unit: Literal[0, 1]


class Rotation(_Block):
    """One orthonormal matrix R = H · diag(signs), acting on row vectors: x ↦ x R."""

    type: Literal["hadamard"] = "hadamard"
    order: Literal["sylvester"] = Field(
        default="sylvester",
        description="natural order: entry (i, j) has the sign (-1)^popcount(i & j)",
    )
    normalized: Literal[True] = Field(default=True, description="entries are ±1/√head_dim")
    signs: str | None = Field(
        description="one + or - per column of H, or null for plain H", pattern=r"^[+-]+$"
    )
    head_dim: int
    where: Literal["fused", "online"] = Field(
        description="fused: already in the weights; online: the engine applies it"
    )
    apply: list[Application]
    tensors: dict[str, RotatedTensor] = Field(
        default={}, description="every tensor that a fused rotation turned, by name"
    )
    folded_norms: dict[str, FoldedNorm] = Field(
        default={}, description="every norm that was folded for it, by name of its weight"
    )
    not_fused: str | None = Field(
        default=None, description="why the rotation is online although fusing was tried"
    )

    @model_validator(mode="after")
    def _tensors_hold_what_is_fused(self) -> Self:
        if bool(self.tensors) != (self.where == "fused"):
            raise ValueError("tensors must be listed where the rotation is fused, and only there")
        if others := {norm.into for norm in self.folded_norms.values()} - self.tensors.keys():
            raise ValueError(f"a norm is folded into {min(others)}, which is not listed")
        return self

    @property
    def changed_tensors(self) -> set[str]:
        """Names of all tensors that a fused rotation changed."""
        return self.tensors.keys() | self.folded_norms.keys()

    @model_validator(mode="after")
    def _one_sign_per_channel(self) -> Self:
        if self.signs is not None and len(self.signs) != self.head_dim:
            raise ValueError(f"signs has {len(self.signs)} entries for head_dim {self.head_dim}")
        return self

    @model_validator(mode="after")
    def _engines_apply_plain_h(self) -> Self:
        if self.where == "online" and self.signs is not None:
            raise ValueError("signs must be null: engines apply H itself")
        return self


class Rotations(_Block):
    """The rotations of K (and Q) and of V."""

    key: Rotation | None = Field(description="null for a latent cache, whose RoPE key stays")
    value: Rotation = Field(description="of V, or of the latent")

    @model_validator(mode="after")
    def _keys_are_rotated_online(self) -> Self:
        if self.key is not None and self.key.where != "online":
            raise ValueError("K cannot be fused: RoPE stands between W_K and the cache")
        return self


class ProofRecord(_Block):
    """What was shown before anything was written."""

    checked: Literal["model", "attention modules"] = Field(
        default="model",
        description="what was run in float64 with random weights: a small instance of the model, "
        "or the attention modules alone, where the class cannot be shrunk",
    )
    instance_difference: float = Field(
        description="largest difference of its outputs (logits), before and after fusion, relative "
        "to the largest output"
    )
    instance_tolerance: float
    smallest_control: float = Field(
        description="smallest relative change when one fused tensor is left unrotated"
    )
    weight_change: float = Field(
        description="largest relative change of W_O(W_V x) on the real weights (rounding)"
    )


class EngineErrors(_Block):
    """Errors of the converted model on one kind of engine, against the original in full precision.

    `honours_marker` quantizes V, or the latent, as the fused weights give it; `rotates_again`
    multiplies by H first, as public engines do; `online` is an unfused model that the engine
    rotates.
    """

    engine: Literal["honours_marker", "rotates_again", "online"]
    encoder: Encoder = Field(default="reference", description="that this engine packs tiles with")
    kl_mean: float = Field(description="mean KL divergence of the logits, nats")
    top1_agreement: float = Field(description="share of positions with the same first choice")
    loss_original: float = Field(description="next-token loss of the original, nats")
    loss_quantized: float
    attention_mae: float = Field(description="mean absolute error of the attention output")
    attention_mae_by_layer: dict[_LayerKey, float]
    saturated_scales: dict[_LayerKey, int] = Field(
        default={}, description="by layer, stored scales clamped at the largest number they can be"
    )


class Thresholds(_Block):
    """What validation allows."""

    max_kl: float = Field(gt=0, description="mean KL divergence, nats")
    min_top1: float = Field(ge=0, le=1, description="top-1 agreement")
    max_loss_increase: float = Field(ge=0, description="next-token loss, nats")

    def misses(self, engines: Iterable[EngineErrors]) -> list[str]:
        """What each engine measured beyond these limits, one sentence each."""
        found = []
        for errors in engines:
            increase = errors.loss_quantized - errors.loss_original
            engine: str = errors.engine
            if errors.encoder != "reference":
                engine += f" with the {errors.encoder} encoder"
            if errors.kl_mean > self.max_kl:
                found.append(f"{engine}: KL {errors.kl_mean:.4f} > {self.max_kl}")
            if errors.top1_agreement < self.min_top1:
                agreement = f"top-1 agreement {errors.top1_agreement:.4f} < {self.min_top1}"
                found.append(f"{engine}: {agreement}")
            if increase > self.max_loss_increase:
                found.append(f"{engine}: loss increase {increase:.4f} > {self.max_loss_increase}")
        return found


class Calibration(_Block):
    """The validation run: its text, its results and its verdict."""

    dataset: str
    num_samples: int
    sequence_length: int
    seed: int
    compute_dtype: str
    engines: list[EngineErrors]
    thresholds: Thresholds
    misses: list[str] = Field(
        description="thresholds that were missed with the encoder asked for; written only with "
        "--force"
    )


class KVarNConfig(_Block):
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
        return None if block is None else _read(cls, block, f"config.json: {CONFIG_KEY}")


def _relative_path(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\\" in path:
        raise ValueError(f"{path!r} is no plain path inside the folder")
    return path


class FileRecord(_Block):
    """Size and hash of one file: XXH3 for weights, hashed while they are copied, else SHA-256."""

    size_bytes: int = Field(ge=0)
    sha256: str | None = Field(default=None, pattern=_SHA256)
    xxh3_128: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")

    @model_validator(mode="after")
    def _has_one_hash(self) -> Self:
        if (self.sha256 is None) == (self.xxh3_128 is None):
            raise ValueError("a file has either sha256 or xxh3_128")
        return self

    @property
    def algorithm(self) -> HashName:
        """Which hash it is."""
        return "sha256" if self.xxh3_128 is None else "xxh3_128"

    @property
    def digest(self) -> str | None:
        """The hash's value, in hexadecimal."""
        return self.sha256 or self.xxh3_128


class Manifest(_Block):
    """Every file of a converted folder but the manifest itself and the model card."""

    format_version: Literal[1] = FORMAT_VERSION
    kvarn_version: str
    files: dict[Annotated[str, AfterValidator(_relative_path)], FileRecord]
    tensors: dict[str, Annotated[str, Field(pattern=_SHA256)]] = Field(
        default={}, description="SHA-256 of the bytes of each rotated tensor, by name"
    )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read `kvarn_manifest.json`.

        Raises:
            CheckpointError: the manifest is broken or of an unknown format version.
        """
        return _read(cls, text, MANIFEST_NAME)


_Model = TypeVar("_Model", bound=_Block)


def _read(model: type[_Model], content: object, where: str) -> _Model:
    try:
        if isinstance(content, str | bytes):
            return model.model_validate_json(content)
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if field == "format_version":
            raise CheckpointError(
                f"{where}: format_version {first['input']!r} is unknown to this release, "
                f"which reads version {FORMAT_VERSION}",
                hint="upgrade with: pip install --upgrade kvarn-cli",
            ) from error
        raise CheckpointError(
            f"{where} is broken at {field or 'its start'}: {first['msg']}"
        ) from error
