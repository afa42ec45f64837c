import logging
from pathlib import Path

import pytest
import torch
from architectures import save_tiny_architecture
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_checkpoint
from transformers.utils import logging as transformers_logging

from kvarn_cli.errors import CheckpointError, UnsupportedModelError, UsageError
from kvarn_cli.model.loading import (
    load_config,
    load_model,
    load_tokenizer,
    parse_device,
    parse_dtype,
    quiet_transformers,
)

CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return build_tiny_checkpoint(tmp_path / "llama", "llama", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("model_type", "attention"), [("llama", "sdpa"), ("gpt_oss", "eager"), ("got_ocr2", "eager")]
)
def test_the_kernel_is_one_that_the_class_has(
    model_type: str, attention: str, tmp_path: Path
) -> None:
    folder = save_tiny_architecture(model_type, tmp_path)
    assert load_model(folder, dtype=None, device=CPU).config._attn_implementation == attention


def test_devices_are_tried() -> None:
    assert parse_device("cpu") == CPU
    assert parse_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("meta", "cuda:99", "abacus"):
        with pytest.raises(UsageError, match=f"device '{name}' cannot be used"):
            parse_device(name)


def test_dtypes_have_names() -> None:
    assert parse_dtype("bfloat16", CPU) == torch.bfloat16
    assert parse_dtype("auto", CPU) == torch.float32
    assert parse_dtype("auto", torch.device("cuda")) is None
    with pytest.raises(UsageError, match="dtype 'int8' is none of auto, float32"):
        parse_dtype("int8", CPU)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_model_is_ready_to_be_measured(llama: Path, dtype: torch.dtype | None) -> None:
    model = load_model(llama, dtype=dtype, device=CPU)
    assert model.dtype == (dtype or torch.bfloat16)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_loading_makes_no_noise(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    load_config(llama)
    load_tokenizer(llama)
    load_model(llama, dtype=None, device=CPU)
    assert capfd.readouterr() == ("", "")


def test_the_noise_comes_back() -> None:
    before = transformers_logging.get_verbosity()
    with quiet_transformers():
        assert transformers_logging.get_verbosity() == logging.CRITICAL
    assert transformers_logging.get_verbosity() == before
    assert transformers_logging.is_progress_bar_enabled()


def test_missing_tensors_are_named(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="lacks 1 tensors of the model, first model"):
        load_model(llama, dtype=None, device=CPU)


def test_what_is_not_there_is_named(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(llama)
    with pytest.raises(CheckpointError, match="holds no config"):
        load_config(llama.parent)


def test_a_missing_package_is_named(llama: Path) -> None:
    config = (llama / "config.json").read_text()
    quantized = '{"quantization_config": {"quant_method": "gptq", "bits": 4},'
    (llama / "config.json").write_text(config.replace("{", quantized, 1))
    with pytest.raises(UnsupportedModelError, match="optimum") as refused:
        load_model(llama, dtype=None, device=CPU)
    assert "install what it asks for" in refused.value.hint
