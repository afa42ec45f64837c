"""What V's basis costs when an engine rotates a fused checkpoint again.

    python benchmarks/double_rotation.py MODEL [--num-samples 4] [--sequence-length 1536]

One run, several windows: KL divergence to the original for V quantized after one plain H, after
plain H applied twice (the plain basis), and after H · diag(bent signs) · H. Rounding of the fused
weights is left out, so that only the basis differs.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.pseudo_decode import pseudo_decode, record_exact
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.quantization.hadamard import fused_rotation, hadamard_matrix, rotate
from kvarn_cli.quantization.methods import KVarN
from kvarn_cli.settings import KVarNSettings


@dataclass(frozen=True, kw_only=True)
class InBasis(KVarN):
    """KVarN with V quantized after an arbitrary orthonormal matrix."""

    name: ClassVar[str] = "kvarn-in-basis"
    basis: str = "H"

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        hadamard = hadamard_matrix(values.shape[-1])
        matrix = {
            "H": hadamard,
            "H·H = 1": torch.eye(len(hadamard)),
            "H·diag(s)": fused_rotation(len(hadamard)),
            "H·diag(s)·H": fused_rotation(len(hadamard)) @ hadamard,
        }[self.basis]
        keys, values = super().reconstruct(keys, rotate(values, matrix))
        return keys, rotate(values, matrix.T)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-samples", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=1536)
    arguments = parser.parse_args()
    model = load_model(arguments.model, dtype=torch.float32, device=torch.device("cpu"))
    text = CalibrationText(None, "text", arguments.num_samples, arguments.sequence_length, seed=0)
    windows = text.windows(load_tokenizer(arguments.model))
    methods = [
        InBasis(
            key_bits=KVarNSettings.from_name(preset).key_bits, basis=basis, value_rotation="fused"
        )
        for preset in ("k4v2_g128", "k2v2_g128")
        for basis in ("H", "H·H = 1", "H·diag(s)", "H·diag(s)·H")
    ]
    divergence: dict[InBasis, list[float]] = {method: [] for method in methods}
    for tokens in windows.split(1):
        exact = record_exact(model, tokens)
        for method in methods:
            divergence[method].append(pseudo_decode(model, exact, method).logits.kl.mean().item())
    print(f"{'preset':10} {'V quantized after':18} {'KL':>8} {'to H':>6}   by window")
    for method, values in divergence.items():
        reference = divergence[methods[0 if method.key_bits == 4 else 4]]
        mean, ratio = sum(values) / len(values), sum(values) / sum(reference)
        each = " ".join(f"{value:.4f}" for value in values)
        preset = method.settings.name
        print(f"{preset:10} {method.basis:18} {mean:8.4f} {ratio:6.2f}   {each}")


if __name__ == "__main__":
    main()
