"""The part of the Hugging Face Hub's protocol that kvarn uses, served on 127.0.0.1.

It keeps what is uploaded, byte for byte, records every request, and misbehaves on demand. Large
files go to "storage" under another host name (`localhost`), as the real Hub's go to a content
network: a request that carries a token there is refused, as signed URLs refuse it.

huggingface_hub reads its environment when it is imported, so code under test runs in a subprocess
with `FakeHub.environment(...)`.
"""

import os
import re
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
from hub_http import Fault, Request
from hub_protocol import READ_TOKEN, WRITE_TOKEN, HubHandler
from hub_repository import Repository, StoredFile

__all__ = ["READ_TOKEN", "WRITE_TOKEN", "FakeHub", "hub"]

_INITIAL_FILES = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


class FakeHub:
    """The server and its state; a context manager that serves while it is entered."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.card_warnings: list[str] = []
        self.page_size = 1000
        self.part_bytes = 1 << 40
        self.ignores_ranges = False
        self.sent_bytes = 0
        self.parts: dict[str, dict[int, bytes]] = {}
        self._faults: list[Fault] = []
        self.lock = threading.RLock()
        handler = type("Handler", (HubHandler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.storage = f"http://localhost:{self.port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, home: Path, token: str | None = WRITE_TOKEN) -> dict[str, str]:
        """The environment of a subprocess that takes this server for the Hub.

        Args:
            home: a fresh folder; it becomes HF_HOME.
            token: what HF_TOKEN holds, or None to be logged out.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "KVARN")) and "proxy" not in name.lower()
        }
        return kept | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            **({} if token is None else {"HF_TOKEN": token}),
        }

    def add_repository(
        self, repo_id: str, files: dict[str, bytes] | None = None, *, private: bool = False
    ) -> Repository:
        """Create a repository, with the initial commit the Hub makes and then one of `files`."""
        repository = self.repositories[repo_id] = Repository(private=private)
        tree = {path: StoredFile.at(path, content) for path, content in _INITIAL_FILES.items()}
        repository.commit("main", tree, "initial commit")
        if files:
            added = {path: StoredFile.at(path, content) for path, content in files.items()}
            repository.commit("main", tree | added, "files")
        return repository

    def fail(
        self,
        method: str,
        pattern: str,
        status: int | None,
        *,
        times: int = 1,
        message: str | bytes = "out of order",
        headers: dict[str, str] | None = None,
        after: bool = False,
    ) -> None:
        """Let matching requests fail.

        Args:
            method: HTTP method.
            pattern: regular expression searched in the path.
            status: of the answer, or None to hang up without one.
            times: how many requests fail.
            message: in the answer's JSON, or the whole answer where it is bytes.
            headers: of the answer.
            after: do the work first, so that only its answer is lost.
        """
        fault = Fault(method, pattern, times, status, message, headers or {}, after)
        self._faults.append(fault)

    def recover(self) -> None:
        """Let nothing fail any more."""
        self._faults.clear()

    def fault_for(self, request: Request) -> Fault | None:
        with self.lock:
            for fault in self._faults:
                if fault.takes(request):
                    fault.times -= 1
                    return fault
        return None

    def asked(self, method: str, pattern: str) -> list[Request]:
        """The recorded requests that match."""
        return [
            request
            for request in self.requests
            if request.method == method and re.search(pattern, request.path)
        ]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A running, empty Hub."""
    with FakeHub() as server:
        yield server
