from pathlib import Path

import matplotlib.image
import pytest

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.figures import FIGURE_SUFFIXES, check_figure_path, draw_errors
from kvarn_cli.evaluation.metrics import ContextError, MethodErrors, VectorSummary

SUMMARY = VectorSummary(0.01, 0.1, 0.2, 0.3)


def errors(method: str, packed: VectorSummary | None = SUMMARY) -> MethodErrors:
    return MethodErrors(
        method=method,
        num_windows=1,
        first_position=0,
        sequence_length=256,
        bits_per_element=4.0,
        kl_mean=0.1,
        kl_median=0.1,
        kl_p999=0.2,
        top1_agreement=0.9,
        loss_exact=2.0,
        loss_method=2.1,
        attention_mae=0.03,
        attention_mae_by_layer={0: 0.02, 3: 0.04},
        attention_mae_by_context=(ContextError(0, 128, 0.0), ContextError(128, 256, 0.03)),
        keys=packed,
        values=packed,
        elapsed_seconds=1.0,
    )


@pytest.mark.parametrize("suffix", FIGURE_SUFFIXES)
def test_a_figure_is_drawn_in_each_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"errors{suffix.upper()}"
    check_figure_path(path)
    draw_errors([errors("kvarn:k2v2_g128"), errors("kivi:k2v2_g128")], path)
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)


def test_the_methods_are_named_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "errors.svg"
    draw_errors([errors("kvarn:k2v2_g128")], path)
    assert "kvarn:k2v2_g128" in path.read_text()
    assert "attention MAE" in path.read_text()


def test_a_method_that_packed_nothing_has_no_bars(tmp_path: Path) -> None:
    draw_errors([errors("exact", packed=None)], tmp_path / "errors.png")
    assert matplotlib.image.imread(tmp_path / "errors.png").std() > 0


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no kind of picture") as refused:
        check_figure_path(tmp_path / "errors.gif")
    assert ".png, .svg, .pdf" in refused.value.hint
    with pytest.raises(UsageError, match="does not exist"):
        check_figure_path(tmp_path / "nowhere" / "errors.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        draw_errors([errors("exact")], tmp_path / "folder.png")
