"""When is a token's unbiased factor better than keeping its norm? A prediction, head by head.

    python benchmarks/token_factors.py MODEL [--preset k2v2_g128] [--per-kind 1]
        [--sequence-length 768] [--cover-sliding] [--unit-keys]

With x̂ at the angle θ to x, the unbiased factor leaves the error x tan θ across x; keeping the norm
leaves x sin θ across it and x (1 − cos θ) along it. Across errors are noise and add up over tokens
by squares, errors along x add up as x does. So the unbiased factor should win for a head where

    R = ‖Σ p x‖² / Σ ‖p x‖²  >  ((1 + cos θ) / cos θ)²        V, over the packed tokens

and the same for K, where an error moves the output by p δs (v − o), with the score s in place of x
and ‖q‖ ‖k‖ / √d in place of the noise. Both sides are measured here on the full-precision run
(static regime, sink exact), and so is the attention error of every factor on K alone and V alone.
`--unit-keys` gives all keys of a head the same norm first: what a k norm without RoPE would do.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from encoder_quality import windows_by_kind
from encoder_variants import TokenFactor, Variant
from torch import Tensor

from kvarn_cli.evaluation.attention import AttentionCall, attention_tap
from kvarn_cli.evaluation.pseudo_decode import first_affected
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention, decode_steps
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.runtime.coverage import covered_layers
from kvarn_cli.settings import KVarNSettings

_EVERY = 4
FACTORS: tuple[TokenFactor, ...] = ("unbiased", "norm", "least-squares", "none")
PARTS = ("keys", "values")


@dataclass(frozen=True, kw_only=True)
class OnePart(Variant):
    """K or V quantized, the other exact.

    Attributes:
        part: what is quantized.
    """

    name: ClassVar[str] = "part"

    part: Literal["keys", "values"] = "keys"

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        decoded_keys, decoded_values = super().reconstruct(keys, values)
        return (decoded_keys, values) if self.part == "keys" else (keys, decoded_values)


@dataclass
class Head:
    """Sums over the queries of one head that see packed tiles; K and V apart.

    Attributes:
        coherent: Σ ‖Σ p x‖², what errors along the tokens grow with.
        noise: Σ Σ ‖p x‖², what errors across them grow with.
        errors: squared error of the attention output, by factor.
    """

    coherent: float = 0.0
    noise: float = 0.0
    errors: dict[TokenFactor, float] = field(default_factory=lambda: dict.fromkeys(FACTORS, 0.0))


def seen_packed(num_tokens: int, settings: KVarNSettings) -> Tensor:
    """Which tokens each query finds packed, bool [tokens, tokens]."""
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    sink = settings.sink_tokens
    for step in decode_steps(num_tokens, settings):
        seen[step.start : step.end, sink : sink + step.packed_tokens] = True
    return seen


def ratios(
    call: AttentionCall, seen: Tensor
) -> tuple[dict[str, tuple[Tensor, Tensor]], tuple[float, float]]:
    """What errors grow with, over the queries of `seen`.

    Returns:
        Coherent sum and noise of K and of V, each [heads]; and of the scores, weighted with the
        shares of attention, the mean (‖q‖ ‖k‖)² / d and the mean score's square.
    """
    query, (key, value) = call.query[0], (states[0] for states in (call.key, call.value))
    groups = len(query) // len(key)
    key, value = (states.repeat_interleave(groups, 0) for states in (key, value))
    num_tokens, head_dim = query.shape[1:]
    scaling = call.options.get("scaling") or head_dim**-0.5
    scores = query @ key.transpose(1, 2) * scaling
    allowed = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    if call.mask is not None:
        allowed = call.mask[0, 0]
    shares = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    output = shares @ value
    affected = seen.any(-1)
    affected[torch.arange(num_tokens) % _EVERY != 0] = False
    packed, scores, output = (x[:, affected] for x in (shares * seen, scores, output))
    power = value.square().sum(-1)[:, None]
    weighted = packed * scores
    move = weighted @ value - weighted.sum(-1, keepdim=True) * output
    distance = power - 2 * output @ value.transpose(1, 2) + output.square().sum(-1, keepdim=True)
    lengths = query[:, affected].square().sum(-1)[:, :, None] * key.square().sum(-1)[:, None]
    variance = lengths * scaling**2 / head_dim
    noise = packed.square() * distance.clamp_min(0) * variance
    sums = {
        "keys": (move.square().sum((1, 2)), noise.sum((1, 2))),
        "values": ((packed @ value).square().sum((1, 2)), (packed.square() * power).sum((1, 2))),
    }
    of_scores = [float((packed * x).sum() / packed.sum()) for x in (variance, scores.square())]
    return sums, (of_scores[0], of_scores[1])


def cosines(method: OnePart, call: AttentionCall) -> float:
    """Mean cosine between x and x̂ of K or V over packed tokens."""
    end = method.sink_tokens + method.packed_tokens(call.key.shape[2])
    states = [x[:, :, method.sink_tokens : end] for x in (call.key, call.value)]
    index = PARTS.index(method.part)
    exact, decoded = states[index], method.reconstruct(*states)[index]
    return float(torch.cosine_similarity(exact.float(), decoded, dim=-1).mean())


class Measurements:
    """A tap that measures every head of every call.

    Args:
        covered: layers to look at.
        preset: bits of K and V.
        num_tokens: of each window.
        unit_keys: whether all keys of a head get the same norm first.
    """

    def __init__(
        self, covered: Collection[int], preset: KVarNSettings, num_tokens: int, *, unit_keys: bool
    ) -> None:
        base = OnePart(key_bits=preset.key_bits, value_bits=preset.value_bits)
        self.covered = covered
        self.unit_keys = unit_keys
        self.methods: dict[str, OnePart] = {
            "keys": replace(base, part="keys"),
            "values": replace(base, part="values"),
        }
        self.taps = {
            (part, factor): QuantizedAttention(
                covered,
                replace(method, key_factor=factor, value_factor=factor),
                record_errors=False,
                every=_EVERY,
            )
            for part, method in self.methods.items()
            for factor in FACTORS
        }
        self.seen = seen_packed(num_tokens, preset)
        self.start = -(-first_affected(num_tokens, base) // _EVERY)
        self.heads: dict[tuple[str, int, int], Head] = defaultdict(Head)
        self.means: dict[str, list[float]] = defaultdict(list)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attention in full precision; measured on the way."""
        output = call.attend(0, call.key.shape[2], call.key, call.value)
        layer = call.layer
        if layer is None or layer not in self.covered:
            return output
        if self.unit_keys:
            norms = call.key.norm(dim=-1, keepdim=True)
            call = replace(call, key=call.key / norms * norms.mean(2, keepdim=True))
        self._measure(call, layer)
        return output

    def mean(self, name: str) -> float:
        """Of what was noted under a name."""
        return sum(self.means[name]) / len(self.means[name])

    def _measure(self, call: AttentionCall, layer: int) -> None:
        sums, (variance, squared_score) = ratios(call, self.seen)
        for part, (coherent, noise) in sums.items():
            for head in range(len(coherent)):
                self.heads[part, layer, head].coherent += float(coherent[head])
                self.heads[part, layer, head].noise += float(noise[head])
        exact = call.attend(0, call.key.shape[2], call.key, call.value)[:, ::_EVERY]
        for (part, factor), quantized in self.taps.items():
            error = (quantized(call) - exact)[0, self.start :].square().sum((0, 2))
            for head in range(len(error)):
                self.heads[part, layer, head].errors[factor] += float(error[head])
        for part, states in zip(PARTS, (call.key, call.value), strict=True):
            norms = states.norm(dim=-1)
            self.means[f"spread of {part}"].append(float((norms.std(-1) / norms.mean(-1)).mean()))
            self.means[f"cosine of {part}"].append(cosines(self.methods[part], call))
        keys = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
        aligned = torch.cosine_similarity(call.query, keys, dim=-1)
        self.means["alignment"].append(float(aligned.mean()))
        self.means["variance"].append(variance)
        self.means["squared score"].append(squared_score)


def main() -> None:
    """Measure and print one table for K and one for V."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--preset", default="k2v2_g128")
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=768)
    parser.add_argument("--cover-sliding", action="store_true")
    parser.add_argument("--unit-keys", action="store_true")
    arguments = parser.parse_args()
    model = load_model(arguments.model, dtype=torch.float32, device=torch.device("cpu"))
    windows = windows_by_kind(
        load_tokenizer(arguments.model), arguments.per_kind, arguments.sequence_length
    )
    measured = Measurements(
        covered_layers(model.config, cover_sliding=arguments.cover_sliding),
        KVarNSettings.from_name(arguments.preset),
        arguments.sequence_length,
        unit_keys=arguments.unit_keys,
    )
    with torch.inference_mode(), attention_tap(model, measured):
        for window in torch.cat(list(windows.values())).split(1):
            model(input_ids=window, use_cache=False)
    deviation, size = (measured.mean(name) ** 0.5 for name in ("variance", "squared score"))
    noise = deviation * math.tan(math.acos(measured.mean("cosine of keys")))
    spreads = ", ".join(f"{measured.mean(f'spread of {part}'):.3f} ({part})" for part in PARTS)
    print(f"spread of norms over their mean: {spreads}")
    print(f"cosine of a token's own q and k: {measured.mean('alignment'):.3f}")
    print(f"scores: {size:.2f} in size, noise of {noise:.2f} with K quantized")
    for part in PARTS:
        own = [head for (kind, _, _), head in measured.heads.items() if kind == part]
        cosine = measured.mean(f"cosine of {part}")
        show(part, own, cosine, ((1 + cosine) / cosine) ** 2)


def show(part: str, heads: list[Head], cosine: float, limit: float) -> None:
    """Print squared errors of heads on both sides of the limit, relative to the unbiased factor."""
    above = [head for head in heads if head.coherent > limit * head.noise]
    below = [head for head in heads if head.coherent <= limit * head.noise]
    right = sum(
        (head.errors["unbiased"] < head.errors["norm"]) == (head.coherent > limit * head.noise)
        for head in heads
    )
    print(
        f"\n{part}: cos {cosine:.4f}, limit of R {limit:.2f}, {len(heads)} heads; "
        f"the limit tells the better of unbiased and norm for {right / len(heads):.0%}"
    )
    print(f"{'heads':18} {'number':>6} {'R':>8} " + " ".join(f"{name:>14}" for name in FACTORS))
    for name, group in (("R above the limit", above), ("R below", below), ("all", heads)):
        if group:
            sums = {f: sum(head.errors[f] for head in group) for f in FACTORS}
            together = sum(h.coherent for h in group) / sum(h.noise for h in group)
            cells = " ".join(f"{sums[f] / sums['unbiased']:14.3f}" for f in FACTORS)
            print(f"{name:18} {len(group):6} {together:8.2f} {cells}")


if __name__ == "__main__":
    main()
