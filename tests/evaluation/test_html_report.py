"""The page in a real browser: headless Chromium, driven by command line alone."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from error_reports import tiny_report

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.error_report import ErrorReport
from kvarn_cli.evaluation.figures import draw_figures
from kvarn_cli.evaluation.html_report import write_html

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=5000",
)
_SIZES = """
<script>addEventListener("load", () => { for (const image of document.images)
image.dataset.size = image.naturalWidth + "x" + image.clientHeight; });</script>
"""


class _Page(HTMLParser):
    """Figures, cells with a path into the document, and the document itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: dict[str, dict[str, str | None]] = {}
        self.cells: list[tuple[str, str, str]] = []
        self.document = ""
        self._open: dict[str, str | None] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = dict(attrs)
        if tag == "img":
            self.images[str(self._open["id"])] = self._open

    def handle_data(self, data: str) -> None:
        if "data-path" in self._open:
            self.cells.append((self._open["data-path"], self._open["data-value"], data))
        elif self._open.get("id") == "document":
            self.document += data
        self._open = self._open if self._open.get("id") == "document" else {}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(tiny_report(), draw_figures(tiny_report()), path)
    return path


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    assert found, "these tests need chromium (Debian: apt-get install chromium)"
    return found


def _in_browser(chromium: str, page: Path, folder: Path, *extra: str) -> tuple[str, str]:
    command = [chromium, *_FLAGS, f"--user-data-dir={folder / 'profile'}", *extra, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


def _value(document: dict, path: str):
    for key in path.split("/"):
        document = document[int(key) if key.isdigit() else key]
    return document


@pytest.mark.browser
def test_it_opens_without_a_console_message_and_its_figures_have_size(
    chromium: str, page: Path, tmp_path: Path
) -> None:
    """A copy of the page that is allowed one script, which notes the sizes."""
    measured = tmp_path / "measured.html"
    text = page.read_text(encoding="utf-8")
    measured.write_text(
        text.replace("style-src", "script-src 'unsafe-inline'; style-src").replace(
            "</body>", _SIZES + "</body>"
        ),
        encoding="utf-8",
    )
    dom, console = _in_browser(chromium, measured, tmp_path, "--dump-dom")
    assert console == ""
    images = _Page(dom).images
    assert set(images) == {
        f"figure-{name}" for name in ("context", "heads", "tokens", "worst-tokens", "memory")
    }
    for image in images.values():
        width, height = map(int, str(image["data-size"]).split("x"))
        assert width > 200
        assert height > 100
        assert image["alt"]


@pytest.mark.browser
def test_the_numbers_in_the_page_are_those_of_the_document(
    chromium: str, page: Path, tmp_path: Path
) -> None:
    dom, console = _in_browser(chromium, page, tmp_path, "--dump-dom")
    assert console == ""
    parsed, document = _Page(dom), tiny_report().document()
    assert json.loads(parsed.document) == document
    assert len(parsed.cells) > 200
    for path, value, shown in parsed.cells:
        expected = _value(document, path)
        assert json.loads(value) == expected
        number = float(shown.removesuffix(" %"))
        digits = shown.removesuffix(" %").partition(".")[2].partition("e")[0]
        scale = 100 if shown.endswith("%") else 1
        tolerance = 0.51 * 10.0 ** -len(digits) * (abs(expected) if "e" in shown else 1)
        assert abs(number - scale * expected) <= max(tolerance, 1e-9 * abs(expected)) * (
            10 if "e" in shown else 1
        )


def test_it_needs_no_other_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert "url(" not in text.partition("<body>")[0]
    assert "tiny &lt;/script&gt;&lt;b&gt;" in text
    assert text.count("</script>") == 1
    assert "<th>kvarn:<wbr>k2v2_g32</th>" in text


@pytest.mark.browser
def test_the_page_can_be_seen(chromium: str, page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "page.png"
    _in_browser(chromium, page, tmp_path, f"--screenshot={shot}", "--window-size=1250,3000")
    assert shot.stat().st_size > 50_000


def test_a_partial_report_says_so(tmp_path: Path) -> None:
    partial: ErrorReport = tiny_report().model_copy(update={"partial": True})
    path = tmp_path / "partial.html"
    write_html(partial, {}, path)
    assert "<strong>Partial:</strong>" in path.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_html(tiny_report(), {}, tmp_path / "nowhere" / "report.html")
