"""The `kvarn` command."""

from typing import Annotated

import typer

from kvarn_cli import __version__
from kvarn_cli.cli.convert import convert
from kvarn_cli.cli.generate import generate
from kvarn_cli.cli.inspect_errors import inspect_errors
from kvarn_cli.cli.push_to_hub import push_to_hub

app = typer.Typer(
    name="kvarn",
    help="Convert checkpoints for the KVarN KV cache, prove it, and measure the error.",
    epilog="Exit codes: 0 done, 1 unexpected, 2 usage, 3 unsupported model, 4 Hub or network, "
    "5 a threshold was missed, 6 broken checkpoint, 130 interrupted.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("convert")(convert)
app.command("inspect-errors")(inspect_errors)
app.command("generate")(generate)
app.command("push-to-hub")(push_to_hub)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"kvarn {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
