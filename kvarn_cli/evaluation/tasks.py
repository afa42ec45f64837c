"""What methods do to tasks, added to their results as each is done."""

from collections.abc import Collection, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.error_report import Greedy, MethodResult
from kvarn_cli.evaluation.greedy import exact_continuation, same_tokens
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention
from kvarn_cli.evaluation.retrieval import LookupTask, look_up
from kvarn_cli.progress import Report
from kvarn_cli.quantization.methods import KVarN, Method


def add_greedy(
    results: list[MethodResult],
    model: PreTrainedModel,
    windows: Tensor,
    methods: Sequence[Method],
    num_tokens: int,
    report: Report,
) -> None:
    """Continue each window with every `kvarn` method whose window is a cache's; one result each."""
    stage = "continuing"
    chosen = {
        index: method
        for index, method in enumerate(methods)
        if isinstance(method, KVarN) and method.tail == "exact"
    }
    total = len(windows) * (1 + len(chosen))
    report(stage, 0, total)
    same: dict[int, list[int]] = {index: [] for index in chosen}
    for number, prompt in enumerate(windows.to(model.device).split(1)):
        done = number * (1 + len(chosen)) + 1
        expected = exact_continuation(model, prompt, num_tokens)
        report(stage, done, total)
        for offset, (index, method) in enumerate(chosen.items(), start=1):
            same[index].append(same_tokens(model, prompt, expected, method))
            report(stage, done + offset, total)
    for index, counts in same.items():
        greedy = Greedy(num_tokens=num_tokens, same_tokens=tuple(counts))
        results[index] = results[index].model_copy(update={"greedy": greedy})


def add_retrieval(
    results: list[MethodResult],
    model: PreTrainedModel,
    lookup: LookupTask,
    methods: Sequence[Method],
    rotation: Tensor | None,
    covered: Collection[int],
    report: Report,
) -> None:
    """Let the model answer with every method; one result each."""
    stage = "looking up"
    report(stage, 0, len(methods))
    for index, method in enumerate(methods):
        tap = QuantizedAttention(covered, method, fused_rotation=rotation, record_errors=False)
        answered = look_up(model, lookup, tap)
        results[index] = results[index].model_copy(update={"retrieval": answered})
        report(stage, index + 1, len(methods))
