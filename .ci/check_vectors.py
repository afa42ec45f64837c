"""Compare the quantizer with records that a public backend's reference code wrote.

Each case: at least 99.9 % equal codes, float16 scales within one unit in the last place, and its
records decoded to within 1e-5 of the largest value.
"""

import json
import sys

import torch
from safetensors import safe_open

from kvarn_cli.quantization.tile_record import QuantizedTiles, quantize_tiles, unpack_records
from kvarn_cli.settings import KVarNSettings


def compare(own: QuantizedTiles, theirs: QuantizedTiles, decoded: torch.Tensor) -> bool:
    """Whether codes, scales and decoded values agree."""
    equal_codes = (own.rows.codes == theirs.rows.codes).float().mean().item()
    steps = max(
        (a.view(torch.int16).int() - b.view(torch.int16).int()).abs().max().item()
        for a, b in (
            (own.rows.scale, theirs.rows.scale),
            (own.rows.zero_point, theirs.rows.zero_point),
            (own.column_scale, theirs.column_scale),
        )
    )
    difference = (theirs.dequantize() - decoded).abs().max() / decoded.abs().max()
    return equal_codes >= 0.999 and steps <= 1 and difference <= 1e-5


def main(path: str) -> None:
    """Check every case, print one line each, and exit with 1 if any differs."""
    passed = failed = 0
    with safe_open(path, "pt") as file:
        for case in json.loads(file.metadata()["cases"]):
            name = case["name"]
            fields = ("key_bits", "value_bits", "group_size", "iterations")
            settings = KVarNSettings(**{field: case[field] for field in fields})
            theirs = unpack_records(file.get_tensor(f"{name}.record"), case["head_dim"], settings)
            keys = file.get_tensor(f"{name}.key").float().T.contiguous()
            values = file.get_tensor(f"{name}.value").float()
            own = (
                quantize_tiles(keys, settings.key_bits, settings),
                quantize_tiles(values, settings.value_bits, settings),
            )
            decoded = (
                file.get_tensor(f"{name}.key_dequantized").T,
                file.get_tensor(f"{name}.value_dequantized"),
            )
            good = all(map(compare, own, theirs, decoded))
            passed, failed = passed + good, failed + (not good)
            print(f"{name}: {'agrees' if good else 'DIFFERS'}")
    print(f"backend records: {passed} agree, {failed} differ")
    sys.exit(failed > 0)


main(sys.argv[1])
