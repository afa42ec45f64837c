"""What the refined encoder costs against the reference encoder, per tile.

    python benchmarks/encoder.py [--head-dim 64 128 256] [--tiles 64] [--repeats 15]
        [--layout vllm-fp16]

Both encoders pack the same tiles (rotation, normalization, codes, record), in alternating runs;
medians of CPU time are compared. So is decoding of their records, which is the same code.

A second table counts what every operation reads and writes, in passes: bytes moved over the bytes
of the tiles in float32. Operations whose largest tensor has at most a mebibyte (the pieces in which
the refined encoder works) find their data in cache and are counted apart from the others, which go
to main memory when there are many tiles.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.settings import ENCODERS, LAYOUTS, KVarNSettings

_PIECE_BYTES = 1 << 20


class TrafficCounter(TorchDispatchMode):
    """Bytes that operations read and write inside the `with` block; views move none.

    Attributes:
        small_bytes: of operations whose largest tensor has at most a mebibyte.
        large_bytes: of all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small_bytes = self.large_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not function.is_view and "empty" not in str(function):
            written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            inputs = (args, {name: x for name, x in kwargs.items() if name != "out"})
            read = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
            sizes = [_stored_bytes(x) for x in (*read, *written)]
            if max(sizes, default=0) <= _PIECE_BYTES:
                self.small_bytes += sum(sizes)
            else:
                self.large_bytes += sum(sizes)
        return result


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes behind a tensor, each once, however it is expanded."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.itemsize


def medians(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each action, all of them in every round after one to warm up."""
    elapsed: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            started = time.process_time()
            action()
            elapsed[name].append(time.process_time() - started)
    return {name: statistics.median(times[1:]) for name, times in elapsed.items()}


def passes(action: Callable[[], object], tile_bytes: int) -> tuple[float, float]:
    """Passes of large and of small operations."""
    with TrafficCounter() as traffic:
        action()
    return traffic.large_bytes / tile_bytes, traffic.small_bytes / tile_bytes


def row(preset: str, head_dim: int, numbers: list[float]) -> str:
    """One line of either table."""
    return f"{preset:10} {head_dim:8} " + " ".join(f"{x:12.2f}" for x in numbers)


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--preset", nargs="+", default=["k2v2_g128", "k4v2_g128"])
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0])
    parser.add_argument("--tiles", type=int, default=64, help="tiles of K and of V each")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    times, traffic = [], []
    for preset in arguments.preset:
        for head_dim in arguments.head_dim:
            settings = KVarNSettings.from_name(preset).with_(layout=arguments.layout)
            shape = (arguments.tiles, settings.group_size, head_dim)
            keys, values = 2 * torch.randn(shape), torch.randn(shape)
            codecs = {
                name: TileCodec(settings.with_(encoder=name), head_dim, rotate_values=True)
                for name in ENCODERS
            }
            encoding: dict[str, Callable[[], object]] = {
                name: partial(codec.encode, keys, values) for name, codec in codecs.items()
            }
            decoding: dict[str, Callable[[], object]] = {
                name: partial(codec.decode, codec.encode(keys, values))
                for name, codec in codecs.items()
            }
            encode, decode = (medians(each, arguments.repeats) for each in (encoding, decoding))
            microseconds = 1e6 / arguments.tiles
            times.append(
                row(
                    preset,
                    head_dim,
                    [
                        encode["reference"] * microseconds,
                        encode["refined"] * microseconds,
                        encode["refined"] / encode["reference"],
                        decode["reference"] * microseconds,
                        decode["refined"] / decode["reference"],
                    ],
                )
            )
            moved = [passes(encoding[name], keys.nbytes + values.nbytes) for name in ENCODERS]
            traffic.append(row(preset, head_dim, [x for pair in moved for x in pair]))
    print(f"{arguments.tiles} tiles, {torch.get_num_threads()} threads, {arguments.layout}")
    heads = {
        "CPU microseconds a record": ("reference", "refined", "ratio", "decode", "decode ratio"),
        "passes over the tiles, large and small operations": (
            *("reference", "(small)", "refined", "(small)"),
        ),
    }
    for (title, columns), lines in zip(heads.items(), (times, traffic), strict=True):
        print(f"\n{title}\n{'preset':10} {'head_dim':>8} ", *(f"{name:>12}" for name in columns))
        print("\n".join(lines))


if __name__ == "__main__":
    main()
