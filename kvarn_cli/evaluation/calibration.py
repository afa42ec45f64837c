"""Calibration text, and the windows of tokens that models are measured on."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.worked_problems import worked_problems
from kvarn_cli.settings import KVarNSettings

TEXT_SUFFIXES = (".txt", ".md", ".rst")
DEFAULT_NAME = "Python's language reference (pydoc_data.topics) and worked problems"

_JSON_LINES = ".jsonl"
_NUM_PROBLEMS = 600
_CHOICE = 4


@dataclass(frozen=True)
class CalibrationText:
    """Which text to measure on, and how much of it.

    Attributes:
        dataset: a text file, a .jsonl file or a folder of them; None means the default text.
        field: the field of a .jsonl line that holds the text.
        num_samples: windows.
        sequence_length: tokens of each.
        seed: chooses the windows.
    """

    dataset: Path | None
    field: str
    num_samples: int
    sequence_length: int
    seed: int

    @property
    def name(self) -> str:
        """What reports call the text: the file's or folder's own name."""
        return DEFAULT_NAME if self.dataset is None else self.dataset.resolve().name

    def check_length(self, settings: KVarNSettings) -> None:
        """Refuse windows in which less than a tile of predictions sees a packed tile.

        Raises:
            UsageError: naming the shortest length that measures something.
        """
        exact_tokens = settings.sink_tokens + settings.residual_tokens
        shortest = exact_tokens + 2 * settings.group_size
        if self.sequence_length < shortest:
            raise UsageError(
                f"windows of {self.sequence_length} tokens measure too little: "
                f"{exact_tokens} stay exact, and a tile of {settings.group_size} is only "
                "packed, and seen by later tokens, once it is full",
                hint=f"use --sequence-length {shortest} or more",
            )

    def windows(self, tokenizer: PreTrainedTokenizerBase, *, further: int = 0) -> Tensor:
        """Read the text and cut it: int64 [num_samples + further, sequence_length].

        The first `num_samples` windows do not depend on `further`.

        Raises:
            UsageError: the text cannot be read or is too short.
        """
        texts = default_texts() if self.dataset is None else read_texts(self.dataset, self.field)
        return token_windows(
            tokenizer,
            texts,
            num_samples=self.num_samples + further,
            sequence_length=self.sequence_length,
            seed=self.seed,
        )


def default_texts() -> list[str]:
    """English, code and reasoning that need no download.

    The topics of Python's language reference, which every CPython carries, and problems worked
    out line by line (see `worked_problems`).
    """
    return [*topics.values(), *worked_problems(_NUM_PROBLEMS)]


def read_texts(dataset: Path, field: str = "text") -> list[str]:
    """Read calibration texts.

    Args:
        dataset: a text file; a .jsonl file with one object a line; or a folder, searched for both
            in the order of their paths, hidden ones left out.
        field: the field of a .jsonl line that holds the text.

    Raises:
        UsageError: no such path, a file that is not UTF-8, a broken line, a line without the
            field, or no text at all.
    """
    if not dataset.exists():
        raise UsageError(f"no such dataset: {dataset}")
    files = _files_in(dataset) if dataset.is_dir() else [dataset]
    texts = [text for file in files for text in _texts_of(file, field) if text.strip()]
    if not texts:
        raise UsageError(
            f"{dataset} holds no text",
            hint=f"give a file or a folder with {', '.join((*TEXT_SUFFIXES, _JSON_LINES))}",
        )
    return texts


def token_windows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    num_samples: int,
    sequence_length: int,
    seed: int,
) -> Tensor:
    """Cut texts into windows of tokens that do not overlap.

    The texts are shuffled, joined with blank lines and cut, until there are a few times as many
    pieces as windows are wanted; the windows are chosen among the pieces.

    Args:
        tokenizer: of the model; each window starts with its BOS token if it adds one.
        texts: at least one.
        num_samples: windows to choose.
        sequence_length: tokens of each, BOS included.
        seed: of the order and the choice.

    Returns:
        int64 [num_samples, sequence_length].

    Raises:
        UsageError: sequence_length is below 2, or there are too few tokens.
    """
    if sequence_length < 2:
        raise UsageError(f"sequence_length is {sequence_length}; a prediction needs 2 tokens")
    start = start_tokens(tokenizer)
    content = sequence_length - len(start)
    draw = random.Random(seed)
    shuffled = draw.sample(texts, len(texts))
    tokens = tokenizer("\n\n".join(shuffled), add_special_tokens=False, verbose=False).input_ids
    pieces = range(len(tokens) // content)
    if len(pieces) < num_samples:
        raise UsageError(
            f"the calibration text has {len(tokens)} tokens; {num_samples} windows of "
            f"{sequence_length} need {num_samples * content}",
            hint="use more text, fewer windows (--num-samples) or shorter ones (--sequence-length)",
        )
    chosen = draw.sample(pieces, len(pieces))[:num_samples]
    return torch.tensor(
        [start + tokens[piece * content : (piece + 1) * content] for piece in chosen]
    )


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS token, if the tokenizer puts one before a text."""
    with_special = tokenizer("a").input_ids
    adds_bos = with_special[:1] == [tokenizer.bos_token_id]
    return with_special[:1] if adds_bos else []


def _files_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in (*TEXT_SUFFIXES, _JSON_LINES)
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _texts_of(file: Path, field: str) -> Iterator[str]:
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 text (byte {error.start})",
            hint="a dataset is text: .txt, .jsonl, or a folder of both",
        ) from error
    if file.suffix != _JSON_LINES:
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _field_of(line, field, f"{file}, line {number}")


def _field_of(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "numbers or nesting beyond reason")
        raise UsageError(f"{where}: broken JSON ({reason})") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}: a line must be an object with the field {field!r}")
    text = record.get(field)
    if not isinstance(text, str):
        present = ", ".join(map(repr, record)) or "none"
        raise UsageError(
            f"{where}: no text in the field {field!r}; fields: {present}",
            hint="name the field that holds the text",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: the text holds half a character ({error.reason})") from error
    return text
