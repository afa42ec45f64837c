"""The figures of an error report: which there are, and how they become files."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation import drawings

if TYPE_CHECKING:
    from kvarn_cli.evaluation.error_report import ErrorReport

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
MAIN_FIGURE = "context"

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "kvarn",
}


def draw_figures(report: "ErrorReport") -> dict[str, Figure]:
    """Draw all figures of a report.

    Returns:
        Name → figure; figures without data are left out.
    """
    with mpl.rc_context(_STYLE):
        figures = {
            MAIN_FIGURE: drawings.context(report),
            "heads": drawings.heads(report),
            "tokens": drawings.tokens(report),
            "worst-tokens": drawings.worst_tokens(report),
            "memory": drawings.memory(report),
        }
    return {name: figure for name, figure in figures.items() if figure is not None}


def check_folder(folder: Path) -> None:
    """Make the folder for figures before a long run.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write figures to {folder}: {error.strerror}") from error


def check_figure(path: Path) -> None:
    """Refuse a picture that could not be written at the end of a long run.

    Raises:
        UsageError: unknown kind of picture, or no folder to put it in.
    """
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise UsageError(
            f"{path} is no kind of picture that can be drawn",
            hint=f"let the name end in {', '.join(FIGURE_SUFFIXES)}",
        )
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write {path}", hint="name a file in a folder that exists")


def save_figures(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write each figure as PNG (300 dpi) and SVG.

    Raises:
        UsageError: a file cannot be written.
    """
    paths = [folder / f"{name}.{suffix}" for name in figures for suffix in ("png", "svg")]
    for path in paths:
        save_figure(figures[path.stem], path)
    return paths


def save_figure(figure: Figure, path: Path) -> None:
    """Write one figure; its suffix chooses the format.

    Raises:
        UsageError: the file cannot be written.
    """
    content = _encoded(figure, path.suffix[1:].lower())
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def svg_of(figure: Figure) -> bytes:
    """The figure as an SVG file; the same figure gives the same bytes."""
    return _encoded(figure, "svg")


def _encoded(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format=kind, dpi=300, metadata=metadata)
    return buffer.getvalue()
