"""Pictures of an error report, each a matplotlib figure, readable in print and without colour.

Methods differ by colour (Okabe and Ito's, safe for colour-blind readers), marker and line.
"""

from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

if TYPE_CHECKING:
    from kvarn_cli.evaluation.error_report import AttentionErrors, ErrorReport, MethodResult

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
_SHADES = 300


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "markersize": 4,
    }


def context(report: "ErrorReport") -> Figure:
    """Attention error against context length, static and accumulated on one scale.

    Intervals over two windows say nothing (t is 12.7) and are left out. Means set the scale, with
    room for intervals up to half as high again.
    """
    figure = _figure(9, 3.6)
    static, accumulated = figure.subplots(1, 2, sharey=True)
    results = _rivals(report) or report.results
    for index, result in enumerate(results):
        attention = result.attention
        if attention.static is not None:
            _draw_context(static, attention.static, index, result)
        _draw_context(accumulated, attention.accumulated, index, result)
    static.set(title="static: each layer's own error", ylabel="attention MAE")
    accumulated.set(title="accumulated: as in decoding")
    blocks = [
        (block, result) for result in results for block in result.attention.accumulated.by_context
    ]
    top = max(block.mae for block, _ in blocks)
    shaded = [b.interval[1] for b, result in blocks if b.interval and _has_interval(result)]
    for axes in (static, accumulated):
        axes.set(xlabel="context length, tokens")
        axes.set_ylim(0, min(max([1.05 * top, *shaded]), 1.5 * top) or 1)
        axes.xaxis.set_major_locator(MultipleLocator(_tick_distance(blocks[-1][0].end)))
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
    if _has_interval(result):
        low, high = zip(*(interval for interval in intervals if interval), strict=True)
        axes.fill_between(
            ends, low, high, color=_COLORS[index % len(_COLORS)], alpha=0.15, linewidth=0
        )


def _has_interval(result: "MethodResult") -> bool:
    return result.num_windows > 2


def _tick_distance(num_tokens: int) -> int:
    """A power of two that gives four to eight ticks."""
    return max(1 << (num_tokens.bit_length() - 4), 32)


def heads(report: "ErrorReport") -> Figure | None:
    """Heat maps, layers by query heads, all on one logarithmic scale of colours."""
    results = _rivals(report)
    if not results:
        return None
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    first = results[0].attention.accumulated.by_head
    height = max(1.8, 0.09 * len(first)) + 0.6
    figure = _figure(1.4 + 1.9 * columns, height * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    tables = [result.attention.accumulated for result in results]
    top = max(x for table in tables for row in table.by_head for x in row)
    scale = LogNorm(top / _SHADES, top, clip=True)
    for axes, result, table in zip(grid, results, tables, strict=False):
        width = max(map(len, table.by_head))
        padded = [[*row, *[float("nan")] * (width - len(row))] for row in table.by_head]
        image = axes.imshow(padded, cmap="cividis", norm=scale, aspect="auto")
        axes.set_title(_wrapped(result.method), fontsize=8)
        axes.set(xlabel="query head", ylabel="layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=grid.tolist(), label="attention MAE, accumulated", aspect=40)
    return figure


def tokens(report: "ErrorReport") -> Figure | None:
    """Magnitude against direction error of single K vectors; on the line both are equal."""
    results = _rivals(report)
    if not results:
        return None
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    figure = _figure(1 + 2.2 * columns, 0.6 + 2.3 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for index, (axes, result) in enumerate(zip(grid, results, strict=False)):
        assert result.tokens is not None
        sample = result.tokens.keys.sample
        magnitude, direction = [m for m, _ in sample], [d for _, d in sample]
        color = _COLORS[index % len(_COLORS)]
        axes.scatter(direction, magnitude, s=5, alpha=0.4, color=color, linewidths=0)
        axes.axline((1e-3, 1e-3), (1, 1), color="black", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", yscale="log")
        axes.set_ylim(bottom=1e-9)
        axes.set_title(_wrapped(result.method), fontsize=8)
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    for axes in grid[max(len(results) - columns, 0) : len(results)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("direction error of K, E_D / ‖K‖²", fontsize=9)
    figure.supylabel("magnitude error, E_M / ‖K‖²", fontsize=9)
    return figure


def worst_tokens(report: "ErrorReport") -> Figure | None:
    """What the worst tokens hold of K's error, and how much of theirs is magnitude."""
    results = _rivals(report)
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
            "hatch": _HATCHES[index % len(_HATCHES)],
            "edgecolor": "white",
            "label": result.method,
        }
        total.bar(positions, [100 * entry.total_share for entry in worst], **bars)
        magnitude.bar(positions, [100 * entry.magnitude_share for entry in worst], **bars)
    equal = [100 * entry.share for entry in worst]
    spans = [number - 0.45 for number in range(3)], [number + 0.45 for number in range(3)]
    total.hlines(equal, *spans, colors="black", linestyles="--", label="if all tokens erred alike")
    names = [f"worst {entry.share:.0%}" for entry in worst]
    for axes in (total, magnitude):
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False, axis="x")
    total.set(ylabel="%", title="the worst tokens' share of K's squared error")
    magnitude.set(ylabel="%", title="magnitude's part of their error")
    _legend_below(figure, total)
    return figure


def memory(report: "ErrorReport") -> Figure | None:
    """KL against bytes of the cache at the middle length."""
    results = _rivals(report)
    if not results:
        return None
    figure = _figure(7, 4)
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
    _legend_below(figure, axes)
    return figure


def _rivals(report: "ErrorReport") -> "list[MethodResult]":
    """The methods with an error to draw; each looks the same in every figure."""
    return [result for result in report.results if result.attention.accumulated.mae]


def _legend_below(figure: Figure, axes: Axes) -> None:
    """In as many columns as the longest label leaves room for, up to three."""
    handles, labels = axes.get_legend_handles_labels()
    column_inches = 0.06 * max(map(len, labels)) + 0.4
    columns = max(1, min(3, int(figure.get_figwidth() / column_inches)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def _wrapped(label: str) -> str:
    return label.replace(",", ",\n")
