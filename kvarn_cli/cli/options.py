"""Options that several commands share, with the names people know."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Local folder or Hub id of the checkpoint.")
]
ConvertedFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder that kvarn convert wrote.")
]

Revision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Branch, tag or commit of a model on the Hub.", show_default=False
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        help="Hub token; else HF_TOKEN or the stored login. Never printed.",
        show_default=False,
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where downloads are kept; else the Hub's own cache.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run model code that the checkpoint brings.")
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="cpu, cuda, cuda:1, mps; auto takes a GPU when there is one."
    ),
]
ComputeDtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Arithmetic: float32, bfloat16, float16; auto: float32 on a CPU, else as stored.",
    ),
]

Dataset = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Calibration text: a .txt or .jsonl file or a folder; else text that comes along.",
        show_default=False,
    ),
]
DatasetField = Annotated[
    str, typer.Option(metavar="NAME", help="Field of a .jsonl line that holds the text.")
]
NumSamples = Annotated[int, typer.Option(metavar="N", min=1, help="Windows of calibration text.")]
SequenceLength = Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in a window.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Chooses the windows.")]


class EncoderName(StrEnum):
    """How codes and scales are chosen."""

    reference = "reference"
    refined = "refined"


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")]
