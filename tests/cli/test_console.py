import json
import os
import pty
import subprocess

import pytest
import typer
from kvarn_process import KVARN, environment

from kvarn_cli.cli.console import Console
from kvarn_cli.errors import CheckpointError


def shown_on_a_terminal(*arguments: str, **more_environment: str) -> str:
    """What `kvarn` shows where both its streams are a terminal."""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [*KVARN, *arguments], stdout=side, stderr=side, env=environment(**more_environment)
    )
    os.close(side)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other side was closed
        pass
    process.wait(timeout=60)
    os.close(terminal)
    return shown.decode()


def test_a_terminal_gets_colours_unless_it_cannot_or_shall_not_show_them():
    wrong = ("convert", "x", "--preset", "k9")
    assert "\x1b[" in shown_on_a_terminal(*wrong, TERM="xterm-256color")
    for plain in ({"TERM": "dumb"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}):
        shown = shown_on_a_terminal(*wrong, **plain)
        assert "error: unknown preset 'k9'" in shown
        assert "\x1b" not in shown


def test_text_is_shown_as_it_is_but_for_control_characters(capsys):
    with Console(as_json=False, quiet=False) as console:
        console.result("a [red]b[/red] :smile: é\tx\x1b[31m\x07\r")
        console.note("out/[bold]\x1b[2J")
        console.table(["[x]"], [[":smile:"]])
    out, err = capsys.readouterr()
    assert out.startswith("a [red]b[/red] :smile: é")
    assert "[x]" in out
    assert ":smile:" in out.splitlines()[-2]
    assert err == "out/[bold][2J\n"
    assert "\x1b" not in out


def test_long_lines_stay_whole(capsys):
    with Console(as_json=False, quiet=False) as console:
        console.result("word " * 60)
    assert capsys.readouterr().out == "word " * 60 + "\n"


def test_a_json_document_is_alone_on_stdout(capsys):
    with Console(as_json=True, quiet=False) as console:
        console.result("text")
        console.table(["column"], [["cell"]])
        console.note("on the way")
        with console.progress() as report:
            report("working", 1, 2)
        console.document({"name": "é", "undecodable": "\udcff"})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"name": "é", "undecodable": "\udcff"}
    assert out.isascii()
    assert err == "on the way\nworking ...\n"


def test_quiet_leaves_results_and_errors(capsys):
    with pytest.raises(typer.Exit), Console(as_json=False, quiet=True) as console:
        console.note("on the way")
        with console.progress() as report:
            report("working", 1, 2)
        console.result("done")
        raise CheckpointError("broken", hint="mend it")
    assert capsys.readouterr() == ("done\n", "error: broken\nhint: mend it\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_raised_on_purpose_becomes_an_exit_code(capsys, as_json):
    with pytest.raises(typer.Exit) as raised, Console(as_json=as_json, quiet=False):
        raise CheckpointError("broken", details={"tensor": "a"})
    assert raised.value.exit_code == 6
    out, err = capsys.readouterr()
    assert err == "error: broken\n"
    error = {"message": "broken", "hint": "", "exit_code": 6, "tensor": "a"}
    assert (json.loads(out) == {"error": error}) if as_json else (out == "")


def test_an_interrupt_ends_with_130(capsys):
    with pytest.raises(typer.Exit) as raised, Console(as_json=True, quiet=False):
        raise KeyboardInterrupt
    assert raised.value.exit_code == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == 130
    assert err == "error: interrupted\n"


def test_an_unexpected_error_keeps_its_traceback_and_gives_a_document(capsys):
    with pytest.raises(ZeroDivisionError), Console(as_json=True, quiet=False):
        _ = 1 / 0
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == 1
    assert "error: unexpected ZeroDivisionError: division by zero" in err
    assert "hint: please report this" in err


def test_long_work_shows_in_a_pipe_that_it_goes_on(monkeypatch, capfd):
    now = 0.0
    monkeypatch.setattr("kvarn_cli.cli.console.time.monotonic", lambda: now)
    with Console(as_json=False, quiet=False).progress() as report:
        for done in range(8):
            report("validating", done, 8)
            now += 4
    assert capfd.readouterr().err.splitlines() == [
        "validating ...",
        "validating 38%, 0:00:20 left",
        "validating 75%, 0:00:08 left",
    ]
