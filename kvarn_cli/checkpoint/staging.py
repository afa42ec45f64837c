"""One run's hold on `<output>.incomplete`: lock it, continue or start over, keep or remove it."""

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvarn_cli.checkpoint.file_copy import sync_folder
from kvarn_cli.checkpoint.hashing import matches
from kvarn_cli.checkpoint.journal import Journal
from kvarn_cli.checkpoint.output_folder import (
    WorkFolder,
    check_before_work,
    check_output,
    check_place,
)
from kvarn_cli.errors import (
    CheckpointError,
    KvarnError,
    ThresholdError,
    UnsupportedModelError,
    UsageError,
)

_REFUSALS = (CheckpointError, UnsupportedModelError, ThresholdError)


class Staging:
    """A locked work folder.

    Args:
        source_folder: the model that is read.
        output: the folder to make.
        plan: JSON-ready; only unfinished work of an equal plan is continued.
        overwrite: replace an earlier checkpoint at the output, and give up other unfinished work.

    Attributes:
        output: with all links resolved.
        journal: open and locked.
        committed: whether the output stands, this run's or one's that was killed right after.

    Raises:
        UsageError: as `check_output`; another run works there; or the unfinished work has another
            plan. Whatever is there stays as it is.
        OSError: the folder cannot be made.
    """

    def __init__(
        self, source_folder: Path, output: Path, *, plan: Mapping[str, Any], overwrite: bool
    ) -> None:
        self._source_folder = source_folder
        self._overwrite = overwrite
        self.output = check_place(source_folder, output)
        self.work = WorkFolder(self.output)
        self.committed = False
        check_before_work(source_folder, self.output, overwrite=overwrite)
        self._new_parents = [folder for folder in self.output.parents if not folder.exists()]
        self.journal = self._open_journal()
        try:
            self._continue_or_start(plan)
        except BaseException:
            if self.journal.plan is None:
                self._remove_all()
            self.journal.close()
            raise

    @property
    def folder(self) -> Path:
        """Where the files lie, before and after the commit."""
        return self.output if self.committed else self.work.checkpoint

    def drop_unfinished(self, expected: Collection[str]) -> None:
        """Forget, and remove, every file that is not whole or not expected."""
        for name, written in list(self.journal.files.items()):
            if name not in expected or not matches(self.folder / name, written.record):
                self.journal.forget_file(name)
        self.remove_unlisted()

    def remove_unlisted(self) -> None:
        """Remove every file that the journal does not list as finished."""
        for parent, _, names in os.walk(self.folder):
            for path in (Path(parent, name) for name in names):
                if path.relative_to(self.folder).as_posix() not in self.journal.files:
                    path.unlink()

    def commit(self) -> None:
        """Put the folder in its place; the old one, if any, is removed after that.

        Raises:
            UsageError: something else stands there by now.
            KvarnError: the new folder stands, but the old one could not be removed.
            OSError: the renaming failed.
        """
        self._check_output()
        for folder, _, _ in os.walk(self.folder):
            sync_folder(Path(folder))
        self.journal.begin_commit()
        self.work.move_into_place()
        self._finish_commit()

    def leave(self, error: BaseException | None) -> None:
        """Let go of the folder.

        It is removed when nobody wants to go on with it: after a refusal, without an error, and
        when nothing is finished. After an accident it stays.
        """
        try:
            if not self.committed and (
                error is None
                or isinstance(error, _REFUSALS)
                or not (self.journal.files or self.journal.notes)
            ):
                self._remove_all()
        finally:
            self.journal.close()

    def _open_journal(self) -> Journal:
        while True:
            self.work.make()
            with contextlib.suppress(FileNotFoundError):  # a run that just ended took the folder
                return Journal.open(self.work.journal)

    def _continue_or_start(self, plan: Mapping[str, Any]) -> None:
        found = self.journal.plan
        if found == plan and self.journal.committing and self.work.finished:
            self._finish_commit()
            return
        self._check_output()
        if found is not None and found != plan and not self._overwrite:
            raise UsageError(
                f"{self.work.path} holds an unfinished conversion with another "
                f"{_differing(found, plan)}",
                hint="run that command again to finish it, pass --overwrite to start over, "
                "or name another --output",
            )
        if found != plan:
            self.work.empty()
            self.journal.start(plan)
        self.work.checkpoint.mkdir(exist_ok=True)
        sync_folder(self.work.path)
        sync_folder(self.output.parent)

    def _finish_commit(self) -> None:
        self.committed = True
        try:
            self.work.remove()
        except OSError as error:
            raise KvarnError(
                f"{self.output} is written, but {self.work.path} could not be removed: "
                f"{error.strerror}",
                hint="remove it yourself",
            ) from error

    def _remove_all(self) -> None:
        self.work.remove()
        for parent in self._new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()

    def _check_output(self) -> None:
        check_output(self._source_folder, self.output, overwrite=self._overwrite)


def _differing(found: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    keys = sorted({*found, *plan})
    return ", ".join(key for key in keys if found.get(key) != plan.get(key))
