import resource
import subprocess
import sys

import pytest
import typer
from kvarn_process import KVARN, assert_refused, environment, error_of, run_kvarn

from kvarn_cli import __version__
from kvarn_cli.cli.app import app

COMMANDS = typer.main.get_command(app).commands
HEAVY = {"torch", "transformers", "huggingface_hub", "matplotlib", "numpy", "jinja2"}


def imported_by(*arguments: str) -> set[str]:
    """Top-level packages that `kvarn` imports for these arguments."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvarn_cli", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "kvarn_cli.cli.app" in modules
    return {module.partition(".")[0] for module in modules}


def test_there_is_one_command_per_job():
    assert list(COMMANDS) == ["convert", "verify", "inspect-errors", "generate", "push-to-hub"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option(name):
    outcome = run_kvarn(name, "--help")
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    text = " ".join(outcome.stdout.split())
    for parameter in COMMANDS[name].params:
        argument = parameter.param_type_name == "argument"
        for shown in [parameter.metavar] if argument else parameter.opts:
            assert shown in text.replace(",", "").split()
        assert parameter.help in text


def test_help_names_the_commands_and_the_exit_codes():
    outcome = run_kvarn("--help")
    assert outcome.exit_code == 0
    text = " ".join(outcome.stdout.split())
    assert all(f" {name} " in text for name in COMMANDS)
    for code in ("0 done", "1 unexpected", "2 usage", "3 unsupported model", "4 Hub or network"):
        assert code in text
    for code in ("5 a threshold was missed", "6 broken checkpoint", "7 disk full"):
        assert code in text
    for code in ("130 interrupted", "143 terminated"):
        assert code in text


def test_without_a_command_the_help_is_shown():
    outcome = run_kvarn()
    assert outcome.exit_code == 2
    assert outcome.stdout == run_kvarn("--help").stdout


def test_the_version_is_that_of_the_package():
    assert run_kvarn("--version").stdout == f"kvarn {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], *([name, "-h"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    assert not HEAVY & imported_by(*arguments)


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_take_a_third_of_a_second(argument):
    """Of processor time, which other work on the machine does not lengthen much."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*KVARN, argument], env=environment(), stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.35


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        (["convert"], "Missing argument 'MODEL'", "kvarn convert"),
        (["convret", "x"], "Did you mean 'convert'?", "kvarn"),
        (["generate", "x", "hi", "--sede", "1"], "No such option: --sede", "kvarn generate"),
        (["convert", "x", "--rotation", "twice"], "'--rotation'", "kvarn convert"),
        (["inspect-errors", "x", "--num-samples", "0"], "'--num-samples'", "kvarn inspect-errors"),
    ],
)
def test_wrong_options_are_told_like_other_errors(arguments, message, command):
    assert_refused(run_kvarn(*arguments), 2, message, f"hint: see {command} --help")
    error = error_of(run_kvarn(*arguments, "--json"))
    assert message in error["message"]
    assert error["hint"] == f"see {command} --help"
