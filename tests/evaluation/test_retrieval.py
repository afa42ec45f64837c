import re
from contextlib import nullcontext

import pytest
import torch
from decoding import calm_model
from tiny_models import tiny_config, tiny_tokenizer

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.attention import attention_tap
from kvarn_cli.evaluation.quantized_attention import QuantizedAttention
from kvarn_cli.evaluation.retrieval import LookupTask, look_up, lookup_task
from kvarn_cli.quantization.methods import parse_method


def _task(num_lines: int, seed: int = 0):
    config = tiny_config("llama", max_position_embeddings=100_000)
    return lookup_task(config, tiny_tokenizer(), num_lines, seed)


def test_each_question_asks_for_the_number_of_a_line_further_up() -> None:
    task, tokenizer = _task(30), tiny_tokenizer()
    text = tokenizer.decode(task.tokens[0])
    lines = dict(re.findall(r"line ([\w-]+): REGISTER_CONTENT is <(\d{5})>", text))
    questions = re.findall(r"What is .* in line ([\w-]+)\? It is <(\d{5})>", text)
    assert (len(lines), len(questions), len(task.answers)) == (30, 20, 20)
    for (name, number), (start, end) in zip(questions, task.answers, strict=True):
        assert lines[name] == number == tokenizer.decode(task.tokens[0, start:end])


def test_an_answer_counts_when_all_its_tokens_are_predicted() -> None:
    task = _task(3)
    predicted = task.tokens[0, task.positions + 1]
    answered = task.score(predicted)
    assert (answered.num_correct, answered.num_lines, answered.num_questions) == (3, 3, 3)
    first = task.answers[0][1] - task.answers[0][0]
    for missed, num_correct in (([0], 2), ([first - 1], 2), ([0, first - 1], 2), ([0, first], 1)):
        wrong = predicted.clone()
        wrong[missed] += 1
        assert task.score(wrong).num_correct == num_correct


@pytest.mark.parametrize("spec", [None, "kvarn:k2v2_g32,sink_tokens=0"])
def test_the_model_s_answers_are_those_of_all_its_predictions(spec: str | None) -> None:
    """Answers that the model would give itself are all right; others are not."""
    model = calm_model("llama", max_position_embeddings=4096)
    tap = QuantizedAttention([0, 1], parse_method(spec), record_errors=False) if spec else None
    task = _task(3)
    with torch.inference_mode(), attention_tap(model, tap) if tap else nullcontext():
        own = model(input_ids=task.tokens, use_cache=False).logits[0].argmax(-1)
    assert look_up(model, task, tap) == task.score(own[task.positions])
    (start, end), *_ = task.answers
    tokens = task.tokens.clone()
    for position in range(start, end):
        with torch.inference_mode(), attention_tap(model, tap) if tap else nullcontext():
            logits = model(input_ids=tokens, use_cache=False).logits
        tokens[0, position] = logits[0, position - 1].argmax()
    one = LookupTask(3, tokens, ((start, end),))
    assert look_up(model, one, tap).num_correct == 1


def test_another_seed_makes_another_task() -> None:
    assert torch.equal(_task(10).tokens, _task(10).tokens)
    assert _task(10).tokens.tolist() != _task(10, seed=1).tokens.tolist()


def test_a_task_longer_than_the_model_reads_is_refused() -> None:
    config = tiny_config("llama", max_position_embeddings=512)
    with pytest.raises(UsageError, match="the model reads 512"):
        lookup_task(config, tiny_tokenizer(), 50, 0)


def test_more_lines_than_names_are_refused() -> None:
    with pytest.raises(UsageError, match="at most"):
        _task(10_000)
