"""A look-up task: numbered lines, then questions about some of them.

The task of LongEval, which the KVarN paper uses with 600 lines. All questions stand in one text,
each followed by its true answer, so one pass answers them all: an answer counts when every one of
its tokens is the first choice, which is when a greedy decoder would have written it. Only those
tokens' logits are computed, so a long text needs no more memory than its hidden states.
"""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.attention import Tap, attention_tap
from kvarn_cli.evaluation.calibration import start_tokens
from kvarn_cli.evaluation.error_report import Retrieval
from kvarn_cli.evaluation.worked_problems import ANIMALS, COLOURS

MOST_QUESTIONS = 20


@dataclass(frozen=True)
class LookupTask:
    """A text with questions.

    Attributes:
        num_lines: lines to look up in.
        tokens: int64 [1, tokens].
        answers: for each question, the positions [start, end) of its answer's tokens.
    """

    num_lines: int
    tokens: Tensor
    answers: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> Tensor:
        """The positions that predict an answer's token, int64, one answer behind the other."""
        return torch.cat([torch.arange(start - 1, end - 1) for start, end in self.answers])

    def score(self, predicted: Tensor) -> Retrieval:
        """Count right answers.

        Args:
            predicted: int64, the first choices at `positions`.
        """
        hits = predicted == self.tokens[0, self.positions + 1]
        by_answer = hits.split([end - start for start, end in self.answers])
        return Retrieval(
            num_lines=self.num_lines,
            num_tokens=self.tokens.shape[1],
            num_questions=len(self.answers),
            num_correct=sum(bool(answer.all()) for answer in by_answer),
        )


def lookup_task(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, num_lines: int, seed: int
) -> LookupTask:
    """Make a text of `num_lines` lines and up to `MOST_QUESTIONS` questions.

    Raises:
        UsageError: the text is longer than the model can read.
    """
    draw = random.Random(seed)
    names = [f"{c}-{a}-{n}" for c in COLOURS for a in ANIMALS for n in range(10, 100)]
    if num_lines > len(names):
        raise UsageError(f"the look-up task has at most {len(names)} lines, not {num_lines}")
    numbers = {name: str(draw.randint(10_000, 99_999)) for name in draw.sample(names, num_lines)}
    asked = draw.sample(list(numbers), min(MOST_QUESTIONS, num_lines))
    lines = [f"line {name}: REGISTER_CONTENT is <" for name in numbers]
    questions = [f"What is the REGISTER_CONTENT in line {name}? It is <" for name in asked]
    pieces = ["Read the lines, then answer the questions.\n"]
    for text, name in zip([*lines, *questions], [*numbers, *asked], strict=True):
        pieces += [text, numbers[name], ">\n"]
    start = start_tokens(tokenizer)
    encoded = tokenizer(pieces, add_special_tokens=False, verbose=False).input_ids
    ends = torch.tensor([len(start), *map(len, encoded)]).cumsum(0).tolist()
    spans = list(pairwise(ends))[2::3]
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and ends[-1] > longest:
        raise UsageError(
            f"a look-up task of {num_lines} lines has {ends[-1]} tokens; the model reads {longest}",
            hint="use fewer lines",
        )
    tokens = torch.tensor([start + [token for piece in encoded for token in piece]])
    return LookupTask(num_lines, tokens, tuple(spans[num_lines:]))


@torch.inference_mode()
def look_up(model: PreTrainedModel, task: LookupTask, tap: Tap | None = None) -> Retrieval:
    """Let a model answer.

    Args:
        model: in evaluation mode.
        task: made for it.
        tap: what answers attention calls; None means full precision.
    """
    with attention_tap(model, tap) if tap else nullcontext():
        logits = model(
            input_ids=task.tokens.to(model.device), use_cache=False, logits_to_keep=task.positions
        ).logits
    return task.score(logits[0].argmax(-1).cpu())
