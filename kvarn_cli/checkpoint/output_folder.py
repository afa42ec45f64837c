"""Where a converted folder may stand, and how it gets there in one step.

A run works in `<output>.incomplete` beside the output: the journal, and below it the checkpoint,
which is renamed to the output when it is whole. So nothing at the output ever looks finished when
it is not, and a run that was killed can be continued.
"""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME
from kvarn_cli.checkpoint.file_copy import sync_folder
from kvarn_cli.errors import UsageError
from kvarn_cli.metadata import MANIFEST_NAME


def check_place(source_folder: Path, output: Path) -> Path:
    """Refuse a place where no output can be written, whatever stands there.

    Args:
        source_folder: the model that is read.
        output: the folder to write; missing parents are fine.

    Returns:
        The output with all symbolic links resolved.

    Raises:
        UsageError: the output is, holds or lies in the model's folder, or nothing can be written
            there.
    """
    try:
        source = source_folder.resolve()
        resolved = Path(os.path.realpath(output))
        for folder in (resolved, WorkFolder(resolved).path):
            if _lies_in(folder, source) or _lies_in(source, folder):
                raise UsageError(
                    f"the output {folder} and the model {source} lie in one another",
                    hint="name an --output outside the model's folder",
                )
        _check_parent(resolved)
    except OSError as error:
        raise UsageError(f"cannot write to {output}: {error.strerror}") from error
    return resolved


def check_output(source_folder: Path, output: Path, *, overwrite: bool) -> Path:
    """Refuse an output folder that cannot be written, or that would destroy something.

    Args:
        source_folder: the model that is read.
        output: the folder to write; missing parents are fine.
        overwrite: allow an earlier checkpoint to stand there.

    Returns:
        The output with all symbolic links resolved.

    Raises:
        UsageError: as `check_place`; or the output is a file, or is not empty and no checkpoint
            to overwrite.
    """
    resolved = check_place(source_folder, output)
    try:
        if resolved.exists():
            _check_present(resolved, overwrite=overwrite)
    except OSError as error:
        raise UsageError(f"cannot write to {output}: {error.strerror}") from error
    return resolved


def check_before_work(source_folder: Path, output: Path, *, overwrite: bool) -> None:
    """`check_output`, but what unfinished work will do with the output is left to that work."""
    work = WorkFolder(check_place(source_folder, output))
    if work.journal.is_file():
        return
    work.remove_if_empty()
    check_output(source_folder, output, overwrite=overwrite)


@dataclass(frozen=True)
class WorkFolder:
    """`<output>.incomplete`, the sibling in which the output is built.

    Attributes:
        output: the final folder, links resolved.
    """

    output: Path

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.output.parent / f"{self.output.name}.incomplete"

    @property
    def journal(self) -> Path:
        """The journal, which is also the lock."""
        return self.path / "journal.jsonl"

    @property
    def checkpoint(self) -> Path:
        """What becomes the output."""
        return self.path / "checkpoint"

    @property
    def replaced(self) -> Path:
        """What stood at the output, between its removal and its deletion."""
        return self.path / "replaced"

    @property
    def finished(self) -> bool:
        """Whether a run renamed its result, but was killed before it could clean up."""
        return not self.checkpoint.exists() and _has_content(self.output)

    def make(self) -> None:
        """Make the folder, unless an earlier run left it.

        Raises:
            UsageError: something else has its name.
            OSError: it cannot be made.
        """
        if self.path.is_symlink() or (self.path.exists() and not self._was_left_behind()):
            raise UsageError(
                f"{self.path} stands in the way and was not left behind by an earlier run",
                hint="move it elsewhere, or name another --output",
            )
        self.path.mkdir(parents=True, exist_ok=True)

    def empty(self) -> None:
        """Remove an earlier run's files; an old output that it had set aside comes back."""
        if self.replaced.exists() and not _has_content(self.output):
            self.replaced.replace(self.output)
        for leftover in (self.checkpoint, self.replaced):
            if leftover.exists():
                shutil.rmtree(leftover)

    def move_into_place(self) -> None:
        """Rename the finished checkpoint to the output, setting aside what stood there.

        Raises:
            OSError: the renaming failed; the old folder stands where it stood.
        """
        if _has_content(self.output):
            self.output.replace(self.replaced)
        try:
            self.checkpoint.replace(self.output)
        except OSError:
            if self.replaced.exists():
                self.replaced.replace(self.output)
            raise
        sync_folder(self.output.parent)

    def remove(self) -> None:
        """Remove the folder with all that it holds, the journal last."""
        self.empty()
        self.journal.unlink(missing_ok=True)
        self.path.rmdir()

    def remove_if_empty(self) -> None:
        """Remove what a run leaves that is killed at the very last, or right at the first."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _was_left_behind(self) -> bool:
        return self.path.is_dir() and (self.journal.is_file() or not _has_content(self.path))


def existing_parent(output: Path) -> Path:
    """The nearest folder above the output that stands: what tells on which disk it will lie."""
    return next(folder for folder in output.absolute().parents if folder.exists())


def _check_parent(output: Path) -> None:
    parent = existing_parent(output)
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
        converted = (output / MANIFEST_NAME).is_file()
        raise UsageError(
            f"the output {output} is not empty"
            + (": a converted checkpoint stands there" if converted else ""),
            hint="name another folder, or pass --overwrite"
            + ("; `kvarn verify` tells whether it is whole" if converted else ""),
        )
    if not (output / CONFIG_NAME).exists() or not any(output.glob("*.safetensors")):
        raise UsageError(
            f"the output {output} holds no checkpoint, so it is not overwritten",
            hint="name another folder, or empty this one yourself",
        )


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _lies_in(inner: Path, outer: Path) -> bool:
    """Whether `inner` is `outer` or below it, on any file system's terms."""
    return outer.exists() and any(
        folder.exists() and folder.samefile(outer) for folder in (inner, *inner.parents)
    )
