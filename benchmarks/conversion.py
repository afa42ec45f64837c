"""How long a conversion takes next to copying the files, and how much memory it holds.

    python benchmarks/conversion.py [--gigabytes 4] [--runs 3] [--slow-runs 1] [--folder DIR]
                                    [--cold] [--leave-out NAME ...]

Makes a synthetic checkpoint of Qwen3 layers in bfloat16 shards, then runs in turn, each in a
process of its own and each up to the fsync of every file it wrote:

    cp -r                          the files as they are
    load, rotate, save             through transformers, as torch users write it; --slow-runs times
    kvarn convert --no-validate    the whole command; seconds of the writing, and apart from it
                                   start-up, proof on a small instance, check of the real weights
    the writing alone              the same writer in a process that proves and checks nothing

Prints medians, the ratio to `cp -r`, and the peak resident memory of each process.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SHAPES = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_768,
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **SHAPES,
}

PAUSE_SECONDS = 3.0
"""Before each run, so that a disk with a budget of bytes (as in the cloud) has it for everyone."""

ROTATED_TENSORS = """
import sys, time
from pathlib import Path
from kvarn_cli.metadata import KVarNConfig
from kvarn_cli.model.layout import AttentionLayer, HeadSlices, ModelLayout
metadata = KVarNConfig.model_validate_json(sys.argv[3])
rotation = metadata.rotations.value
slices = [
    HeadSlices(name, tensor.axis, tuple(tensor.first_channels), rotation.head_dim)
    for name, tensor in rotation.tensors.items()
]
layout = ModelLayout(rotation.head_dim, tuple(AttentionLayer(0, "", (), one) for one in slices))
"""

LOAD_ROTATE_SAVE = (
    ROTATED_TENSORS
    + """
import torch
from transformers import AutoModelForCausalLM
from kvarn_cli.quantization.hadamard import fused_rotation
start = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
weights, rotation = dict(model.named_parameters()), fused_rotation(layout.head_dim)
with torch.no_grad():
    for heads in slices:
        weight = weights[heads.tensor]
        by_head = weight.float().unflatten(heads.axis, (-1, layout.head_dim))
        rotated = by_head @ rotation if heads.axis else rotation.T @ by_head
        weight.copy_(rotated.view_as(weight))
model.save_pretrained(sys.argv[2], max_shard_size="1GB")
sys.stderr.write(f"\\nseconds {time.perf_counter() - start}\\n")
"""
)

WRITE_ALONE = (
    ROTATED_TENSORS
    + """
from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.writer import CheckpointWriter
from kvarn_cli.conversion.output import write_output
from kvarn_cli.conversion.patches import conversion_patches
start = time.perf_counter()
checkpoint = open_checkpoint(Path(sys.argv[1]))
patches = conversion_patches(checkpoint, layout, None)
with CheckpointWriter(checkpoint, Path(sys.argv[2]), patches=patches, plan={}) as writer:
    write_output(writer, checkpoint, metadata, None)
sys.stderr.write(f"\\nseconds {time.perf_counter() - start}\\n")
"""
)


class Run(NamedTuple):
    """One measured process.

    Attributes:
        seconds: of the work itself, up to the last fsync.
        others: seconds of other parts, by name; start-up is what no part claims.
        peak_bytes: largest resident memory.
    """

    seconds: float
    others: dict[str, float]
    peak_bytes: int


def make_checkpoint(folder: Path, size_bytes: int) -> None:
    """Write shards of about 1 GB with random weights, as many layers as the size takes."""
    hidden, heads = SHAPES["hidden_size"], SHAPES["num_attention_heads"] * SHAPES["head_dim"]
    kv, inner = SHAPES["num_key_value_heads"] * SHAPES["head_dim"], SHAPES["intermediate_size"]
    layer_shapes = {
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (SHAPES["head_dim"],),
        "self_attn.k_norm.weight": (SHAPES["head_dim"],),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    ends = {
        "model.embed_tokens.weight": (SHAPES["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    layer_bytes = sum(2 * int(np.prod(shape)) for shape in layer_shapes.values())
    layers = max(1, round((size_bytes - 2 * SHAPES["vocab_size"] * hidden) / layer_bytes))
    tensors = ends | {
        f"model.layers.{index}.{name}": shape
        for index in range(layers)
        for name, shape in layer_shapes.items()
    }
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensors.items():
        if filled > 10**9:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += 2 * int(np.prod(shape))
    folder.mkdir(parents=True)
    normal = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32) / 50
    pool = (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, shard, pool)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], pool: bytes) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = 2 * int(np.prod(shape))
            while left:
                left -= file.write(pool[:left])


def fsync_all(folder: Path) -> None:
    """Put every file of a folder on the disk."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def measure(
    command: list[str], output: Path, parts_of: Callable[[str, float], dict[str, float]]
) -> Run:
    """Run a process and the fsync of what it wrote.

    Args:
        command: to run.
        output: folder that it writes; removed afterwards.
        parts_of: from what the process printed and its whole time to the seconds of its parts,
            among them `work`.
    """
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        whole = time.perf_counter() - start
        said.seek(0)
        text = said.read().decode()
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{text}")
    start = time.perf_counter()
    fsync_all(output)
    synced = time.perf_counter() - start
    shutil.rmtree(output)
    parts = parts_of(text, whole)
    start_up = whole - sum(parts.values())
    work = parts.pop("work")
    return Run(work + synced, {"start-up": start_up, **parts}, usage.ru_maxrss * 1024)


def _all_of_it(text: str, whole: float) -> dict[str, float]:
    return {"work": whole}


def _seconds_line(text: str, whole: float) -> dict[str, float]:
    return {"work": float(text.rsplit("seconds ", 1)[1])}


def _stages(text: str, whole: float) -> dict[str, float]:
    elapsed = json.loads(text[text.index("{\n") :])["elapsed_seconds"]
    return {"work": elapsed["writing"], "proof": elapsed["proof"], "check": elapsed["checks"]}


def forget(folder: Path) -> None:
    """Ask the system to drop a folder's files from its page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def contestants(source: Path, output: Path) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Name and measurement of everything that is compared."""
    python, here, there = sys.executable, str(source), str(output)
    convert = _convert(source, output)
    block = json.dumps(_metadata_like(source))
    yield "cp -r", lambda: measure(["cp", "-r", here, there], output, _all_of_it)
    save = [python, "-c", LOAD_ROTATE_SAVE, here, there, block]
    yield "load, rotate, save", lambda: measure(save, output, _seconds_line)
    yield "kvarn convert", lambda: measure(convert, output, _stages)
    alone = [python, "-c", WRITE_ALONE, here, there, block]
    yield "the writing alone", lambda: measure(alone, output, _seconds_line)


def _convert(source: Path, output: Path) -> list[str]:
    command = [sys.executable, "-m", "kvarn_cli", "convert", str(source), "--output", str(output)]
    return [*command, "--no-validate", "--json", "--quiet"]


def _metadata_like(source: Path) -> dict[str, Any]:
    """The metadata that a conversion of `source` would write, from that of a single layer."""
    with tempfile.TemporaryDirectory() as folder:
        small, output = Path(folder, "small"), Path(folder, "output")
        _in_a_process_of_its_own(small, 0)
        subprocess.run(_convert(small, output), check=True, capture_output=True)
        block: dict[str, Any] = json.loads((output / "config.json").read_text())["kvarn_config"]
    layers = range(json.loads((source / "config.json").read_text())["num_hidden_layers"])
    block["layers"]["covered"] = list(layers)
    for rotation in block["rotations"].values():
        for application in rotation["apply"]:
            (target,) = application["targets"]
            application["targets"] = [target.replace(".0.", f".{layer}.") for layer in layers]
        rotation["tensors"] = {
            name.replace(".0.", f".{layer}."): tensor
            for layer in layers
            for name, tensor in rotation["tensors"].items()
        }
    return block


def _in_a_process_of_its_own(folder: Path, size_bytes: int) -> None:
    """Make a checkpoint, with memory that no measured process inherits as its peak."""
    maker = multiprocessing.Process(target=make_checkpoint, args=(folder, size_bytes))
    maker.start()
    maker.join()


def print_table(runs: dict[str, list[Run]]) -> None:
    """Medians of each contestant, side by side with `cp -r`."""
    copying = statistics.median(run.seconds for run in runs["cp -r"])
    parts = ("start-up", "proof", "check")
    heads = "".join(f"{part:>9}" for part in ("seconds", "to cp -r", *parts, "peak MB"))
    print(f"{'':20}{heads}   each run")
    for name, measured in runs.items():
        seconds = statistics.median(run.seconds for run in measured)
        others = "".join(
            f"{statistics.median(run.others[part] for run in measured):9.2f}"
            if part in measured[0].others
            else " " * 9
            for part in parts
        )
        peak = max(run.peak_bytes for run in measured) / 1e6
        each = " ".join(f"{run.seconds:.2f}" for run in measured)
        print(f"{name:20}{seconds:9.2f}{seconds / copying:9.2f}{others}{peak:9.0f}   {each}")


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slow-runs", type=int, default=1, help="of load, rotate, save")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache")
    optional = ["load, rotate, save", "kvarn convert", "the writing alone"]
    parser.add_argument("--leave-out", nargs="*", default=[], choices=optional)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source, output = Path(folder, "source"), Path(folder, "output")
        _in_a_process_of_its_own(source, int(arguments.gigabytes * 1e9))
        fsync_all(source)
        size = sum(path.stat().st_size for path in source.iterdir())
        state = "cold" if arguments.cold else "warm"
        print(
            f"{size / 1e9:.2f} GB, {len(list(source.glob('*.safetensors')))} shards, {state}, "
            f"{os.cpu_count()} cores, medians of {arguments.runs}"
        )
        entries = dict(contestants(source, output))
        for name in set(arguments.leave_out):
            del entries[name]
        runs: dict[str, list[Run]] = {name: [] for name in entries}
        for turn in range(arguments.runs):
            for name, run in entries.items():
                if name == "load, rotate, save" and turn >= arguments.slow_runs:
                    continue
                if arguments.cold:
                    forget(source)
                os.sync()
                time.sleep(PAUSE_SECONDS)
                runs[name].append(run())
        print_table(runs)


if __name__ == "__main__":
    main()
