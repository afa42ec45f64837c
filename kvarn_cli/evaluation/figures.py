"""Pictures of a method comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvarn_cli.errors import UsageError

if TYPE_CHECKING:
    from kvarn_cli.evaluation.metrics import MethodErrors

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def check_figure_path(path: Path) -> None:
    """Refuse a figure that could not be written at the end of a long run.

    Raises:
        UsageError: unknown kind of picture, or no folder to put it in.
    """
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise UsageError(
            f"{path} is no kind of picture that can be drawn",
            hint=f"let the name end in {', '.join(FIGURE_SUFFIXES)}",
        )
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} for the figure does not exist")


def draw_errors(results: "Sequence[MethodErrors]", path: Path) -> None:
    """Draw attention error over context length and over layers, and magnitude and direction.

    Args:
        results: one entry per method, at least one.
        path: file to write; its suffix chooses the format.

    Raises:
        UsageError: the file cannot be written.
    """
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    by_context, by_layer, by_part = figure.subplots(1, 3)
    for index, result in enumerate(results):
        style = {
            "color": _COLORS[index % len(_COLORS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "markersize": 4,
            "label": result.method,
        }
        blocks = result.attention_mae_by_context
        by_context.plot(
            [block.end for block in blocks], [block.attention_mae for block in blocks], **style
        )
        layers = result.attention_mae_by_layer
        by_layer.plot(list(layers), list(layers.values()), **style)
    by_context.set(xlabel="context length, tokens", ylabel="attention MAE", title="Accumulation")
    by_layer.set(xlabel="layer", ylabel="attention MAE", title="By layer")
    _draw_parts(by_part, results)
    for axes in (by_context, by_layer):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    by_context.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _draw_parts(axes: Axes, results: "Sequence[MethodErrors]") -> None:
    """Bars of K's and V's squared error, magnitude at the bottom and direction on top."""
    bars = [
        (f"{result.method}\n{name}", errors)
        for result in results
        for name, errors in (("K", result.keys), ("V", result.values))
        if errors is not None
    ]
    positions = range(len(bars))
    magnitudes = [errors.magnitude for _, errors in bars]
    directions = [errors.direction for _, errors in bars]
    axes.bar(positions, magnitudes, color=_COLORS[1], label="magnitude")
    axes.bar(
        positions, directions, bottom=magnitudes, color=_COLORS[0], hatch="//", label="direction"
    )
    axes.set_xticks(positions, [label for label, _ in bars], rotation=90, fontsize="x-small")
    axes.set(ylabel="squared error / squared norm", title="Packed tokens")
    axes.legend(fontsize="small")
