"""What the one-pass pseudo-decode costs, and what the ways it replaces cost, in one run.

    python benchmarks/pseudo_decode.py [MODEL] [--tokens 2048] [--rounds 3] [--skip-token-loops]

Everything runs on one thread and is counted in CPU time. A round measures the plain forward pass
and every method once, so that both see the same neighbours on the machine; the table shows the
median over rounds, of seconds and of the ratio to the round's plain pass. Loops run once, each
behind a plain pass of its own. With `optimum-quanto` installed, transformers' QuantizedCache is
measured at 2 bits as well as with its own fp8 backend.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.logit_errors import compare_logits
from kvarn_cli.evaluation.pseudo_decode import ExactRun, pseudo_decode, record_exact
from kvarn_cli.evaluation.quantized_attention import decode_steps
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.methods import parse_method
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.settings import KVarNSettings

PREPARE = Path(__file__).parents[1] / "scripts" / "prepare_smollm2.py"
SPECS = (
    "kvarn:k2v2_g128,iterations=0",
    "kvarn:k2v2_g128",
    "kvarn:k2v2_g128,iterations=16",
    "kvarn:k4v2_g128",
    "quarot:k2v2_g128",
    "kivi:k2v2_g128",
    "fp8",
)
OWN = "kvarn:k2v2_g128"
SETTINGS = KVarNSettings.from_name("k2v2_g128")


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU time of one call."""
    started = time.process_time()
    run()
    return time.process_time() - started


@torch.inference_mode()
def fed(model: PreTrainedModel, tokens: Tensor, cache: Cache, lengths: Iterable[int]) -> Tensor:
    """Logits of all tokens, fed in steps of these lengths, [tokens, vocabulary]."""
    steps = tokens.split(list(lengths), dim=1)
    logits = [model(input_ids=step, cache=cache, use_cache=True).logits[0] for step in steps]
    return torch.cat(logits)


def show(name: str, seconds: float, ratio: float, kl: float | None = None) -> None:
    """One row of the table."""
    divergence = "" if kl is None else f"{kl:.4f}"
    print(f"| {name} | {seconds:.2f} | {ratio:.2f} | {divergence} |", flush=True)


def passes(
    forward: Callable[[], object], model: PreTrainedModel, exact: ExactRun, rounds: int
) -> float:
    """Every method with all measurements on, and the static regime; the ratio of `OWN`."""
    methods = {spec: parse_method(spec) for spec in SPECS}
    divergences: dict[str, float] = {}

    def decode(spec: str) -> None:
        errors = pseudo_decode(model, exact, methods[spec])
        divergences[spec] = errors.logits.kl.mean().item()

    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds.setdefault("plain forward", []).append(cpu_seconds(forward))
        for spec in SPECS:
            name = f"one pass, `{spec}`"
            seconds.setdefault(name, []).append(cpu_seconds(lambda spec=spec: decode(spec)))
        alone = cpu_seconds(lambda: record_exact(model, exact.tokens))
        both = cpu_seconds(lambda: record_exact(model, exact.tokens, static_methods=[methods[OWN]]))
        seconds.setdefault(f"static regime of `{OWN}`, beside the exact pass", []).append(
            both - alone
        )
    plain = seconds["plain forward"]
    ratios = {
        name: median(own / base for own, base in zip(values, plain, strict=True))
        for name, values in seconds.items()
    }
    for name, values in seconds.items():
        spec = name.partition("`")[2].rstrip("`")
        show(name, median(values), ratios[name], divergences.get(spec))
    return ratios[f"one pass, `{OWN}`"]


def loops(
    forward: Callable[[], object],
    model: PreTrainedModel,
    exact: ExactRun,
    *,
    own_ratio: float,
    token_loops: bool,
) -> None:
    """The ways that the pass replaces, each with its divergence."""
    num_tokens = exact.tokens.shape[1]
    blocks = [step.end - step.start for step in decode_steps(num_tokens, SETTINGS)]
    singles = [1] * num_tokens
    kvarn = "`KVarNCache` k2v2"
    ways: dict[str, tuple[Callable[[], Cache], list[int]]] = {
        f"block loop, {kvarn}": (lambda: KVarNCache(model.config, SETTINGS), blocks),
        "block loop, `QuantizedCache` fp8": (lambda: QuantizedCache("fp8", model.config), blocks),
    }
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        ways["block loop, `QuantizedCache` quanto 2 bits"] = (
            lambda: QuantizedCache("quanto", model.config, 2),
            blocks,
        )
    if token_loops:
        ways["token by token, `DynamicCache`"] = (
            lambda: DynamicCache(config=model.config),
            singles,
        )
        ways[f"token by token, {kvarn}"] = (lambda: KVarNCache(model.config, SETTINGS), singles)
    for name, (make, lengths) in ways.items():
        plain = cpu_seconds(forward)
        started = time.process_time()
        logits = fed(model, exact.tokens, make(), lengths)
        seconds = time.process_time() - started
        kl = compare_logits(exact.logits, logits, exact.tokens[0]).kl.mean().item()
        show(name, seconds, seconds / plain, kl)
    if token_loops:
        faster = seconds / plain / own_ratio
        print(f"\nOne pass is {faster:.1f} times faster than token by token with {kvarn}.")


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-token-loops", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.model
    if folder is None:
        prepared = subprocess.run(
            [sys.executable, str(PREPARE)], check=True, stdout=subprocess.PIPE, text=True
        )
        folder = Path(prepared.stdout.strip())
    torch.set_num_threads(1)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    text = CalibrationText(None, "text", 1, arguments.tokens, seed=0)
    tokens = text.windows(load_tokenizer(folder))

    @torch.inference_mode()
    def forward() -> None:
        model(input_ids=tokens, use_cache=False)

    forward()
    print(f"{folder.name}, {arguments.tokens} tokens, float32, one thread\n")
    print("| way | CPU s | ratio | KL |\n|---|---|---|---|")
    exact = record_exact(model, tokens)
    own_ratio = passes(forward, model, exact, arguments.rounds)
    loops(
        forward,
        model,
        exact,
        own_ratio=own_ratio,
        token_loops=not arguments.skip_token_loops,
    )


if __name__ == "__main__":
    main()
