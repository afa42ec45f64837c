"""The one output sink, and the only user of rich: data on stdout, everything else on stderr."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvarn_cli.errors import KvarnError
from kvarn_cli.progress import Report

_PIPE_COLUMNS = 100


class Console:
    """What a command prints with.

    Args:
        as_json: print one JSON document on stdout and nothing else there.
        quiet: leave notes and progress out; results and errors stay.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._out = RichConsole(
            highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPE_COLUMNS
        )
        self._err = RichConsole(highlight=False, soft_wrap=True, stderr=True)

    def document(self, data: Mapping[str, object]) -> None:
        """Print the JSON document, when one was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def result(self, text: str = "", *, end: str = "\n") -> None:
        """Print a line of the result."""
        if not self.as_json:
            self._out.print(text, markup=False, end=end)

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
            self._err.print(text, markup=False)

    def error(self, error: KvarnError) -> None:
        """Say what went wrong and what would work."""
        self._err.print("error:", style="bold red", end=" ")
        self._err.print(str(error), markup=False)
        if error.hint:
            self._err.print(f"hint: {error.hint}", markup=False)

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """A bar per stage on a terminal, a line per stage elsewhere."""
        stages: dict[str, TaskID] = {}
        live = self._err.is_terminal and not self._err.is_dumb_terminal and not self.quiet
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._err, disable=not live) as bars:

            def report(stage: str, done: int, total: int) -> None:
                if stage not in stages:
                    stages[stage] = bars.add_task(stage, total=total)
                    if not live:
                        self.note(f"{stage} ...")
                bars.update(stages[stage], completed=done, total=total)

            yield report


@contextmanager
def console_session(*, as_json: bool, quiet: bool) -> Iterator[Console]:
    """Run a command's body: its errors become messages and exit codes."""
    if quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    console = Console(as_json=as_json, quiet=quiet)
    try:
        yield console
    except KvarnError as error:
        console.error(error)
        console.document(
            {
                "error": {"message": str(error), "hint": error.hint, "exit_code": error.exit_code}
                | error.details
            }
        )
        raise typer.Exit(error.exit_code) from None
