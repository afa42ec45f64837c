import json
import signal
import subprocess
import sys
import time

import matplotlib.image
import pytest
from kvarn_process import assert_refused, error_of, run_kvarn


@pytest.fixture(scope="module")
def report(llama, short_run):
    """The outcome of one run with --json that several tests look at."""
    methods = ["-m", "exact", "-m", "kvarn:k2v2_g32,iterations=16", "-m", "kivi:k2v2_g32"]
    return run_kvarn("inspect-errors", llama, *methods, *short_run, "--json", "-q")


@pytest.fixture
def report_file(report, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(report.stdout)
    return path


def test_the_tables_of_a_converted_model(converted, short_run):
    outcome = run_kvarn("inspect-errors", converted, *short_run, "--memory-at", "50000")
    assert outcome.exit_code == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("converted (V's rotation fused), 1 window of 192 tokens, text.txt")
    tables = [line for line in lines if line[:1] in "┏┃┡│└"]
    assert max(map(len, tables)) <= 100
    for method in ("kvarn:k4v4_g32", "kvarn:k2v2_g32", "quarot:k2v2_g32", "kivi:k2v2_g32"):
        assert len([line for line in tables if method in line]) == 4
    assert "50,000 tokens" in outcome.stdout
    assert "exact with all: the first 128 tokens, the incomplete group" in outcome.stdout
    assert any("*" in line for line in tables)
    assert "≤192" in outcome.stdout
    sentences = [line for line in lines if line.startswith("- ")]
    assert any("top-1 choices at 192 tokens" in sentence for sentence in sentences)
    assert "times when errors accumulate" in sentences[-1]
    assert lines[-1].startswith("Keeping means: top-1 agreement of at least 90%")
    assert "measuring ..." in outcome.stderr


def test_the_json_report_of_an_original_model(report):
    assert report.stderr == ""
    document = report.data
    assert document["schema"] == "kvarn.errors/1"
    assert (document["model"], document["fused"]) == ("llama", False)
    exact, kvarn, _ = document["results"]
    assert exact["method"] == "exact"
    assert exact["attention"]["accumulated"]["mae"] == 0
    assert abs(exact["logits"]["kl"]["mean"]) < 1e-6
    assert kvarn["method"] == "kvarn:k2v2_g32,iterations=16"
    assert kvarn["logits"]["kl"]["mean"] > 1e-4
    assert kvarn["attention"]["accumulated"]["by_context"][-1]["end"] == 192


def test_a_report_is_shown_again_from_its_file(report, report_file, tmp_path):
    page, figures = tmp_path / "page.html", tmp_path / "new" / "figures"
    outcome = run_kvarn(
        *("inspect-errors", "--from", report_file, "--report", page, "--figures", figures),
        *("--figure", tmp_path / "errors.svg"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert "kvarn:k2v2_g32,iterations=16" in outcome.stdout
    assert "<title>Cache errors of llama</title>" in page.read_text(encoding="utf-8")
    height, width, _ = matplotlib.image.imread(figures / "context.png").shape
    assert width > height > 500
    assert (figures / "context.svg").exists()
    assert "<svg" in (tmp_path / "errors.svg").read_text(encoding="utf-8")
    again = run_kvarn("inspect-errors", "--from", report_file, "--json")
    assert again.data == report.data


def test_ctrl_c_gives_what_is_finished(llama):
    """Stopped in a long run, once its first window is behind it."""
    options = ["-m", "kvarn:k2v2_g32", "--num-samples", "300", "--sequence-length", "400", "--json"]
    command = [sys.executable, "-m", "kvarn_cli", "inspect-errors", str(llama), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    for line in process.stderr:
        if line.startswith("measuring"):
            break
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    document = json.loads(stdout)
    assert document["partial"]
    assert 1 <= document["results"][0]["num_windows"] < 300
    assert "interrupted: the report is partial" in stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "name a model or --from FILE"),
        (["x", "--from", "y.json"], "name a model or --from FILE"),
        (["./nowhere", "--report", "nowhere/errors.html"], "cannot write nowhere/errors.html"),
        (["./nowhere", "--figure", "errors.doc"], "errors.doc is no kind of picture"),
        (["./nowhere", "--figure", "nowhere/errors.png"], "cannot write nowhere/errors.png"),
        (["./nowhere", "--figures", "/dev/null/figures"], "cannot write figures to /dev/null"),
        (["--from", "./nowhere.json"], "cannot read nowhere.json"),
        (["./nowhere", "--oracle", "100"], "'--oracle'"),
    ],
)
def test_what_cannot_work_is_refused_first(options, word):
    assert_refused(run_kvarn("inspect-errors", *options), 2, word)


def test_an_unknown_method_is_refused(llama):
    outcome = run_kvarn("inspect-errors", llama, "--method", "magic:k2v2_g32", "--json")
    assert outcome.exit_code == 2
    error = error_of(outcome)
    assert error["message"] == "unknown method 'magic' in 'magic:k2v2_g32'"
    assert error["hint"] == (
        "methods: exact, kvarn, ablation, quarot, kivi, kvquant, turboquant, fp8, q8_0, q4_0"
    )
    assert json.loads(outcome.stdout).keys() == {"error"}
