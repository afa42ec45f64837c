"""What the refined encoder costs against the reference encoder, per tile.

    python benchmarks/encoder.py [--head-dim 64 128 256] [--tiles 64] [--repeats 15]

Both encoders pack the same tiles (rotation, normalization, codes, record), in alternating runs;
medians of CPU time are compared. So is decoding of their records, which is the same code.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from kvarn_cli.quantization.tile_codec import TileCodec
from kvarn_cli.settings import ENCODERS, KVarNSettings


def medians(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each action, all of them in every round after one to warm up."""
    elapsed: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            started = time.process_time()
            action()
            elapsed[name].append(time.process_time() - started)
    return {name: statistics.median(times[1:]) for name, times in elapsed.items()}


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--preset", nargs="+", default=["k2v2_g128", "k4v2_g128"])
    parser.add_argument("--tiles", type=int, default=64, help="tiles of K and of V each")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{arguments.tiles} tiles, {torch.get_num_threads()} threads, CPU microseconds a record")
    columns = ("reference", "refined", "ratio", "decode", "decode ratio")
    print(f"{'preset':10} {'head_dim':>8} " + " ".join(f"{name:>12}" for name in columns))
    for preset in arguments.preset:
        for head_dim in arguments.head_dim:
            settings = KVarNSettings.from_name(preset)
            shape = (arguments.tiles, settings.group_size, head_dim)
            keys, values = 2 * torch.randn(shape), torch.randn(shape)
            codecs = {
                name: TileCodec(settings.with_(encoder=name), head_dim, rotate_values=True)
                for name in ENCODERS
            }
            encode = medians(
                {name: partial(codec.encode, keys, values) for name, codec in codecs.items()},
                arguments.repeats,
            )
            decode = medians(
                {
                    name: partial(codec.decode, codec.encode(keys, values))
                    for name, codec in codecs.items()
                },
                arguments.repeats,
            )
            microseconds = 1e6 / arguments.tiles
            numbers = (
                encode["reference"] * microseconds,
                encode["refined"] * microseconds,
                encode["refined"] / encode["reference"],
                decode["reference"] * microseconds,
                decode["refined"] / decode["reference"],
            )
            print(f"{preset:10} {head_dim:8} " + " ".join(f"{x:12.2f}" for x in numbers))


if __name__ == "__main__":
    main()
