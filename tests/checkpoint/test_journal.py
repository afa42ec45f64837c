import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn_cli.checkpoint.journal import Journal
from kvarn_cli.checkpoint.shard_stream import WrittenShard
from kvarn_cli.errors import UsageError
from kvarn_cli.metadata import FileRecord

WRITTEN = WrittenShard(FileRecord(size_bytes=3, xxh3_128="0" * 32), {"a.v_proj": "1" * 64})
PLAN = {"preset": "k4v2_g128", "source": {"model.safetensors": [1, 2]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def fill(path: Path) -> None:
    journal = Journal.open(path)
    journal.start(PLAN)
    journal.finish_file("a", WRITTEN)
    journal.note("proof", {"naïve": [1, None]})
    journal.finish_file("b", WRITTEN)
    journal.forget_file("a")
    journal.begin_commit()
    journal.close()


def test_remembers_what_was_done(path: Path) -> None:
    fill(path)
    journal = Journal.open(path)
    assert journal.plan == PLAN
    assert journal.files == {"b": WRITTEN}
    assert journal.notes == {"proof": {"naïve": [1, None]}}
    assert journal.committing
    journal.start({})
    journal.close()
    again = Journal.open(path)
    assert (again.plan, again.files, again.notes, again.committing) == ({}, {}, {}, False)
    again.close()


def test_a_journal_cut_at_any_byte_holds_the_whole_lines_before(path: Path) -> None:
    fill(path)
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        journal = Journal.open(path)
        lines = content[:cut].count(b"\n")
        assert (journal.plan == PLAN) == (lines >= 1)
        assert ("a" in journal.files) == (2 <= lines < 5)
        assert ("b" in journal.files) == (lines >= 4)
        journal.finish_file("c", WRITTEN)
        journal.close()
        journal = Journal.open(path)
        assert "c" in journal.files
        journal.close()


@pytest.mark.parametrize(
    "content", [b"\0" * 64 + b"\n", b"[]\n", b'{"record": {}, "file": 3}\n', b'{"plan": 3}\n']
)
def test_what_is_no_journal_counts_as_nothing(content: bytes, path: Path) -> None:
    path.write_bytes(b'{"plan": {"a": 1}}\n' + content)
    journal = Journal.open(path)
    assert journal.plan is None
    journal.close()


HOLD = """
import sys, time
from pathlib import Path
from kvarn_cli.checkpoint.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
journal.start({})
print("locked", flush=True)
time.sleep(60)
"""


def test_a_living_process_holds_the_lock_and_a_dead_one_does_not(path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(UsageError, match="another conversion is writing"):
            Journal.open(path)
        process.send_signal(signal.SIGKILL)
    journal = Journal.open(path)
    assert journal.plan == {}
    journal.close()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path.symlink_to(victim)
    with pytest.raises(OSError, match=os.strerror(40)):
        Journal.open(path)
    assert victim.read_text() == "mine"
