import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import contents
from conversions import convert
from fused_models import layout_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvarn_cli.conversion import run as run_module
from kvarn_cli.errors import CheckpointError, KvarnError, UnsupportedModelError, UsageError
from kvarn_cli.model.fusion import tensor_rotations


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for shard in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


def rotated(model: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """What the whole tensors become, without blocks or streams."""
    layout = layout_of(AutoModelForCausalLM.from_pretrained(model))
    rotations = tensor_rotations(layout, dtype=dtype)
    originals = all_tensors(model)
    return {name: rotate(originals[name]) for name, rotate in rotations.items()}


def test_only_v_and_o_change_and_the_model_computes_the_same(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    before = contents(model)
    convert(model, output)
    assert contents(model) == before
    old, new, expected = all_tensors(model), all_tensors(output), rotated(model)
    assert new.keys() == old.keys()
    assert len(expected) == 6
    for name, tensor in new.items():
        assert torch.equal(tensor, expected.get(name, old[name])), name
    after = contents(output)
    for name in before.keys() - {"config.json"}:
        if not name.endswith(".safetensors"):
            assert after[name] == before[name]
    assert after.keys() - before.keys() == {"kvarn_manifest.json"}
    tokens = torch.arange(40)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=tokens).logits
        for folder in (model, output)
    ]
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_the_dtype_is_cast_once_while_streaming(name: str, model: Path, tmp_path: Path) -> None:
    output, dtype = tmp_path / "out", getattr(torch, name)
    convert(model, output, dtype=name)
    old, new, expected = all_tensors(model), all_tensors(output), rotated(model, dtype)
    assert new.keys() == old.keys()
    for tensor_name, tensor in new.items():
        assert torch.equal(tensor, expected.get(tensor_name, old[tensor_name].to(dtype)))
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == name
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in new.values())
    assert AutoModelForCausalLM.from_pretrained(output, dtype="auto").dtype == dtype


def edited(model: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with some tensors changed."""
    shutil.copytree(model, folder)
    for shard in folder.glob("*.safetensors"):
        shard_tensors = load_file(shard)
        edit(shard_tensors)
        save_file(shard_tensors, shard, {"format": "pt"})
    return folder


def change(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(shard_tensors: dict[str, torch.Tensor]) -> None:
        if name in shard_tensors:
            shard_tensors[name].view(-1)[7] = value

    return edit


V, NORM = "model.layers.1.self_attn.v_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "value", "dtype", "error"),
    [
        (V, float("nan"), None, CheckpointError),
        (V, float("inf"), "float16", CheckpointError),
        (V, 3e6, "float16", UnsupportedModelError),
        (NORM, 7e4, "float16", UnsupportedModelError),
    ],
)
def test_values_that_cannot_be_stored_are_named(
    name: str, value: float, dtype: str | None, error: type[KvarnError], model: Path, tmp_path: Path
) -> None:
    source = edited(model, tmp_path / "source", change(name, value))
    with pytest.raises(error, match=name):
        convert(source, tmp_path / "out", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_was_infinite_before_stays_so(model: Path, tmp_path: Path) -> None:
    source = edited(model, tmp_path / "source", change(NORM, float("-inf")))
    convert(source, tmp_path / "out", dtype="float16")
    assert all_tensors(tmp_path / "out")[NORM].isinf().sum() == 1


def test_tensors_that_the_model_does_not_load_stay(model: Path, tmp_path: Path) -> None:
    extra = {
        "mtp.head.weight": torch.randn(3, 5),
        "counts": torch.arange(7),
        "scales": torch.rand(4).to(torch.float8_e4m3fn),
    }

    def add(shard_tensors: dict[str, torch.Tensor]) -> None:
        if V in shard_tensors:
            shard_tensors.update(extra)

    source = edited(model, tmp_path / "source", add)
    convert(source, tmp_path / "out")
    new = all_tensors(tmp_path / "out")
    for name, tensor in extra.items():
        assert new[name].dtype == tensor.dtype
        assert torch.equal(new[name].view(torch.uint8), tensor.view(torch.uint8))


def test_quantized_weights_keep_their_dtype(model: Path, tmp_path: Path) -> None:
    source = edited(model, tmp_path / "source", lambda _: None)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="quantized"):
        convert(source, tmp_path / "out", dtype="float16", rotation="online")
    convert(source, tmp_path / "out", rotation="online")


def test_an_unknown_dtype_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="float16, bfloat16, float32"):
        convert(model, tmp_path / "out", dtype="int8")


def test_a_continued_run_does_not_check_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_output", die)
        with pytest.raises(KeyboardInterrupt):
            convert(model, tmp_path / "out")
    assert (tmp_path / "out.incomplete").exists()
    monkeypatch.setattr(run_module, "check_weights", die)
    continued = convert(model, tmp_path / "out")
    assert continued.conversion.metadata.proof is not None
    with pytest.raises(UsageError, match="not empty"):
        convert(model, tmp_path / "out")


def test_other_settings_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module, "write_output", die)
        convert(model, tmp_path / "out")
    with pytest.raises(UsageError, match=r"another preset or iterations$"):
        convert(model, tmp_path / "out", preset="k2v2_g128")
    converted = convert(model, tmp_path / "out", preset="k2v2_g128", overwrite=True)
    assert converted.conversion.metadata.cache.dtype == "kvarn_k2v2_g128"
