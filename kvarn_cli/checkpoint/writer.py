"""Write a copy of a checkpoint with some tensors changed, whole or not at all.

    with CheckpointWriter(checkpoint, output) as writer:
        writer.copy(patches)
        writer.add_file("config.json", new_config)
        writer.add_file("manifest.json", manifest_of(writer.files))
        writer.commit()

The source is only read, and nothing stands at the output before `commit`.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from kvarn_cli.checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from kvarn_cli.checkpoint.file_copy import append_rest, sync_folder
from kvarn_cli.checkpoint.output_folder import check_output, make_staging_folder, move_into_place
from kvarn_cli.checkpoint.safetensors_header import Header, TensorInfo, encode_header, read_header
from kvarn_cli.errors import KvarnError
from kvarn_cli.metadata import FileRecord

Patch = Callable[[bytearray, TensorInfo], bytes | bytearray | memoryview]
"""From a tensor's bytes and description to as many new bytes."""

_HASH_CHUNK_BYTES = 4 * 2**20


class CheckpointWriter:
    """Builds the output in `<output>.incomplete`; leaving the context removes what is uncommitted.

    Args:
        checkpoint: the source.
        output: the folder to make.
        overwrite: let it replace an earlier checkpoint, once the new one is whole.
        progress: told, again and again, how many of `checkpoint.shard_bytes` are done; a byte
            counts half when it is copied and half when it is hashed.

    Attributes:
        folder: where the files lie between entering the context and `commit`.
        files: size and SHA-256 of every file written so far, by relative path.

    Raises:
        UsageError: on entering the context, as `check_output` and `make_staging_folder` do.
        KvarnError: from any method, the disk did not take what was written.
    """

    folder: Path

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: Path,
        *,
        overwrite: bool = False,
        progress: Callable[[int], None] = lambda bytes_done: None,
    ) -> None:
        self.files: dict[str, FileRecord] = {}
        self._checkpoint = checkpoint
        self._output = output
        self._overwrite = overwrite
        self._progress = progress
        self._handled_bytes = 0
        self._new_parents: list[Path] = []

    def __enter__(self) -> Self:
        self._output = self._check_output()
        self._new_parents = [folder for folder in self._output.parents if not folder.exists()]
        with self._disk_errors():
            self.folder = make_staging_folder(self._output)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for parent in self._new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()

    def copy(self, patches: Mapping[str, Patch]) -> None:
        """Copy every sidecar and shard, and put the patched tensors into the copies.

        All other bytes stay as they are, except that a shard whose metadata names no `format`
        gets a header that names `pt`: transformers before version 5 refuses a file without it.

        Args:
            patches: by name of the tensor; any tensor of the weight map.

        Raises:
            CheckpointError: a shard changed while it was read.
            ValueError: a patch is for an unknown tensor, or changes a tensor's size.
        """
        if unknown := patches.keys() - self._checkpoint.weight_map.keys():
            raise ValueError(f"there are no such tensors to patch: {sorted(unknown)}")
        config_first = sorted(self._checkpoint.sidecars, key=lambda path: str(path) != CONFIG_NAME)
        with self._disk_errors():
            for sidecar in map(str, config_first):
                with self._source(sidecar) as source, self._new_file(sidecar) as target:
                    shutil.copyfileobj(source, target)
            for shard, header in self._checkpoint.shards.items():
                self._copy_shard(shard, header, patches)

    def add_file(self, name: str, content: bytes) -> None:
        """Write one file, in place of a copied one of the same name.

        Args:
            name: path relative to the output.
            content: the whole file.
        """
        with self._disk_errors():
            (self.folder / name).unlink(missing_ok=True)
            with self._new_file(name) as target:
                target.write(content)

    def commit(self) -> None:
        """Put the finished folder in its place; the old one, if any, is removed after that.

        Raises:
            UsageError: something else stands there by now.
        """
        self._check_output()
        with self._disk_errors():
            for folder, _, _ in os.walk(self.folder):
                sync_folder(Path(folder))
            move_into_place(self.folder, self._output)

    def _copy_shard(self, shard: str, header: Header, patches: Mapping[str, Patch]) -> None:
        new_header, copied_from = b"", 0
        if "format" not in header.metadata:
            new_header = encode_header({**header.metadata, "format": "pt"}, header)
            copied_from = header.data_start
        with self._source(shard) as source, self._new_file(shard, self._advance) as target:
            target.write(new_header)
            append_rest(source, target, copied_from, header.file_bytes, self._advance)
            for name, info in header.tensors.items():
                if name not in patches:
                    continue
                data = patches[name](self._checkpoint.read(name), info)
                if memoryview(data).nbytes != info.size_bytes:
                    raise ValueError(f"the patch changes the size of tensor {name}")
                target.seek(info.start - copied_from + len(new_header))
                target.write(data)
        if _layout(read_header(self.folder / shard)) != _layout(header):
            raise KvarnError(f"{self.folder / shard} does not read back as it was written")

    def _source(self, name: str) -> BinaryIO:
        return (self._checkpoint.folder / name).open("rb")

    @contextlib.contextmanager
    def _new_file(
        self, name: str, advance: Callable[[int], None] = lambda count: None
    ) -> Iterator[BinaryIO]:
        """A file that did not exist, nor a link of its name; synced and recorded at the end."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
                advance(len(chunk))
        self.files[name] = FileRecord(size_bytes=path.stat().st_size, sha256=digest.hexdigest())

    def _advance(self, count: int) -> None:
        self._handled_bytes += count
        self._progress(self._handled_bytes // 2)

    def _check_output(self) -> Path:
        return check_output(self._checkpoint.folder, self._output, overwrite=self._overwrite)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise KvarnError(
                f"cannot write {self._output}: {error.strerror}",
                hint="nothing is left of it; run it again, or name another --output",
            ) from error


def _layout(header: Header) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [
        (name, info.dtype, info.shape, info.start - header.data_start)
        for name, info in header.tensors.items()
    ]
