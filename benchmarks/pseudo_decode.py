"""What the one-pass pseudo-decode costs, and what the ways it replaces cost, in one run.

    pip install -e .[bench]
    python benchmarks/pseudo_decode.py [MODEL] [--tokens 2048] [--rounds 3] [--token-rounds 1]

Everything runs on one thread and is counted in CPU time. A round measures the plain forward pass
and every way once, so that all see the same neighbours on the machine; the table shows the median
over rounds, of seconds and of the ratio to the round's plain pass. Token by token costs about 20
plain passes; `--token-rounds` says how often it runs, 0 leaves it out. Transformers' own
QuantizedCache is measured with its quanto backend (the `bench` extra) at 2 bits and with fp8.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.utils import is_optimum_quanto_available

from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.logit_errors import compare_logits
from kvarn_cli.evaluation.pseudo_decode import ExactRun, pseudo_decode, record_exact
from kvarn_cli.evaluation.quantized_attention import decode_steps
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.methods import Method, parse_method
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
PLAIN, STATIC = "plain forward", f"static regime of `{OWN}`, beside the exact pass"
BLOCKS, SINGLES = "block loop", "token by token"
OWN_CACHE = "`KVarNCache` k2v2"
QUANTO = "`QuantizedCache` quanto 2 bits"
CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {
    OWN_CACHE: lambda model: KVarNCache(model.config, SETTINGS),
    "`DynamicCache`": lambda model: DynamicCache(config=model.config),
    QUANTO: lambda model: QuantizedCache("quanto", model.config, 2),
    "`QuantizedCache` fp8": lambda model: QuantizedCache("fp8", model.config),
}


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


class Table:
    """Rows in the order of their first measurement; prints medians over rounds."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, float, float | None]]] = {}

    def add(self, name: str, seconds: float, plain: float, kl: float | None = None) -> None:
        """One measurement beside a plain pass that took `plain` seconds."""
        self._rows.setdefault(name, []).append((seconds, seconds / plain, kl))
        print(f"{name}: {seconds:.2f} s", file=sys.stderr, flush=True)

    def ratio(self, name: str) -> float:
        """Median ratio of a way to the plain pass."""
        return median(ratio for _, ratio, _ in self._rows[name])

    def kl(self, name: str) -> float:
        """Median divergence of a way."""
        return median(kl for *_, kl in self._rows[name] if kl is not None)

    def print(self) -> None:
        """As Markdown."""
        print("| way | CPU s | ratio | KL |\n|---|---|---|---|")
        for name, rows in self._rows.items():
            seconds = median(row[0] for row in rows)
            kl = "" if rows[0][2] is None else f"{self.kl(name):.4f}"
            print(f"| {name} | {seconds:.2f} | {self.ratio(name):.2f} | {kl} |")


def measure_passes(
    table: Table, forward: Callable[[], object], model: PreTrainedModel, exact: ExactRun
) -> None:
    """One round of every method with all measurements on, and of the static regime."""
    plain = cpu_seconds(forward)
    table.add(PLAIN, plain, plain)
    for spec in SPECS:
        method, kl = parse_method(spec), 0.0

        def decode(method: Method = method) -> None:
            nonlocal kl
            kl = pseudo_decode(model, exact, method).logits.kl.mean().item()

        seconds = cpu_seconds(decode)
        table.add(f"one pass, `{spec}`", seconds, plain, kl)
    own = parse_method(OWN)
    alone = cpu_seconds(lambda: record_exact(model, exact.tokens))
    both = cpu_seconds(lambda: record_exact(model, exact.tokens, static_methods=[own]))
    table.add(STATIC, both - alone, plain)


def measure_loop(
    table: Table,
    forward: Callable[[], object],
    model: PreTrainedModel,
    exact: ExactRun,
    step: str,
    name: str,
) -> None:
    """One round of one of the ways that the pass replaces, with its divergence."""
    num_tokens = exact.tokens.shape[1]
    blocks = [tile.end - tile.start for tile in decode_steps(num_tokens, SETTINGS)]
    lengths = blocks if step == BLOCKS else [1] * num_tokens
    plain, cache = cpu_seconds(forward), CACHES[name](model)
    started = time.process_time()
    logits = fed(model, exact.tokens, cache, lengths)
    seconds = time.process_time() - started
    kl = compare_logits(exact.logits, logits, exact.tokens[0]).kl.mean().item()
    table.add(f"{step}, {name}", seconds, plain, kl)


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-rounds", type=int, default=1)
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

    caches = list(CACHES)
    if not is_optimum_quanto_available():
        caches.remove(QUANTO)
        print(f"{QUANTO} is left out: pip install optimum-quanto\n")
    forward()
    exact, table = record_exact(model, tokens), Table()
    for _ in range(arguments.rounds):
        measure_passes(table, forward, model, exact)
        for name in caches:
            measure_loop(table, forward, model, exact, BLOCKS, name)
    for _ in range(arguments.token_rounds):
        for name in ("`DynamicCache`", OWN_CACHE):
            measure_loop(table, forward, model, exact, SINGLES, name)
    print(f"{folder.name}, {arguments.tokens} tokens, float32, one thread\n")
    table.print()
    accumulated = table.ratio(f"one pass, `{OWN}`")
    both = accumulated + table.ratio(STATIC)
    print(f"\n`{OWN}` costs {accumulated:.2f} plain passes, {both:.2f} with the static regime.")
    if arguments.token_rounds:
        slow = f"{SINGLES}, {OWN_CACHE}"
        print(
            f"One pass is {table.ratio(slow) / accumulated:.1f} times faster than {slow} "
            f"({table.ratio(slow) / both:.1f} times with the static regime); "
            f"KL {table.kl(f'one pass, `{OWN}`'):.4f} and {table.kl(slow):.4f}."
        )


if __name__ == "__main__":
    main()
