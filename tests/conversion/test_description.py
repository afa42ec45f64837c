"""A reader rebuilds everything from the converted config.json, with nothing of ours."""

import json
import re

import numpy as np
import pytest
import torch
from conversions import convert
from safetensors.torch import load_file
from tiny_models import build_tiny_checkpoint
from transformers import (
    AutoModelForCausalLM,
)


def matrix_of(rotation):
    """R = H · diag(signs) as its description says, float64."""
    assert rotation["type"] == "hadamard"
    assert rotation["order"] == "sylvester"
    assert rotation["normalized"] is True
    width = rotation["head_dim"]
    bits = np.bitwise_count(np.arange(width)[:, None] & np.arange(width))
    signs = np.array([{"+": 1, "-": -1}[sign] for sign in rotation["signs"]])
    return (-1.0) ** bits * signs / np.sqrt(width)


def tensors_of(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def described(fused):
    return json.loads((fused.output / "config.json").read_text())["kvarn_config"]


def unrotated(tensor, part, matrix):
    """Undo the fusion in one written tensor, head by head as the description places them."""
    values = np.moveaxis(tensor.double().numpy(), part["axis"], -1).copy()
    for start in part["first_channels"]:
        head = slice(start, start + len(matrix))
        values[..., head] = values[..., head] @ matrix.T
    return np.moveaxis(values, -1, part["axis"])


def allowed_error(dtype):
    """Of a head's channels together, relative: one rounding, and in float32 the product's own."""
    return torch.finfo(dtype).eps / 2 * (4 if dtype == torch.float32 else 1.01)


def test_every_matrix_can_be_rebuilt_and_undone(fused):
    rotation = described(fused)["rotations"]["value"]
    matrix = matrix_of(rotation)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-12)
    originals, converted = tensors_of(fused.source), tensors_of(fused.output)
    changed = {name for name, tensor in converted.items() if not tensor.equal(originals[name])}
    assert changed == rotation["tensors"].keys()
    for name in changed:
        part = rotation["tensors"][name]
        restored = unrotated(converted[name], part, matrix)
        original = originals[name].double().numpy()
        outside = np.ones(original.shape[part["axis"]], dtype=bool)
        for start in part["first_channels"]:
            outside[start : start + len(matrix)] = False
            head = np.arange(start, start + len(matrix))
            before, after = (np.take(it, head, axis=part["axis"]) for it in (original, restored))
            error = np.linalg.norm(after - before, axis=part["axis"])
            allowed = np.linalg.norm(before, axis=part["axis"])
            assert (error <= allowed_error(converted[name].dtype) * allowed).all()
        kept = np.flatnonzero(outside)
        assert np.array_equal(*(np.take(it, kept, part["axis"]) for it in (original, restored)))


def test_the_modules_named_are_modules_of_the_model(fused):
    block = described(fused)
    model = AutoModelForCausalLM.from_pretrained(fused.output)
    for application in block["rotations"]["value"]["apply"]:
        assert len(application["targets"]) == len(block["layers"]["covered"]) == 2
        for name in application["targets"]:
            assert isinstance(model.get_submodule(name), torch.nn.Linear)


def full_matches(targets, names):
    """What compressed-tensors would find: names, or regular expressions after `re:`."""
    return {
        name
        for name in names
        for target in targets
        if (re.match(target[3:], name) if target.startswith("re:") else name == target)
    }


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three layers, the first and the last with a sliding window."""
    return build_tiny_checkpoint(
        tmp_path_factory.mktemp("mixed") / "qwen3",
        "qwen3",
        num_layers=3,
        use_sliding_window=True,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


@pytest.mark.parametrize("rotation", ["fused", "online"])
def test_only_modules_of_covered_layers_are_rotated_online(mixed, tmp_path, rotation):
    block = described(convert(mixed, tmp_path / "out", rotation=rotation))
    names = dict(AutoModelForCausalLM.from_pretrained(mixed).named_modules())
    applied = {
        application["location"]: (full_matches(application["targets"], names), application)
        for part in block["rotations"].values()
        for application in part["apply"]
    }
    attention = {"model.layers.1.self_attn"}
    assert applied["q_attn"][0] == applied["k_cache"][0] == attention
    if rotation == "fused":
        assert len(applied["weight_output"][0]) == len(applied["weight_input"][0]) == 3
    else:
        assert applied["v_cache"][0] == attention
        assert applied["input"][0] == {"model.layers.1.self_attn.o_proj"}
        assert applied["input"][1]["inverse"] is True


def test_the_cache_is_described(fused):
    block = described(fused)
    cache = block["cache"]
    assert (cache["dtype"], cache["layout"]) == ("kvarn_k4v4_g32", "vllm-fp16")
    assert cache["head_dim"] == block["rotations"]["key"]["head_dim"]
    codes = cache["head_dim"] * 32 * 8 // 8
    assert cache["record_bytes"] == codes + 2 * (3 * cache["head_dim"] + 3 * 32)
    key = block["rotations"]["key"]
    assert (key["where"], key["signs"]) == ("online", None)
    assert {application["location"] for application in key["apply"]} == {"q_attn", "k_cache"}


@pytest.mark.parametrize("family", ["llama"])
def test_the_base_model_is_named(fused_models, family):
    base = described(fused_models[family])["base_model"]
    assert base["name"] == family
    assert base["revision"] is None
    assert len(base["index_sha256"]) == 64
