"""Kills the writer at every point where it touches the disk, and continues each time.

    python kill_points.py MODEL FOLDER (new | overwrite)

A child is killed by SIGKILL before its n-th call of a function that changes the disk, for n = 1,
2, …, until one survives; of every write it may do half first. After each kill nothing may stand at
the output that differs from an undisturbed result (or from what stood there before), and the next
run must finish it, byte for byte. Prints how many points there were. Forks, so it needs a process
without threads of its own.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_files import FIRST, SECOND, contents, save_checkpoint, tensors

from kvarn_cli.checkpoint import new_file
from kvarn_cli.checkpoint.checkpoint import open_checkpoint
from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.checkpoint.tensor_changes import Patch
from kvarn_cli.checkpoint.writer import CheckpointWriter
from kvarn_cli.errors import UsageError

CHANGES_OF_THE_DISK = (
    *("write", "pwrite", "fsync", "ftruncate", "mkdir", "unlink", "rmdir", "replace", "open"),
)


def negate(data: bytearray, info: TensorInfo) -> bytes:
    return (-np.frombuffer(data, np.float16)).tobytes()


def write(model: Path, output: Path, overwrite: bool) -> None:
    patches = {"a.v_proj": Patch(negate), "b.v_proj": Patch(negate)}
    with CheckpointWriter(
        open_checkpoint(model), output, patches=patches, plan={"preset": 1}, overwrite=overwrite
    ) as writer:
        if writer.committed:
            return
        if "proof" not in writer.notes:
            writer.note("proof", 1)
        writer.copy(without={"config.json"})
        writer.add_file("config.json", b"{}")
        writer.commit()


def kill_at(point: int, halfway: bool) -> None:
    """Let this process be killed at its `point`-th change of the disk."""
    left = point

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if halfway and name in ("write", "pwrite"):
                    handle, data, *position = arguments
                    real(handle, memoryview(data)[: len(data) // 2], *position)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in CHANGES_OF_THE_DISK:
        setattr(os, name, counted(name, getattr(os, name)))


def run_child(action: Callable[[], None]) -> int:
    """Exit code of the action in a child; minus the signal's number where one killed it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except UsageError as error:
            sys.stderr.write(f"{error}\n")
            code = error.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(model: Path, folder: Path, overwrite: bool) -> None:
    new_file._BUFFER_BYTES = 128
    reference, output = folder / "reference", folder / "out"
    assert run_child(lambda: write(model, reference, False)) == 0
    expected, old = contents(reference), {}
    point = kills = 0
    while True:
        point += 1
        shutil.rmtree(output, ignore_errors=True)
        if overwrite:
            save_checkpoint(output, {FIRST: tensors("old"), SECOND: tensors("older")})
            old = contents(output)
        halfway = point % 2 == 1

        def die(point: int = point, halfway: bool = halfway) -> None:
            kill_at(point, halfway)
            write(model, output, overwrite)

        code = run_child(die)
        if code == 0:
            break
        assert code == -signal.SIGKILL, (point, code)
        kills += 1
        found = contents(output) if output.exists() else {}
        assert found in ({}, old, expected), (point, sorted(found))
        code = run_child(lambda: write(model, output, overwrite))
        assert code == 0 or (code == 2 and found == expected), (point, code)
        assert contents(output) == expected, point
        left = sorted(path.name for path in folder.iterdir())
        assert left == ["out", "reference"], left
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "overwrite")
