"""Pictures of an error report, each a matplotlib figure, readable in print and without colour.

Methods differ by colour (Okabe and Ito's, safe for colour-blind readers), marker and line.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvarn_cli.errors import UsageError

if TYPE_CHECKING:
    from kvarn_cli.evaluation.error_report import AttentionErrors, ErrorReport, MethodResult

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
MAIN_FIGURE = "context"

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")
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
    drawings: dict[str, Callable[[ErrorReport], Figure | None]] = {
        MAIN_FIGURE: _context,
        "heads": _heads,
        "tokens": _tokens,
        "worst-tokens": _worst_tokens,
        "memory": _memory,
    }
    with mpl.rc_context(_STYLE):
        figures = {name: draw(report) for name, draw in drawings.items()}
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


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "markersize": 4,
    }


def _context(report: "ErrorReport") -> Figure:
    """Attention error against context length, static and accumulated on one scale.

    Intervals over two windows say nothing (t is 12.7) and are left out; means set the scale.
    """
    figure = _figure(9, 3.6)
    static, accumulated = figure.subplots(1, 2, sharey=True)
    for index, result in enumerate(report.results):
        attention = result.attention
        if attention.static is not None:
            _draw_context(static, attention.static, index, result)
        _draw_context(accumulated, attention.accumulated, index, result)
    static.set(title="static: each layer's own error", ylabel="attention MAE")
    accumulated.set(title="accumulated: as in decoding")
    top = max(
        block.mae for result in report.results for block in result.attention.accumulated.by_context
    )
    for axes in (static, accumulated):
        axes.set(xlabel="context length, tokens")
        axes.set_ylim(0, 1.5 * top or 1)
    _legend_below(figure, accumulated)
    return figure


def _draw_context(
    axes: Axes, errors: "AttentionErrors", index: int, result: "MethodResult"
) -> None:
    first = next((n for n, block in enumerate(errors.by_context) if block.affected), 0)
    blocks = errors.by_context[first:]
    ends = [block.end for block in blocks]
    axes.plot(ends, [block.mae for block in blocks], label=result.method, **_style(index))
    intervals = [block.interval for block in blocks]
    if result.num_windows > 2:
        low, high = zip(*(interval for interval in intervals if interval), strict=True)
        axes.fill_between(
            ends, low, high, color=_COLORS[index % len(_COLORS)], alpha=0.15, linewidth=0
        )


def _heads(report: "ErrorReport") -> Figure:
    """Heat maps, layers by query heads, all on one colour scale."""
    results = report.results
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    first = results[0].attention.accumulated.by_head
    height = max(1.8, 0.09 * len(first)) + 0.6
    figure = _figure(1.4 + 1.9 * columns, height * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    tables = [result.attention.accumulated for result in results]
    top = max((x for table in tables for row in table.by_head for x in row), default=0) or 1
    for axes, result, table in zip(grid, results, tables, strict=False):
        width = max(map(len, table.by_head))
        padded = [[*row, *[float("nan")] * (width - len(row))] for row in table.by_head]
        image = axes.imshow(padded, cmap="cividis", vmin=0, vmax=top, aspect="auto")
        axes.set_title(_wrapped(result.method), fontsize=8)
        axes.set(xlabel="query head", ylabel="layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=grid.tolist(), label="attention MAE, accumulated")
    return figure


def _tokens(report: "ErrorReport") -> Figure | None:
    """Magnitude against direction error of single K vectors; on the line both are equal."""
    results = [result for result in report.results if _has_error(result)]
    if not results:
        return None
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    figure = _figure(1 + 2.2 * columns, 0.6 + 2.3 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for index, (axes, result) in enumerate(zip(grid, results, strict=False)):
        assert result.tokens is not None
        points = [(d, m) for m, d in result.tokens.keys.sample if m > 0 and d > 0]
        axes.scatter(
            *zip(*points, strict=True), s=5, alpha=0.4, color=_COLORS[index % 7], linewidths=0
        )
        axes.axline((1e-3, 1e-3), (1, 1), color="black", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", yscale="log")
        axes.set_ylim(bottom=1e-9)
        axes.set_title(_wrapped(result.method), fontsize=8)
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    figure.supxlabel("direction error of K, E_D / ‖K‖²", fontsize=9)
    figure.supylabel("magnitude error, E_M / ‖K‖²", fontsize=9)
    return figure


def _worst_tokens(report: "ErrorReport") -> Figure | None:
    """What the worst tokens hold of K's error, and how much of theirs is magnitude."""
    results = [result for result in report.results if _has_error(result)]
    if not results:
        return None
    figure = _figure(9, 3.4)
    total, magnitude = figure.subplots(1, 2)
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        assert result.tokens is not None
        worst = result.tokens.keys.worst
        positions = [number + (index - (len(results) - 1) / 2) * width for number in range(3)]
        bars: dict[str, Any] = {
            "width": width,
            "color": _COLORS[index % len(_COLORS)],
            "hatch": ("", "//", "..", "xx", "\\\\", "++", "oo")[index % 7],
            "edgecolor": "white",
            "label": result.method,
        }
        total.bar(positions, [100 * entry.total_share for entry in worst], **bars)
        magnitude.bar(positions, [100 * entry.magnitude_share for entry in worst], **bars)
    names = [f"worst {entry.share:.0%}" for entry in worst]
    for axes in (total, magnitude):
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False, axis="x")
    total.set(ylabel="%", title="share of K's squared error")
    magnitude.set(title="magnitude's part of their error")
    _legend_below(figure, magnitude)
    return figure


def _memory(report: "ErrorReport") -> Figure | None:
    """KL against bytes of the cache at the middle length."""
    results = [result for result in report.results if result.logits.kl.mean > 0]
    if not results:
        return None
    figure = _figure(6, 3.8)
    axes = figure.subplots()
    middle = len(results[0].memory) // 2
    for index, result in enumerate(results):
        memory, kl = result.memory[middle], result.logits.kl
        error = None
        if kl.interval is not None:
            error = [[max(kl.mean - kl.interval[0], 0)], [kl.interval[1] - kl.mean]]
        style = _style(index) | {"linestyle": "none", "markersize": 7}
        axes.errorbar(
            [memory.bytes / 2**20], [kl.mean], yerr=error, label=result.method, capsize=2, **style
        )
    tokens, full = results[0].memory[middle].tokens, results[0].memory[middle].sixteen_bit_bytes
    axes.set(
        yscale="log",
        xlabel=f"cache of {tokens:,} tokens, MiB (16 bits: {full / 2**20:,.0f} MiB)",
        ylabel="mean KL, nats",
    )
    means = [result.logits.kl.mean for result in results]
    axes.set_ylim(min(means) / 3, max(means) * 3)
    axes.set_xlim(0, 1.1 * max(result.memory[middle].bytes for result in results) / 2**20)
    _legend_below(figure, axes)
    return figure


def _has_error(result: "MethodResult") -> bool:
    return result.tokens is not None and result.tokens.keys.direction > 0


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)


def _wrapped(label: str) -> str:
    return label.replace(",", ",\n")
