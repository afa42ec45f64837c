"""A small error report, measured on a tiny model."""

from functools import cache

import torch
from decoding import calm_model, random_tokens

from kvarn_cli.evaluation.error_report import (
    ErrorReport,
    Greedy,
    Retrieval,
    Windows,
)
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.quantization.methods import parse_method

SPECS = ("exact", "kvarn:k4v4_g32", "kvarn:k2v2_g32", "kivi:k2v2_g32")


@cache
def tiny_report(num_windows: int = 3) -> ErrorReport:
    """Four methods, both regimes, oracle, and made-up results of the tasks."""
    model = calm_model("llama", torch.float64)
    windows = random_tokens(300, batch=num_windows)
    methods = [parse_method(spec) for spec in SPECS]
    measured = measure_methods(model, windows, methods, oracle_shares=(0.05,))
    looked_up = Retrieval(num_lines=5, num_tokens=300, num_questions=5, num_correct=3)
    greedy = Greedy(num_tokens=10, same_tokens=(4,) * num_windows)
    results = [r.model_copy(update={"retrieval": looked_up}) for r in measured.results]
    results[1] = results[1].model_copy(update={"greedy": greedy})
    return ErrorReport(
        kvarn_version="0",
        model="tiny </script><b>",
        revision=None,
        fused=False,
        compute_dtype="float64",
        num_layers=2,
        covered_layers=(0, 1),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        windows=Windows(
            dataset="random tokens", num_samples=num_windows, sequence_length=300, seed=0
        ),
        partial=False,
        retrieval_exact=looked_up,
        plain_seconds=measured.plain_seconds,
        results=tuple(results),
    )
