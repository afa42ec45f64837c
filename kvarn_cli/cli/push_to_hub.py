"""`kvarn push-to-hub`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import Console

if TYPE_CHECKING:
    from kvarn_cli.hub import PushPlan, PushResult


def push_to_hub(
    folder: options.ConvertedFolder,
    repo_id: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Repository to create or update.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Only you and your organisation can see it.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch to commit to; else main.")
    ] = None,
    commit_message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="First line of the commit.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the folder, print plan and card, and stop.")
    ] = False,
    token: options.Token = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Publish a converted folder on the Hub.

    Its files are checked against its manifest first, and it gets an honest model card.
    """
    with Console(as_json=as_json, quiet=quiet) as console:
        from kvarn_cli.hub import plan_push, push

        with console.progress() as report:
            plan = plan_push(folder, repo_id, progress=report)
        for stray in plan.strays:
            console.note(f"not uploaded: {stray} is not in the manifest")
        if dry_run:
            _show_plan(console, plan)
            console.document(
                {
                    "repo_id": plan.repo_id,
                    "files": [
                        {"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256}
                        for file in plan.files
                    ],
                    "not_uploaded": list(plan.strays),
                    "card": plan.card.text,
                }
            )
            return
        result = push(
            plan,
            private=private,
            revision=revision,
            commit_message=commit_message,
            token=token,
            note=console.note,
        )
        _show_result(console, result)
        console.document(asdict(result))


def _show_plan(console: Console, plan: "PushPlan") -> None:
    console.result(f"{plan.repo_id}: {len(plan.files)} files, {plan.total_bytes:,} bytes")
    for file in plan.files:
        console.result(f"{file.size_bytes:>15,}  {file.path}")
    console.result(f"\n{plan.card.text}")


def _show_result(console: Console, result: "PushResult") -> None:
    visibility = "private" if result.private else "public"
    console.result(
        f"{result.url} ({visibility}), {result.revision} at {result.commit[:12]}: "
        f"{len(result.uploaded)} files uploaded, {len(result.unchanged)} there already"
    )
