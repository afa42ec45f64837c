import re

import pytest
import torch
from tiny_models import tiny_config, tiny_tokenizer

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.retrieval import lookup_task


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
    hits = torch.ones(task.tokens.shape[1] - 1, dtype=torch.bool)
    start, end = task.answers[1]
    hits[: task.answers[0][0] - 1] = False
    assert task.score(hits).num_correct == 3
    for position in (start - 1, end - 2):
        missed = hits.clone()
        missed[position] = False
        assert task.score(missed).num_correct == 2
    for position in (start - 2, end - 1):
        beside = hits.clone()
        beside[position] = False
        assert task.score(beside).num_correct == 3
    assert (task.score(hits).num_lines, task.score(hits).num_questions) == (3, 3)


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
