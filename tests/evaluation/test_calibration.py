import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.calibration import (
    DEFAULT_NAME,
    CalibrationText,
    default_texts,
    read_texts,
    token_windows,
)
from kvarn_cli.settings import KVarNSettings


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def _write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_default_text_is_english_code_and_reasoning() -> None:
    texts = default_texts()
    joined = "\n".join(texts)
    assert len(joined) > 600_000
    for part in ("Assert statements are a convenient way", "Running total:", "Record 0:"):
        assert part in joined


def test_a_text_file_is_one_text(tmp_path: Path) -> None:
    assert read_texts(_write(tmp_path / "a b ü.txt", "\ufeffGrüße\n")) == ["Grüße\n"]


def test_each_line_of_a_jsonl_file_is_a_text(tmp_path: Path) -> None:
    lines = [{"text": "one", "id": 1}, {"text": "two"}]
    content = "\n\n".join(map(json.dumps, lines)) + "\n"
    assert read_texts(_write(tmp_path / "data.jsonl", content)) == ["one", "two"]
    content = json.dumps({"messages": [], "body": "three"})
    assert read_texts(_write(tmp_path / "other.jsonl", content), "body") == ["three"]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    _write(tmp_path / "b.md", "second")
    _write(tmp_path / "a" / "deep" / "x.jsonl", '{"text": "first"}')
    _write(tmp_path / "c.txt", "third")
    _write(tmp_path / "ignored.bin", b"\xff\x00")
    _write(tmp_path / ".git" / "d.txt", "hidden")
    _write(tmp_path / "empty.txt", " \n")
    assert read_texts(tmp_path) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"body": 1, "id": 2}', r"a.jsonl, line 2: .*'body', 'id'"),
        ("a.jsonl", '{"text": null}', r"line 1: no text in the field 'text'; fields: 'text'"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', "a.jsonl, line 2: broken JSON"),
        ("a.jsonl", "[1]", "line 1: a line must be an object"),
        ("a.txt", b"abc\xff", r"a.txt is not UTF-8 text \(byte 3\)"),
        ("a.txt", " \n ", "holds no text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_texts(_write(tmp_path / name, content))


def test_line_separators_inside_a_text_do_not_end_a_jsonl_line(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\u0085d", "e\r\nf"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert read_texts(tmp_path / "a.jsonl") == texts


@pytest.mark.parametrize(
    "line",
    ['{"text": ' + "9" * 5000 + "}", "[" * 100_000, '{"text": "\\ud800"}'],
    ids=["number", "nesting", "half a character"],
)
def test_lines_that_no_text_can_come_from_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(UsageError, match="line 1"):
        read_texts(tmp_path / "a.jsonl")


def test_a_missing_dataset_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such dataset"):
        read_texts(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no text") as refused:
        read_texts(tmp_path)
    assert ".jsonl" in refused.value.hint


def test_windows_are_distinct_pieces_chosen_by_the_seed(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    texts = [" ".join(map(str, range(start, start + 200))) for start in range(0, 5000, 200)]
    arguments = {"num_samples": 6, "sequence_length": 64}
    windows = token_windows(tokenizer, texts, seed=0, **arguments)
    assert (windows.shape, windows.dtype) == ((6, 64), torch.int64)
    decoded = {tokenizer.decode(window) for window in windows}
    numbers = [number for text in decoded for number in text.split()[1:-1]]
    assert len(numbers) == len(set(numbers)) > 60
    assert torch.equal(windows, token_windows(tokenizer, texts, seed=0, **arguments))
    assert not torch.equal(windows, token_windows(tokenizer, texts, seed=1, **arguments))


def test_one_text_is_enough(tokenizer: PreTrainedTokenizerFast) -> None:
    text = " ".join(map(str, range(2000)))
    arguments = {"num_samples": 2, "sequence_length": 32}
    windows = [token_windows(tokenizer, [text], seed=seed, **arguments) for seed in range(5)]
    assert len({tuple(window.flatten().tolist()) for window in windows}) > 1


def test_windows_start_with_bos_where_the_tokenizer_adds_it() -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token_id
    text = "The quick brown fox jumps over the lazy dog. " * 20
    arguments = {"num_samples": 3, "sequence_length": 20, "seed": 0}
    assert (token_windows(tokenizer, [text], **arguments) != bos).all()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    windows = token_windows(tokenizer, [text], **arguments)
    assert windows.shape == (3, 20)
    assert (windows[:, 0] == bos).all()
    assert (windows[:, 1:] != bos).all()


def test_too_little_text_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match=r"has \d+ tokens; 4 windows of 100 need 400") as refused:
        token_windows(tokenizer, ["short text"], num_samples=4, sequence_length=100, seed=0)
    assert "--num-samples" in refused.value.hint


def test_a_window_of_one_token_predicts_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match="sequence_length is 1"):
        token_windows(tokenizer, ["text"], num_samples=1, sequence_length=1, seed=0)


def test_long_texts_bring_no_warning(
    tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.model_max_length = 8
    token_windows(tokenizer, ["a b c d " * 50], num_samples=1, sequence_length=16, seed=0)
    assert capsys.readouterr() == ("", "")


def test_calibration_text_names_its_source(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    own = CalibrationText(_write(tmp_path / "my.txt", "word " * 300), "text", 2, 32, 0)
    assert own.name == "my.txt"
    assert own.windows(tokenizer).shape == (2, 32)
    default = CalibrationText(None, "text", 3, 128, 0)
    assert default.name == DEFAULT_NAME
    assert default.windows(tokenizer).shape == (3, 128)


def test_a_window_holds_a_tile_of_predictions_that_see_a_packed_tile() -> None:
    settings = KVarNSettings(group_size=32, sink_tokens=64)
    CalibrationText(None, "text", 1, 128, 0).check_length(settings)
    with pytest.raises(UsageError, match="windows of 127 tokens measure too little") as refused:
        CalibrationText(None, "text", 1, 127, 0).check_length(settings)
    assert "--sequence-length 128" in refused.value.hint
