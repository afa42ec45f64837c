"""What the refined encoder gains, part by part, on three kinds of text.

    python benchmarks/encoder_quality.py MODEL [--preset k2v2_g128] [--per-kind 2]
        [--sequence-length 768] [--cover-sliding] [--variant refined] [--variant power=2,refits=3]

A variant is `reference` or `refined` with options (`refined,layout=paper-fp8`), fields of
`encoder_variants.Variant` (what they leave out is as in the refined encoder), `probe` with fields
of `encoder_variants.Probe`, or a method such as `kivi:k2v2_g128`.

Accumulated pseudo-decode on windows of prose, code and worked mathematics. For every variant: mean
KL divergence and attention MAE, both also relative to the reference encoder on the same windows,
with a 95 % bootstrap interval over windows, and the worst window.
"""

import argparse
import importlib
import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from encoder_variants import Variant, parse_variant, query_moments
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvarn_cli.evaluation.calibration import token_windows
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.evaluation.worked_problems import worked_problems
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.methods import Method
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
    tokenizer: PreTrainedTokenizerBase, per_kind: int, sequence_length: int, seed: int = 0
) -> dict[str, Tensor]:
    """The same number of windows of each kind of text, int64 [per_kind, sequence_length]."""
    kinds = {"prose": prose(), "code": code(), "mathematics": worked_problems(600)}
    return {
        kind: token_windows(
            tokenizer, texts, num_samples=per_kind, sequence_length=sequence_length, seed=seed
        )
        for kind, texts in kinds.items()
    }


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


def _needed(methods: Sequence[Method], queries: str) -> bool:
    return any(isinstance(method, Variant) and method.queries == queries for method in methods)


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
    tokenizer = load_tokenizer(arguments.model)
    windows = windows_by_kind(tokenizer, arguments.per_kind, arguments.sequence_length)
    moments: dict[str, dict[int, Tensor]] = {}
    if _needed(methods, "other"):
        other = windows_by_kind(tokenizer, 1, arguments.sequence_length, seed=1)
        moments["other"] = query_moments(model, torch.cat(list(other.values())), covered)
    by_window = []
    for kind, of_kind in windows.items():
        for window in of_kind.split(1):
            if _needed(methods, "own"):
                moments["own"] = query_moments(model, window, covered)
            informed = [
                replace(method, moments=moments[method.queries])
                if isinstance(method, Variant) and method.queries in moments
                else method
                for method in methods
            ]
            measured = measure_methods(model, window, informed, covered=covered, static=False)
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
