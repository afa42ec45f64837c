"""The report of `kvarn inspect-errors`, as the JSON document `kvarn.errors/1`.

Fields are only added within version 1; a reader ignores those that it does not know. The JSON
Schema is docs/kvarn_errors.schema.json.
"""

import json
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvarn_cli.errors import UsageError

SCHEMA: Final = "kvarn.errors/1"

Interval = tuple[float, float]

_NOISE = 1e-6


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class KLDivergence(_Part):
    """KL(exact ‖ method) of the next-token distributions, nats."""

    mean: float
    interval: Interval | None = Field(description="95 % of the mean over windows")
    by_window: tuple[float, ...] = Field(
        default=(), description="mean of each window, in the same order for all methods"
    )
    median: float
    p999: float = Field(description="99.9th percentile")


class Logits(_Part):
    """How far predictions are from those in full precision, over all from `first_position` on."""

    first_position: int = Field(
        description="the first prediction that sees a packed tile with any of the methods"
    )
    kl: KLDivergence
    top1: float = Field(description="share of predictions with the same first choice")
    loss: float = Field(description="next-token loss of the method, nats")
    loss_exact: float = Field(description="the same in full precision")
    perplexity: float
    perplexity_exact: float


class ContextError(_Part):
    """Attention error of the tokens [start, end) of a window, mean over layers and heads."""

    start: int = Field(description="also the least context length of the block")
    end: int
    mae: float
    interval: Interval | None = Field(description="95 % over windows")

    @property
    def affected(self) -> bool:
        """Whether there is more than float noise."""
        return self.mae > _NOISE


class AttentionErrors(_Part):
    """Mean absolute error of the attention output before W_O, at every fourth token.

    Means over the tokens that see a packed tile (0 where none does), but for `by_context` and
    `by_layer_context`, which are over all tokens of a block.
    """

    mae: float = Field(description="mean over layers and heads")
    layers: tuple[int, ...] = Field(description="index of each row of the tables below")
    by_layer: tuple[float, ...]
    by_head: tuple[tuple[float, ...], ...] = Field(description="[layers][query heads]")
    by_context: tuple[ContextError, ...] = Field(description="blocks of one group of tokens")
    by_layer_context: tuple[tuple[float, ...], ...] = Field(description="[layers][blocks]")


class Attention(_Part):
    """Attention errors in both regimes."""

    accumulated: AttentionErrors = Field(
        description="each layer gets what the layers before it really gave"
    )
    static: AttentionErrors | None = Field(
        description="each layer gets its full-precision input; only its own error is measured"
    )
    gap: float | None = Field(description="accumulated MAE / static MAE - 1")


class WorstTokens(_Part):
    """The tokens with the largest ‖x − x̂‖² of each window, layer and KV head."""

    share: float = Field(description="which share of the tokens these are")
    total_share: float = Field(description="their share of the squared error")
    magnitude_share: float = Field(description="mean of E_M / E_T among them")


class Distribution(_Part):
    """Quantiles over tokens of E_M / ‖x‖² and E_D / ‖x‖², from a capped sample."""

    quantiles: tuple[float, ...]
    magnitude: tuple[float, ...]
    direction: tuple[float, ...]


class VectorErrorSummary(_Part):
    """Errors of packed K, V or latents.

    E_M = (‖x‖ − ‖x̂‖)², E_D = 2‖x‖‖x̂‖(1 − cos θ), E_T their sum.
    """

    magnitude: float = Field(description="mean of E_M / ‖x‖²")
    direction: float = Field(description="mean of E_D / ‖x‖²")
    magnitude_share: float = Field(description="mean of E_M / E_T over all tokens")
    worst: tuple[WorstTokens, ...]
    distribution: Distribution
    sample: tuple[tuple[float, float], ...] = Field(
        description="E_M / ‖x‖² and E_D / ‖x‖² of some tokens, evenly spaced"
    )


class KeyDrift(_Part):
    """How far K, before it is quantized, is from K of the full-precision run: ‖ΔK‖² / ‖K‖²."""

    mean: float = Field(description="over layers and the tokens that see a packed tile")
    by_layer: tuple[float, ...] = Field(description="covered layers")


class Tokens(_Part):
    """Errors of single tokens' vectors; each K̂ against the K just quantized."""

    keys: VectorErrorSummary = Field(description="of K, or of the latent of an MLA model")
    values: VectorErrorSummary | None = Field(description="of V; null for a latent")
    key_drift: KeyDrift


class OracleKL(_Part):
    """Mean KL when some tokens of the cache are restored exactly."""

    restored: Literal["worst", "others"] = Field(
        description="the worst tokens of each layer and head, or all but those"
    )
    share: float = Field(description="which share counts as worst")
    kl_mean: float


class Greedy(_Part):
    """Greedy continuations with the packed cache against those with an exact one."""

    num_tokens: int = Field(description="tokens generated at most")
    same_tokens: tuple[int, ...] = Field(description="equal first tokens, one entry per window")


class Retrieval(_Part):
    """Questions about numbered lines further up, answered with exactly the right tokens."""

    num_lines: int
    num_tokens: int
    num_questions: int
    num_correct: int


class CacheMemory(_Part):
    """Bytes of the covered layers' cache for one sequence."""

    tokens: int
    bytes: int
    sixteen_bit_bytes: int


class MethodResult(_Part):
    """What one method does to the model."""

    method: str = Field(description="spec, see --method")
    bits_per_element: float = Field(
        description="of a covered layer's cache at this length; scales, zero points, outliers, "
        "padding, exact sink and tail included"
    )
    packed_bits_per_element: float = Field(description="of packed tokens alone")
    sink_tokens: int
    residual_tokens: int
    group_size: int
    tail: Literal["exact", "packed"]
    num_windows: int
    logits: Logits
    attention: Attention
    tokens: Tokens | None = Field(description="null where nothing was packed")
    saturated_scales: dict[int, int] = Field(
        default={},
        description="by layer, stored scales (and RoPE keys beside latents) clamped at the largest "
        "number they can be, of all windows",
    )
    memory: tuple[CacheMemory, ...]
    oracle: tuple[OracleKL, ...] | None = None
    greedy: Greedy | None = None
    retrieval: Retrieval | None = None
    elapsed_seconds: float = Field(description="of a quantized pass over one window, median")


class Windows(_Part):
    """What the methods were measured on."""

    dataset: str
    num_samples: int
    sequence_length: int
    seed: int


class Thresholds(_Part):
    """What the verdict calls keeping the model's choices."""

    max_kl: float = 0.05
    min_top1: float = 0.9
    max_loss_increase: float = 0.05


class ErrorReport(_Part):
    """Errors of several methods on one model and one text."""

    schema_: Literal["kvarn.errors/1"] = Field(default=SCHEMA, alias="schema")
    kvarn_version: str
    model: str
    revision: str | None = Field(description="commit on the Hub, when it is known")
    fused: bool = Field(
        description="whether the rotation of V, or of the latent, is fused into the model's weights"
    )
    compute_dtype: str
    num_layers: int
    covered_layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = Field(description="of K and V, or the width of the latent")
    rope_dim: int | None = Field(
        default=None, description="width of the RoPE key beside a latent; null without a latent"
    )
    windows: Windows
    partial: bool = Field(description="interrupted: fewer windows or parts than asked for")
    thresholds: Thresholds = Thresholds()
    retrieval_exact: Retrieval | None = Field(
        default=None, description="the look-up task in full precision"
    )
    plain_seconds: float = Field(description="of a full-precision pass over one window, median")
    results: tuple[MethodResult, ...]

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    @property
    def basis(self) -> str:
        """What is rotated by the model's own weights, in words."""
        if self.rope_dim is None:
            return "V's rotation fused" if self.fused else "V not rotated"
        return "the latent's rotation fused" if self.fused else "the latent not rotated"

    def document(self) -> dict[str, object]:
        """The report as JSON-ready data."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a report that was written with `--json`.

        Raises:
            UsageError: no such file, or it holds no report of this version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{path} is no JSON document") from error
        found = content.get("schema") if isinstance(content, dict) else None
        if found != SCHEMA:
            raise UsageError(
                f"{path} is no error report: its schema is {found!r}, not {SCHEMA!r}",
                hint="write one with kvarn inspect-errors --json",
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(f"{path}: {where}: {first['msg']}") from error
