import json
import shutil
from pathlib import Path

import pytest
import torch
from conversions import convert
from safetensors.torch import load_file, save_file

from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.hashing import hash_file
from kvarn_cli.errors import CheckpointError, UsageError
from kvarn_cli.verification.against_source import verify_against
from kvarn_cli.verification.folder import Check, require_sound, verify_folder

V = "model.layers.1.self_attn.v_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module", params=[None, "float16", "float32"])
def converted(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return convert(model, tmp_path_factory.mktemp("out") / "out", dtype=request.param).output


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return convert(model, tmp_path / "out").output


def problems(checks: tuple[Check, ...]) -> list[str]:
    return [problem for check in checks for problem in check.problems]


def against(folder: Path, model: Path) -> tuple[Check, ...]:
    return verify_against(open_checkpoint(folder), open_checkpoint(model))


def test_a_conversion_is_sound_and_its_rotation_present(converted: Path, model: Path) -> None:
    read: list[tuple[str, int, int]] = []
    checks = verify_folder(converted, report=lambda *call: read.append(call))
    assert [check.name for check in checks] == [
        *("metadata", "headers", "files", "stray weights", "hashes")
    ]
    assert problems(checks) == []
    assert read[-1][1] == read[-1][2]
    assert problems(against(converted, model)) == []
    require_sound(checks, converted)


def test_online_rotation_leaves_every_tensor(model: Path, tmp_path: Path) -> None:
    output = convert(model, tmp_path / "out", rotation="online").output
    assert problems(verify_folder(output)) == []
    assert problems(against(output, model)) == []


def set_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Change a tensor, and the manifest with it."""
    shard = open_checkpoint(folder).weight_map[name]
    tensors = load_file(folder / shard)
    tensors[name] = tensor
    save_file(tensors, folder / shard, {"format": "pt"})
    manifest = json.loads((folder / "kvarn_manifest.json").read_text())
    manifest["files"][shard] = {
        "size_bytes": (folder / shard).stat().st_size,
        **hash_file(folder / shard, ["xxh3_128"]),
    }
    (folder / "kvarn_manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", [V, O])
@pytest.mark.parametrize("how", ["unrotated", "one entry", "transposed", "nan"])
def test_a_rotation_that_is_not_there_is_noticed(
    name: str, how: str, folder: Path, model: Path
) -> None:
    shard = open_checkpoint(folder).weight_map[name]
    original, tensor = load_file(model / shard)[name], load_file(folder / shard)[name]
    if how == "unrotated":
        tensor = original
    elif how == "one entry":
        tensor[3, 5] += 0.1
    elif how == "transposed":
        tensor = tensor.view(-1).flip(0).view(tensor.shape).contiguous()
    else:
        tensor[0, 0] = float("nan")
    set_tensor(folder, name, tensor)
    (problem,) = problems(against(folder, model))
    assert name in problem
    assert "turned back differs" in problem
    assert any("SHA-256" in problem for problem in problems(verify_folder(folder)))


def test_another_tensor_that_changed_is_noticed(folder: Path, model: Path) -> None:
    shard = open_checkpoint(folder).weight_map[NORM]
    set_tensor(folder, NORM, load_file(folder / shard)[NORM] * 2)
    assert problems(verify_folder(folder)) == []
    assert problems(against(folder, model)) == [f"{NORM} differs from the source"]


def test_another_source_is_refused(folder: Path, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    index = other / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    (problem,) = problems(against(folder, other))
    assert "is not what was converted" in problem


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("flip", "has another hash"),
        ("cut", "ends at byte"),
        ("sidecar", "tokenizer.json has"),
        ("missing", "is missing"),
        ("consolidated", "consolidated.safetensors is no part"),
        ("pickle", "extra/pytorch_model.bin is no part"),
        ("schema", "format_version"),
        ("manifest", "kvarn_manifest.json"),
        ("unlisted", f"{V} is a rotated tensor in kvarn_manifest.json only"),
        ("misplaced", f"{V} has shape [64, 128], which does not hold heads of width 32 where"),
        ("ghost", "ghost.weight should hold the rotation of V, but there is no such tensor"),
    ],
)
def test_every_damage_is_named(damage: str, words: str, folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    config = json.loads((folder / "config.json").read_text())
    if damage == "flip":
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        shard.write_bytes(content[:-1])
    elif damage == "sidecar":
        (folder / "tokenizer.json").write_text("{}")
    elif damage == "missing":
        shard.unlink()
    elif damage == "consolidated":
        shutil.copy(shard, folder / "consolidated.safetensors")
    elif damage == "pickle":
        (folder / "extra").mkdir()
        (folder / "extra" / "pytorch_model.bin").touch()
    elif damage == "manifest":
        (folder / "kvarn_manifest.json").unlink()
    elif damage == "schema":
        config["kvarn_config"]["format_version"] = 99
        (folder / "config.json").write_text(json.dumps(config))
    elif damage == "misplaced":
        config["kvarn_config"]["rotations"]["value"]["tensors"][V]["first_channels"] = [0, 64]
        (folder / "config.json").write_text(json.dumps(config))
    elif damage == "ghost":
        tensors = config["kvarn_config"]["rotations"]["value"]["tensors"]
        tensors["ghost.weight"] = tensors[V]
        (folder / "config.json").write_text(json.dumps(config))
    else:
        config["kvarn_config"]["rotations"]["value"]["tensors"].pop(V)
        (folder / "config.json").write_text(json.dumps(config))
    checks = verify_folder(folder)
    assert words in " ".join(problems(checks))
    with pytest.raises(CheckpointError, match="is not sound") as told:
        require_sound(checks, folder)
    assert told.value.details["problems"] == problems(checks)


def test_an_edited_model_card_is_sound(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    assert problems(verify_folder(folder)) == []


def test_what_was_never_converted_is_a_usage_error(model: Path, tmp_path: Path) -> None:
    for path in (model, tmp_path / "nowhere"):
        with pytest.raises(UsageError):
            verify_folder(path)
