"""What the refined encoder gains, part by part, on three kinds of text.

    python benchmarks/encoder_quality.py MODEL [--preset k2v2_g128] [--per-kind 2]
        [--sequence-length 768] [--cover-sliding] [--variant refined] [--variant key_shares=1:0.8,…]

Accumulated pseudo-decode on windows of prose, code and worked mathematics. For every variant: mean
KL divergence and attention MAE, both also relative to the reference encoder on the same windows,
with a 95 % bootstrap interval over windows, and the worst window.
"""

import argparse
import importlib
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from pydoc_data.topics import topics
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvarn_cli.evaluation.calibration import token_windows
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.worked_problems import worked_problems
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.methods import METHODS, KVarN, Method, parse_method
from kvarn_cli.quantization.refined_encoder import (
    RANGE_SHARES,
    Tokens,
    scale_tokens,
    search_ranges,
    unbiased_factor,
)
from kvarn_cli.quantization.rounding import RoundedRows, to_float16
from kvarn_cli.quantization.tile_record import QuantizedTiles
from kvarn_cli.quantization.variance_normalization import variance_normalize
from kvarn_cli.runtime.coverage import covered_layers
from kvarn_cli.settings import KVarNSettings

MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "copy",
    "csv",
    "dataclasses",
    "difflib",
    "enum",
    "fractions",
    "ftplib",
    "functools",
    "heapq",
    "inspect",
    "ipaddress",
    "logging",
    "mailbox",
    "pathlib",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "tokenize",
    "traceback",
    "typing",
    "uuid",
    "zipfile",
)

TokenFactor = Literal["unbiased", "norm", "least-squares", "none"]


def prose() -> list[str]:
    """Paragraphs of Python's language reference without code, lists and tables."""
    paragraphs = [text for topic in topics.values() for text in topic.split("\n\n")]
    return [
        " ".join(text.split())
        for text in paragraphs
        if len(text) > 120
        and not text.startswith((" ", "*", '"', "="))
        and ">>>" not in text
        and "::=" not in text
    ]


def code() -> list[str]:
    """Sources of modules of the standard library."""
    return [inspect.getsource(importlib.import_module(name)) for name in MODULES]


def windows_by_kind(
    tokenizer: PreTrainedTokenizerBase, per_kind: int, sequence_length: int
) -> dict[str, Tensor]:
    """The same number of windows of each kind of text, int64 [per_kind, sequence_length]."""
    kinds = {"prose": prose(), "code": code(), "mathematics": worked_problems(600)}
    return {
        kind: token_windows(
            tokenizer, texts, num_samples=per_kind, sequence_length=sequence_length, seed=0
        )
        for kind, texts in kinds.items()
    }


@dataclass(frozen=True, kw_only=True)
class Variant(KVarN):
    """The refined encoder with parts exchanged; nothing is packed.

    Attributes:
        key_shares: shares of K's row ranges that are tried, joined with `:`; empty for the
            encoder's own.
        value_shares: the same of V.
        key_factor: what a K token's scale is multiplied by.
        value_factor: the same of a V token.
        refits: least-squares refits of row scale and zero point, with new codes, before that.
        code_bits: bits of K and V codes where no record holds them; 0 for those of the preset.
    """

    name: ClassVar[str] = "variant"

    key_shares: str = ""
    value_shares: str = ""
    key_factor: TokenFactor = "unbiased"
    value_factor: TokenFactor = "unbiased"
    refits: int = 0
    code_bits: int = 0

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`; V is rotated online."""
        hadamard = hadamard_matrix(keys.shape[-1])
        key_tiles, value_tiles = (
            rotate(states, hadamard).unflatten(-2, (-1, self.group_size))
            for states in (keys, values)
        )
        key_bits, value_bits = self.code_bits or self.key_bits, self.code_bits or self.value_bits
        decoded_keys = self._decoded(
            key_tiles.transpose(-1, -2), key_bits, "columns", self.key_shares, self.key_factor
        ).transpose(-1, -2)
        decoded_values = self._decoded(
            value_tiles, value_bits, "rows", self.value_shares, self.value_factor
        )
        return (
            rotate(decoded_keys.flatten(-3, -2), hadamard),
            rotate(decoded_values.flatten(-3, -2), hadamard),
        )

    def _decoded(
        self, tiles: Tensor, bits: int, tokens: Tokens, shares: str, correction: TokenFactor
    ) -> Tensor:
        batch = tiles.reshape(-1, *tiles.shape[-2:])
        scales = variance_normalize(batch, self.settings)
        tried = tuple(map(float, shares.split(":"))) if shares else RANGE_SHARES[bits]
        quantized = search_ranges(batch, scales, bits, tried)
        for _ in range(self.refits):
            quantized = _refitted(batch / quantized.column_scale, quantized, bits)
        factor = _token_factor(batch, quantized.dequantize(), tokens, correction)
        return scale_tokens(quantized, factor, tokens).dequantize().reshape(tiles.shape)


def _refitted(balanced: Tensor, quantized: QuantizedTiles, bits: int) -> QuantizedTiles:
    codes = quantized.rows.codes.float()
    mean_code, mean = (x.mean(-1, keepdim=True) for x in (codes, balanced))
    centred = codes - mean_code
    slope = (centred * (balanced - mean)).sum(-1, keepdim=True)
    slope /= centred.square().sum(-1, keepdim=True).clamp_min(1e-9)
    scale = torch.where(slope > 0, to_float16(slope), quantized.rows.scale)
    zero_point = to_float16(mean - scale * mean_code)
    codes = ((balanced - zero_point) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return QuantizedTiles(RoundedRows(codes, scale, zero_point), quantized.column_scale)


def _token_factor(
    tiles: Tensor, decoded: Tensor, tokens: Tokens, correction: TokenFactor
) -> Tensor:
    unbiased = unbiased_factor(tiles, decoded, tokens)
    channels = -1 if tokens == "rows" else -2
    cosine = torch.cosine_similarity(tiles, decoded, dim=channels).unsqueeze(channels)
    return {
        "unbiased": unbiased,
        "norm": unbiased * cosine,
        "least-squares": unbiased * cosine.square(),
        "none": torch.ones_like(unbiased),
    }[correction]


def parse_variant(spec: str, preset: KVarNSettings) -> Method:
    """`reference`, `refined`, a method such as `kivi:k2v2_g128`, or fields of `Variant`."""
    if spec in ("reference", "refined"):
        return KVarN.from_settings(preset.with_(encoder=spec))
    if spec.partition(":")[0] in METHODS:
        return parse_method(spec)
    kinds = {field.name: type(field.default) for field in fields(Variant)}
    options = dict(option.split("=") for option in spec.split(","))
    own = {name: getattr(preset, name) for name in ("key_bits", "value_bits", "group_size")}
    return Variant(**own | {name: kinds[name](text) for name, text in options.items()})


def interval(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of the ratio of means, windows resampled 10,000 times."""
    draw = random.Random(0)
    pairs = list(zip(numerator, denominator, strict=True))
    ratios = []
    for _ in range(10_000):
        above, below = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(sum(above) / sum(below))
    ratios.sort()
    return ratios[250], ratios[9749]


class Errors(NamedTuple):
    """Of one method on one window."""

    kl: float
    attention_mae: float


def show(spec: str, own: Sequence[Errors], reference: Sequence[Errors]) -> None:
    """Print one row of the table."""
    cells = []
    for name in Errors._fields:
        values, base = ([getattr(errors, name) for errors in side] for side in (own, reference))
        low, high = interval(values, base)
        worst = max(value / other for value, other in zip(values, base, strict=True))
        cells.append(
            f"{sum(values) / len(values):8.4f} {sum(values) / sum(base):6.3f} "
            f"[{low:.3f}, {high:.3f}] {worst:6.3f}"
        )
    print(f"{spec:48} {'  '.join(cells)}", flush=True)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--preset", default="k2v2_g128")
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=768)
    parser.add_argument("--cover-sliding", action="store_true")
    parser.add_argument("--variant", action="append", default=[])
    arguments = parser.parse_args()
    preset = KVarNSettings.from_name(arguments.preset)
    specs = ["reference", *(arguments.variant or ["refined"])]
    methods = [parse_variant(spec, preset) for spec in specs]
    model = load_model(arguments.model, dtype=torch.float32, device=torch.device("cpu"))
    covered = covered_layers(model.config, cover_sliding=arguments.cover_sliding)
    windows = windows_by_kind(
        load_tokenizer(arguments.model), arguments.per_kind, arguments.sequence_length
    )
    by_window = []
    for kind, of_kind in windows.items():
        for window in of_kind.split(1):
            measured = measure_methods(model, window, methods, covered=covered, static=False)
            errors = [
                Errors(result.logits.kl.mean, result.attention.accumulated.mae)
                for result in measured.results
            ]
            by_window.append(errors)
            print(f"{kind:12} KL " + " ".join(f"{each.kl:.4f}" for each in errors), flush=True)
    columns = "KL, to the reference, 95 %, worst window; attention MAE, the same"
    print(
        f"\n{arguments.preset}, {len(by_window)} windows of {arguments.sequence_length}: {columns}"
    )
    for spec, own in zip(specs, zip(*by_window, strict=True), strict=True):
        show(spec, own, [errors[0] for errors in by_window])


if __name__ == "__main__":
    main()
