"""The `kvarn` command."""

import gc
import io
import sys
from typing import Annotated

import typer

from kvarn_cli import __version__
from kvarn_cli.cli.console import Console
from kvarn_cli.cli.convert import convert
from kvarn_cli.cli.generate import generate
from kvarn_cli.cli.inspect_errors import inspect_errors
from kvarn_cli.cli.push_to_hub import push_to_hub
from kvarn_cli.cli.verify import verify
from kvarn_cli.errors import UsageError

app = typer.Typer(
    name="kvarn",
    help="Convert checkpoints for the KVarN KV cache, prove it, and measure the error.",
    epilog="Exit codes: 0 done, 1 unexpected, 2 usage, 3 unsupported model, 4 Hub or network, "
    "5 a threshold was missed, 6 broken checkpoint, 7 disk full, 130 interrupted, 143 terminated.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("convert")(convert)
app.command("verify")(verify)
app.command("inspect-errors")(inspect_errors)
app.command("generate")(generate)
app.command("push-to-hub")(push_to_hub)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"kvarn {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(UsageError.exit_code)


_GC_THRESHOLD = 10_000
"""New objects between two collections. With Python's own default they take a seventh of the time
that importing torch and transformers takes."""


def main() -> None:
    """Run the command line; a wrong option is told like every other error."""
    gc.set_threshold(_GC_THRESHOLD)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        exit_code = app(prog_name="kvarn", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kvarn"
        exit_code = UsageError.exit_code
        Console(as_json="--json" in sys.argv, quiet=False).error(
            error.format_message(), f"see {command} --help", exit_code
        )
    sys.exit(exit_code)
