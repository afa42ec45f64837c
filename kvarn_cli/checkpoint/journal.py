"""What a run has finished so far, so that the next one continues; and the lock of the run.

One JSON object a line, each on the disk before the next step: the plan, then finished files and
whatever else is worth keeping, at last the commit. A line that a crash cut short does not count.
The file itself is locked while a run uses it; the system releases the lock of a dead process.
"""

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from kvarn_cli.checkpoint.shard_stream import WrittenShard
from kvarn_cli.errors import UsageError
from kvarn_cli.metadata import FileRecord

_MAX_BYTES = 1 << 28


class Journal:
    """An open, locked journal.

    Attributes:
        plan: what the run is about, or None in a new journal.
        files: finished files, by path relative to the output.
        notes: what else is kept, by name.
        committing: whether everything was finished, and only the renaming may be left to do.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle
        self._lock = threading.Lock()
        self.plan: dict[str, Any] | None = None
        self.files: dict[str, WrittenShard] = {}
        self.notes: dict[str, Any] = {}
        self.committing = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or make a journal, and lock it.

        Raises:
            UsageError: another run that is alive has locked it.
            OSError: it cannot be opened.
        """
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), path.stat()):
                    break
            except FileNotFoundError:
                pass
            except BlockingIOError:
                os.close(handle)
                raise UsageError(
                    f"another conversion is writing {path.parent}",
                    hint="wait for it, or name another --output",
                ) from None
            os.close(handle)
        journal = cls(path, handle)
        journal._read()
        return journal

    def start(self, plan: Mapping[str, Any]) -> None:
        """Forget everything, and note another plan."""
        os.ftruncate(self._handle, 0)
        self._clear()
        self._append({"plan": plan})
        self.plan = dict(plan)

    def finish_file(self, name: str, written: WrittenShard) -> None:
        """Note that a file is whole and on the disk."""
        record = written.record.model_dump(exclude_none=True)
        self._append({"file": name, "record": record, "tensors": written.tensors})
        self.files[name] = written

    def forget_file(self, name: str) -> None:
        """Take back that a file is whole."""
        self._append({"file": name})
        del self.files[name]

    def note(self, name: str, value: Any) -> None:
        """Keep a JSON-ready value."""
        self._append({"note": name, "value": value})
        self.notes[name] = value

    def begin_commit(self) -> None:
        """Note that everything is finished."""
        self._append({"commit": True})
        self.committing = True

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._handle)

    def _clear(self) -> None:
        self.plan, self.committing = None, False
        self.files.clear()
        self.notes.clear()

    def _append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)

    def _read(self) -> None:
        content = os.pread(self._handle, _MAX_BYTES, 0)
        whole_lines = content[: content.rfind(b"\n") + 1]
        os.ftruncate(self._handle, len(whole_lines))
        try:
            for line in whole_lines.splitlines():
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError, RecursionError):
            self._clear()

    def _take(self, line: dict[str, Any]) -> None:
        if "plan" in line:
            self.plan = dict(line["plan"])
        elif "record" in line:
            record = FileRecord.model_validate(line["record"])
            self.files[line["file"]] = WrittenShard(record, dict(line["tensors"]))
        elif "file" in line:
            self.files.pop(line["file"])
        elif "note" in line:
            self.notes[line["note"]] = line["value"]
        elif "commit" in line:
            self.committing = True
        else:
            raise ValueError("an unknown line")
