"""Write a copy of a checkpoint with some tensors changed, whole or not at all.

    with CheckpointWriter(checkpoint, output, patches=patches, plan=plan) as writer:
        if not writer.committed:
            writer.copy()
            writer.add_file("config.json", new_config)
            writer.add_file("manifest.json", manifest_of(writer.files, writer.tensors))
            writer.commit()

The source is only read, and nothing stands at the output before `commit`. A run that dies leaves
`<output>.incomplete`; the next one with the same plan goes on with what was finished there.
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from kvarn_cli.checkpoint.checkpoint import Checkpoint
from kvarn_cli.checkpoint.disk_space import FULL, can_clone, check_space, disk_full
from kvarn_cli.checkpoint.new_file import NewFile
from kvarn_cli.checkpoint.output_folder import existing_parent
from kvarn_cli.checkpoint.ranked_threads import ranked
from kvarn_cli.checkpoint.safetensors_header import read_header
from kvarn_cli.checkpoint.shard_stream import WrittenShard, plan_shard, write_shard
from kvarn_cli.checkpoint.staging import Staging
from kvarn_cli.checkpoint.tensor_changes import Patch, Workers
from kvarn_cli.errors import CheckpointError, KvarnError
from kvarn_cli.metadata import FileRecord

_MOST_SHARDS_AT_ONCE = 4
_AHEAD_BYTES = 32 << 20
_METADATA_BYTES = 1 << 20


class CheckpointWriter:
    """Builds the output in `<output>.incomplete`.

    Leaving the context removes that folder when the work was refused or had finished nothing;
    after an interrupt, a full disk or any other accident it stays, to be continued.

    Args:
        checkpoint: the source.
        output: the folder to make.
        patches: what changes, by the name of the tensor.
        plan: JSON-ready; what else decides the result, by name. Only a run with an equal plan and
            an unchanged source is continued.
        overwrite: let it replace an earlier checkpoint, once the new one is whole, and give up
            the unfinished work of another plan.
        progress: told, again and again, how many of `checkpoint.shard_bytes` are done.

    Attributes:
        files: size and hash of every file written so far, by relative path.
        tensors: SHA-256 of the patched tensors written so far, by name.

    Raises:
        UsageError: on entering the context, as `check_output`; another run works there; or it
            holds the unfinished work of another plan.
        DiskFullError: from any method, and on entering; the disk has no room.
        KvarnError: from any method, the disk did not take what was written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: Path,
        *,
        patches: Mapping[str, Patch],
        plan: Mapping[str, Any],
        overwrite: bool = False,
        progress: Callable[[int], None] = lambda bytes_done: None,
    ) -> None:
        names = {name for header in checkpoint.shards.values() for name in header.tensors}
        if unknown := patches.keys() - names:
            raise ValueError(f"there are no such tensors to patch: {sorted(unknown)}")
        self.files: dict[str, FileRecord] = {}
        self.tensors: dict[str, str] = {}
        self._checkpoint = checkpoint
        self._output = output
        self._patches = patches
        self._shards = {
            name: plan_shard(header, patches) for name, header in checkpoint.shards.items()
        }
        self._sources = {
            name: self._stamp(name) for name in [*checkpoint.shards, *map(str, checkpoint.sidecars)]
        }
        self._plan = json.loads(json.dumps({**plan, "source": self._sources}))
        self._overwrite = overwrite
        self._progress = progress
        self._shares_blocks = False
        self._done_bytes = 0
        self._progress_lock = threading.Lock()
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        with self._disk_errors():
            self._staging = Staging(
                self._checkpoint.folder, self._output, plan=self._plan, overwrite=self._overwrite
            )
        if self.committed:
            return self
        try:
            with self._disk_errors():
                self._staging.drop_unfinished(self._sources)
                for name, written in self._staging.journal.files.items():
                    self._record(name, written)
                    if name in self._shards:
                        self._advance(self._checkpoint.shards[name].file_bytes)
                some_shard = self._checkpoint.folder / next(iter(self._shards))
                self._shares_blocks = can_clone(some_shard, self._staging.work.path)
                check_space(self._staging.work.path, self._bytes_to_write())
        except BaseException as error:
            self._staging.leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._staging.leave(error)

    @property
    def committed(self) -> bool:
        """Whether the output stands, this run's or one's that was killed right after."""
        return self._staging.committed

    @property
    def folder(self) -> Path:
        """Where the files lie, before and after `commit`."""
        return self._staging.folder

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors after the patches."""
        return sum(plan.tensor_bytes for plan in self._shards.values())

    @property
    def notes(self) -> Mapping[str, Any]:
        """What `note` kept, in this run or in the one that it continues."""
        return self._staging.journal.notes

    def note(self, name: str, value: Any) -> None:
        """Keep a JSON-ready value for the run that may have to continue this one."""
        with self._disk_errors():
            self._staging.journal.note(name, value)

    def copy(self, *, without: Collection[str] = ()) -> None:
        """Copy every file of the checkpoint that is not finished, with the patches applied.

        Args:
            without: sidecars that `add_file` will write.

        Raises:
            CheckpointError: a source file was cut short or changed since it was opened.
        """
        with self._disk_errors():
            try:
                for sidecar in map(str, self._checkpoint.sidecars):
                    if sidecar not in without and sidecar not in self.files:
                        self._copy_sidecar(sidecar)
                self._write_shards()
            except OSError:
                self._staging.remove_unlisted()  # a full disk has better use for half a shard
                raise

    def add_file(self, name: str, content: bytes) -> None:
        """Write one file that is not the source's own.

        Args:
            name: path relative to the output.
            content: the whole file.
        """
        with self._disk_errors(), self._new_file(name) as target:
            target.write(content)
        self.files[name] = _small_record(content)

    def commit(self) -> None:
        """Put the finished folder in its place; the old one, if any, is removed after that.

        Raises:
            UsageError: something else stands there by now.
            KvarnError: the new folder stands, but the old one could not be removed.
        """
        with self._disk_errors():
            self._staging.commit()

    def _write_shards(self) -> None:
        largest_first = sorted(
            (name for name in self._shards if name not in self.files),
            key=lambda name: -self._shards[name].size_bytes,
        )
        at_once = max(min(_MOST_SHARDS_AT_ONCE, len(largest_first)), 1)
        cores = min(os.cpu_count() or 1, _MOST_SHARDS_AT_ONCE)
        with ThreadPoolExecutor(cores) as threads, ThreadPoolExecutor(at_once) as pool:
            ranks = ranked(threads, len(largest_first))
            ahead_bytes = _AHEAD_BYTES // at_once
            futures = [
                pool.submit(self._write_shard, name, Workers(rank, ahead_bytes))
                for name, rank in zip(largest_first, ranks, strict=True)
            ]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)

    def _write_shard(self, name: str, workers: Workers) -> None:
        plan = self._shards[name]
        with self._source(name) as source, self._new_file(name) as target:
            written = write_shard(source, target, plan, self._patches, self._advance, workers)
        header = read_header(self.folder / name)
        names = list(plan.source.tensors)
        if header.file_bytes != plan.size_bytes or list(header.tensors) != names:
            raise KvarnError(f"{self.folder / name} does not read back as written")
        self._finish(name, written)

    def _copy_sidecar(self, name: str) -> None:
        digest = hashlib.sha256()
        with self._source(name) as source, self._new_file(name) as target:
            size = os.fstat(source.fileno()).st_size
            with NewFile(target, digest) as file:
                file.copy(source, 0, size, lambda count: None)
        record = FileRecord(size_bytes=size, sha256=digest.hexdigest())
        self._finish(name, WrittenShard(record, {}))

    def _finish(self, name: str, written: WrittenShard) -> None:
        if self._stamp(name) != self._sources[name]:
            raise CheckpointError(f"{self._checkpoint.folder / name} changed while it was read")
        self._staging.journal.finish_file(name, written)
        self._record(name, written)

    def _record(self, name: str, written: WrittenShard) -> None:
        self.files[name] = written.record
        self.tensors.update(written.tensors)

    def _stamp(self, name: str) -> list[int]:
        """Size and time of a source file: what tells that it was changed."""
        try:
            status = (self._checkpoint.folder / name).stat()
        except OSError as error:
            path = self._checkpoint.folder / name
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        return [status.st_size, status.st_mtime_ns]

    def _source(self, name: str) -> BinaryIO:
        return (self._checkpoint.folder / name).open("rb", buffering=0)

    @contextlib.contextmanager
    def _new_file(self, name: str) -> Iterator[BinaryIO]:
        """A file that did not exist, nor a link of its name; on the disk at the end."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())

    def _advance(self, count: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        with self._progress_lock:
            self._done_bytes += count
            self._progress(self._done_bytes)

    def _bytes_to_write(self) -> int:
        """Of what is not finished; shared blocks take no room where the disk can share them."""
        sizes = {name: self._shards[name].size_bytes for name in self._shards}
        if self._shares_blocks:
            for name, plan in self._shards.items():
                if plan.header is None:
                    changed = self._patches.keys() & plan.tensors.keys()
                    sizes[name] = sum(plan.tensors[tensor].size_bytes for tensor in changed)
        sizes |= {name: stamp[0] for name, stamp in self._sources.items() if name not in sizes}
        unfinished = sum(size for name, size in sizes.items() if name not in self.files)
        return unfinished + _METADATA_BYTES

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                reason = error.strerror or "no space left"
                raise disk_full(
                    existing_parent(self._output), self._bytes_to_write(), reason
                ) from error
            raise KvarnError(
                f"cannot write {self._output}: {error.strerror}",
                hint="run the same command again to continue, or name another --output",
            ) from error


class _StoppedError(Exception):
    """Ends a worker whose result nobody waits for."""


def _small_record(content: bytes) -> FileRecord:
    return FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
