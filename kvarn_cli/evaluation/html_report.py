"""The error report as one HTML file that needs nothing else."""

import base64
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.error_report import ErrorReport
from kvarn_cli.evaluation.figures import svg_of
from kvarn_cli.evaluation.verdict import thresholds, verdict

_TEMPLATE = "error_report.html.jinja"


def write_html(report: ErrorReport, figures: Mapping[str, Figure], path: Path) -> None:
    """Write the page: verdict, figures as SVG with their data in tables, and the JSON document.

    Raises:
        UsageError: the file cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("kvarn_cli"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    images = {
        name: "data:image/svg+xml;base64," + base64.b64encode(svg_of(figure)).decode()
        for name, figure in figures.items()
    }
    page = environment.get_template(_TEMPLATE).render(
        report=report,
        verdict=verdict(report),
        thresholds=thresholds(report),
        images=images,
        document=report.document(),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
