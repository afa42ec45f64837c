"""The one output sink, and the only user of rich: data on stdout, everything else on stderr."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import typer
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvarn_cli.errors import KvarnError
from kvarn_cli.progress import Report

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_PIPE_COLUMNS = 100
_LINE_SECONDS = 10
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class TerminatedError(BaseException):
    """SIGTERM came; like a KeyboardInterrupt, no `except Exception` may swallow it."""


class Console:
    """What a command prints with; as a context manager, what turns errors into exit codes.

    Args:
        as_json: print one JSON document on stdout and nothing else there.
        quiet: leave notes and progress out; results and errors stay.
        after_interrupt: what an interrupted user should know.
    """

    def __init__(self, *, as_json: bool, quiet: bool, after_interrupt: str = "") -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._after_interrupt = after_interrupt
        self._old_handler: Any = None
        self._out = _rich(stderr=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
        self._err = _rich(stderr=True)
        if quiet or not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _raise_terminated)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell errors; those raised on purpose end the command, others keep their traceback."""
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
        if isinstance(error, KvarnError):
            self.error(str(error), error.hint, error.exit_code, error.details)
            raise typer.Exit(error.exit_code) from None
        if isinstance(error, KeyboardInterrupt):
            self.error("interrupted", self._after_interrupt, INTERRUPTED)
            raise typer.Exit(INTERRUPTED) from None
        if isinstance(error, TerminatedError):
            self.error("terminated", self._after_interrupt, TERMINATED)
            raise typer.Exit(TERMINATED) from None
        if isinstance(error, Exception) and not isinstance(error, typer.Exit | BrokenPipeError):
            self.error(
                f"unexpected {kind.__name__ if kind else ''}: {error}",
                "please report this, with the lines that follow",
                KvarnError.exit_code,
            )

    def document(self, data: Mapping[str, object]) -> None:
        """Print the JSON document, when one was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")

    def result(self, text: str = "", *, end: str = "\n") -> None:
        """Print a line of the result."""
        if not self.as_json:
            self._out.print(_plain(text), end=end)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = ""
    ) -> None:
        """Print a table; the first column is text, the others are numbers."""
        if self.as_json:
            return
        table = Table(title=title or None, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(
                column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold"
            )
        for row in rows:
            table.add_row(*row)
        self._out.print(table)

    def note(self, text: str) -> None:
        """Say something that is no data."""
        if not self.quiet:
            self._err.print(_plain(text))

    def reading(self, model: str) -> None:
        """Say where the model is looked for, as a mistyped folder looks like a Hub id."""
        found = Path(model).is_dir()
        self.note(f"Reading {model}" if found else f"No folder {model} here; asking the Hub for it")

    def error(
        self, message: str, hint: str, exit_code: int, details: Mapping[str, object] | None = None
    ) -> None:
        """Say what went wrong and what would work, in words or as the JSON document too."""
        self._err.print("error:", style="bold red", end=" ")
        self._err.print(_plain(message))
        if hint:
            self._err.print(_plain(f"hint: {hint}"))
        error: dict[str, object] = {"message": message, "hint": hint, "exit_code": exit_code}
        self.document({"error": error | dict(details or {})})

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """A bar per stage, with the time left; where no terminal is, a line now and then.

        The bars start with the first stage: what comes before it, such as a download, may have
        bars of its own.
        """
        stages: dict[str, TaskID] = {}
        live = self._err.is_terminal and not self._err.is_dumb_terminal and not self.quiet
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        bars = Progress(*columns, console=self._err, disable=not live)
        starts: dict[str, tuple[float, int]] = {}
        last_line = 0.0

        def report(stage: str, done: int, total: int) -> None:
            nonlocal last_line
            now, line = time.monotonic(), ""
            if stage not in stages:
                bars.start()
                stages[stage] = bars.add_task(stage, total=total)
                starts[stage] = now, done
                line = f"{stage} ..."
            elif now - last_line > _LINE_SECONDS:
                start, first = starts[stage]
                left = (now - start) / max(done - first, 1) * (total - done)
                line = f"{stage} {done / max(total, 1):.0%}, {timedelta(seconds=round(left))} left"
            if line and not live:
                last_line = now
                self.note(line)
            bars.update(stages[stage], completed=done, total=total)

        try:
            yield report
        finally:
            bars.stop()


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise TerminatedError


def _rich(*, stderr: bool, width: int | None = None) -> RichConsole:
    """A console that prints text as it is, and without any style under NO_COLOR."""
    return RichConsole(
        stderr=stderr,
        width=width,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
    )


def _plain(text: str) -> str:
    """Text without the control characters that a file name or a model may bring along."""
    return text.translate(_CONTROLS)
