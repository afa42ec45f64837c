"""A tiny checkpoint with all that people's folders have: custom code, broken and foreign files."""

import json
from pathlib import Path
from typing import Any

from tiny_models import build_tiny_checkpoint

CALIBRATION_TEXT = "".join(
    f"Line {number}: the cache keeps {number * 7 % 31} keys and {number * 5 % 23} values.\n"
    for number in range(80)
)
_CUSTOM_CODE = """
import pathlib

pathlib.Path({marker!r}).touch()

from transformers import LlamaConfig, LlamaForCausalLM


class CustomConfig(LlamaConfig):
    pass


class CustomForCausalLM(LlamaForCausalLM):
    config_class = CustomConfig
"""


def build_awkward_checkpoint(folder: Path, family: str = "llama", **options: Any) -> Path:
    """A tiny checkpoint whose sidecars must all be copied, and whose code must not be run.

    The code would leave the file `marker_of(folder)`.
    """
    build_tiny_checkpoint(folder, family, **options)
    (folder / "custom.py").write_text(_CUSTOM_CODE.format(marker=str(marker_of(folder))))
    (folder / "generation_config.json").write_bytes(b"{not even JSON")
    (folder / "LICENSE").write_bytes(b"Apache-2.0\r\n")
    (folder / "README.md").write_bytes(b"---\nlicense: apache-2.0\n---\n# Base\n")
    (folder / "notes").mkdir()
    (folder / "notes" / "caf\u00e9.txt").write_bytes(b"\x00\xff")
    classes = {
        "AutoConfig": "custom.CustomConfig",
        "AutoModelForCausalLM": "custom.CustomForCausalLM",
    }
    edit_config(folder, auto_map=classes, own_key=[1e-05, None])
    return folder


def marker_of(folder: Path) -> Path:
    """What the checkpoint's code leaves behind where it is run."""
    return folder.with_name(f"{folder.name}.executed")


def edit_config(folder: Path, **changes: Any) -> None:
    """Change or add entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
