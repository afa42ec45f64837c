import json
from xml.etree import ElementTree

import matplotlib.image
import pytest
from kvarn_process import assert_refused, error_of, run_kvarn


def test_the_report_of_a_converted_model_with_its_figure(converted, short_run, tmp_path):
    figure = tmp_path / "errors.png"
    outcome = run_kvarn("inspect-errors", converted, "--figure", figure, *short_run)
    assert outcome.exit_code == 0, outcome.stderr
    assert "converted (V's rotation fused), 1 windows of 192 tokens, text.txt" in outcome.stdout
    for method in ("kvarn:k4v4_g32", "quarot:k4v4_g32", "kivi:k4v4_g32"):
        rows = [line for line in outcome.stdout.splitlines() if method in line]
        assert len(rows) == 3
    assert "Attention MAE" in outcome.stdout
    assert "≤192" in outcome.stdout
    assert "measuring ..." in outcome.stderr
    height, width, _ = matplotlib.image.imread(figure).shape
    assert width > height > 500


def test_the_json_report_of_an_original_model_with_its_figure(llama, short_run, tmp_path):
    figure = tmp_path / "errors.svg"
    methods = ["-m", "exact", "-m", "kvarn:k2v2_g32,iterations=16"]
    options = [*methods, "--figure", figure, *short_run, "--json", "-q"]
    outcome = run_kvarn("inspect-errors", llama, *options)
    assert outcome.stderr == ""
    document = outcome.data
    assert document["schema"] == "kvarn.errors/1"
    assert (document["model"], document["fused"]) == ("llama", False)
    exact, kvarn = document["results"]
    assert exact["method"] == "exact"
    assert exact["attention_mae"] == 0
    assert abs(exact["kl_mean"]) < 1e-6
    assert kvarn["method"] == "kvarn:k2v2_g32,iterations=16"
    assert kvarn["kl_mean"] > 1e-4
    assert kvarn["attention_mae_by_context"][-1]["end"] == 192
    assert ElementTree.parse(figure).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--figure", "errors.gif"], "errors.gif is no kind of picture"),
        (["--figure", "nowhere/errors.png"], "the folder nowhere for the figure does not exist"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused_first(options, word):
    assert_refused(run_kvarn("inspect-errors", "./nowhere", *options), 2, word)


def test_an_unknown_method_is_refused(llama):
    outcome = run_kvarn("inspect-errors", llama, "--method", "magic:k2v2_g32", "--json")
    assert outcome.exit_code == 2
    error = error_of(outcome)
    assert error["message"] == "unknown method 'magic' in 'magic:k2v2_g32'"
    assert error["hint"] == "methods: exact, kvarn, quarot, kivi"
    assert json.loads(outcome.stdout).keys() == {"error"}
