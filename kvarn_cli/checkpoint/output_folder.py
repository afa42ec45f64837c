"""Where a converted folder may stand, and how it gets there in one step.

A run works in `<output>.incomplete` beside the output and renames it at its end, so that nothing
at the output ever looks finished when it is not.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME
from kvarn_cli.checkpoint.file_copy import sync_folder
from kvarn_cli.errors import KvarnError, UsageError


def check_output(source_folder: Path, output: Path, *, overwrite: bool) -> Path:
    """Refuse an output folder that cannot be written, or that would destroy something.

    Args:
        source_folder: the model that is read.
        output: the folder to write; missing parents are fine.
        overwrite: allow an earlier checkpoint to stand there.

    Returns:
        The output with all symbolic links resolved.

    Raises:
        UsageError: the output is a file; is, holds or lies in the model's folder; is not empty
            and no checkpoint to overwrite; or nothing can be written there.
    """
    try:
        source = source_folder.resolve()
        resolved = Path(os.path.realpath(output))
        for folder in (resolved, staging_folder(resolved)):
            if _lies_in(folder, source) or _lies_in(source, folder):
                raise UsageError(
                    f"the output {folder} and the model {source} lie in one another",
                    hint="name an --output outside the model's folder",
                )
        _check_parent(resolved)
        if resolved.exists():
            _check_present(resolved, overwrite=overwrite)
    except OSError as error:
        raise UsageError(f"cannot write to {output}: {error.strerror}") from error
    return resolved


def staging_folder(output: Path) -> Path:
    """The sibling in which the output is built."""
    return output.parent / f"{output.name}.incomplete"


def make_staging_folder(output: Path) -> Path:
    """Make an empty staging folder, in place of one that a killed run left behind.

    Raises:
        UsageError: something else has its name.
        OSError: it cannot be made.
    """
    staging = staging_folder(output)
    if staging.is_symlink() or staging.exists():
        if staging.is_symlink() or not staging.is_dir() or not _was_left_behind(staging):
            raise UsageError(
                f"{staging} stands in the way and was not left behind by an earlier run",
                hint="move it elsewhere, or name another --output",
            )
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def move_into_place(staging: Path, output: Path) -> None:
    """Rename the finished folder to the output; only then remove what stood there.

    Raises:
        KvarnError: the new folder stands, but the old one could not be removed.
        OSError: the renaming failed; the old folder stands where it stood.
    """
    if not _has_content(output):
        staging.replace(output)
        sync_folder(output.parent)
        return
    shelter = Path(tempfile.mkdtemp(prefix=f"{output.name}.replaced-", dir=output.parent))
    old = shelter / output.name
    try:
        output.replace(old)
        try:
            staging.replace(output)
        except BaseException:
            old.replace(output)
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            shelter.rmdir()
        raise
    sync_folder(output.parent)
    try:
        shutil.rmtree(shelter)
    except OSError as error:
        raise KvarnError(
            f"{output} is written, but the folder it replaces could not be removed: "
            f"{error.strerror}",
            hint=f"remove {shelter} yourself",
        ) from error


def _check_parent(output: Path) -> None:
    parent = next(folder for folder in output.parents if folder.exists())
    if not parent.is_dir():
        raise UsageError(f"cannot write to {output}: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {output}: {parent} is not writable")


def _check_present(output: Path, *, overwrite: bool) -> None:
    if not output.is_dir():
        raise UsageError(f"the output {output} is a file", hint="name a folder")
    if output.is_mount() or _lies_in(Path.cwd(), output):
        raise UsageError(
            f"the output {output} is in use, as a mount point or the current folder",
            hint="name a new folder in it",
        )
    if not _has_content(output):
        return
    if not overwrite:
        raise UsageError(
            f"the output {output} is not empty", hint="name another folder, or pass --overwrite"
        )
    if not (output / CONFIG_NAME).exists() or not any(output.glob("*.safetensors")):
        raise UsageError(
            f"the output {output} holds no checkpoint, so it is not overwritten",
            hint="name another folder, or empty this one yourself",
        )


def _was_left_behind(staging: Path) -> bool:
    """A run writes the configuration first, so its folder holds one or nothing."""
    return (staging / CONFIG_NAME).exists() or not _has_content(staging)


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _lies_in(inner: Path, outer: Path) -> bool:
    """Whether `inner` is `outer` or below it, on any file system's terms."""
    return outer.exists() and any(
        folder.exists() and folder.samefile(outer) for folder in (inner, *inner.parents)
    )
