import json

import pytest
from error_reports import tiny_report

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.error_report import ErrorReport


def test_a_report_is_the_same_after_a_file(tmp_path) -> None:
    report, path = tiny_report(), tmp_path / "report.json"
    path.write_text(json.dumps(report.document(), allow_nan=False))
    assert ErrorReport.read(path) == report


def test_the_document_has_the_promised_shape() -> None:
    document = tiny_report().document()
    assert document["schema"] == "kvarn.errors/1"
    result = document["results"][2]
    assert result["method"] == "kvarn:k2v2_g32"
    assert result["logits"]["kl"].keys() >= {"mean", "median", "p999"}
    assert result["logits"].keys() >= {"top1", "loss"}
    assert result.keys() >= {"bits_per_element", "attention", "tokens"}


def test_fields_of_later_versions_are_ignored(tmp_path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(tiny_report().document() | {"colour": "red"}))
    assert ErrorReport.read(path) == tiny_report()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON document"),
        ("[]", "its schema is None"),
        ('{"schema": "kvarn.errors/2"}', "its schema is 'kvarn.errors/2'"),
        ('{"schema": "kvarn.errors/1"}', "kvarn_version: Field required"),
    ],
)
def test_other_files_are_refused(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        ErrorReport.read(path)


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        ErrorReport.read(tmp_path / "none.json")
