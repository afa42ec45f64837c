"""What was shown of a conversion: the proof of its fusion, and the validation run."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from kvarn_cli.metadata.base import Block
from kvarn_cli.settings import Encoder

_LayerKey = Annotated[int, Field(ge=0, strict=False)]
"""JSON has no keys but strings."""


class ProofRecord(Block):
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


class EngineErrors(Block):
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
        default={},
        description="by layer, stored scales (and RoPE keys beside latents) clamped at the largest "
        "number they can be",
    )


class Thresholds(Block):
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


class Calibration(Block):
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
