from xml.etree import ElementTree

import matplotlib.image
import pytest
from error_reports import tiny_report

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.figures import (
    check_folder,
    draw_figures,
    save_figure,
    save_figures,
    svg_of,
)

NAMES = ["context", "heads", "tokens", "worst-tokens", "memory"]


def test_every_figure_is_written_as_png_and_svg(tmp_path) -> None:
    figures = draw_figures(tiny_report())
    assert list(figures) == NAMES
    paths = save_figures(figures, tmp_path)
    assert sorted(path.name for path in paths) == sorted(
        f"{name}.{suffix}" for name in NAMES for suffix in ("png", "svg")
    )
    for name in NAMES:
        height, width, _ = matplotlib.image.imread(tmp_path / f"{name}.png").shape
        assert width > height > 500
        assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")


def test_the_same_report_gives_the_same_bytes() -> None:
    first, second = (draw_figures(tiny_report())["context"] for _ in range(2))
    assert svg_of(first) == svg_of(second)


@pytest.mark.parametrize("num_windows", [1])
def test_one_window_and_no_error_are_drawn_too(num_windows: int) -> None:
    report = tiny_report(num_windows)
    exact = report.model_copy(update={"results": report.results[:1]})
    assert list(draw_figures(report)) == NAMES
    assert list(draw_figures(exact)) == ["context"]


def test_long_names_leave_no_legend_cut_off(tmp_path) -> None:
    report = tiny_report()
    results = tuple(
        result.model_copy(update={"method": f"{result.method},{'option=value,' * 5}{number}"})
        for number, result in enumerate(3 * report.results[1:])
    )
    for figure in draw_figures(report.model_copy(update={"results": results})).values():
        save_figure(figure, tmp_path / "figure.svg")
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= figure.bbox.x1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path) -> None:
    check_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write figures"):
        check_folder(tmp_path / "file" / "folder")
