"""`kvarn verify`."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import Console

if TYPE_CHECKING:
    from kvarn_cli.verification.folder import Check


def verify(
    folder: options.ConvertedFolder,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Folder or Hub id of the original: undo the rotation and compare every tensor.",
            show_default=False,
        ),
    ] = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check that a converted folder is whole and holds what its metadata says."""
    with Console(as_json=as_json, quiet=quiet) as console:
        from kvarn_cli.checkpoint.checkpoint import open_checkpoint
        from kvarn_cli.checkpoint.source import resolve_source
        from kvarn_cli.verification.folder import require_sound, verify_folder

        source = None
        if against is not None:
            source = resolve_source(against, revision=revision, token=token, cache_dir=cache_dir)
        with console.progress() as report:
            checks = verify_folder(folder, report=report)
            if source is not None and not any(check.problems for check in checks):
                from kvarn_cli.verification.against_source import verify_against

                original, converted = open_checkpoint(source.folder), open_checkpoint(folder)
                checks += verify_against(converted, original, report)
        _show(console, checks)
        require_sound(checks, folder)
        if source is None:
            console.note("Whether the rotation is in the weights: pass --against SOURCE")
        document = [
            {"name": check.name, "result": check.result, "problems": list(check.problems)}
            for check in checks
        ]
        console.document({"folder": str(folder), "sound": True, "checks": document})


def _show(console: Console, checks: "tuple[Check, ...]") -> None:
    for check in checks:
        console.result(f"{check.name:14} {'PROBLEM' if check.problems else check.result}")
        for problem in check.problems:
            console.result(f"{'':14} {problem}")
