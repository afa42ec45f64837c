"""What the fake Hub stores: repositories of commits of files."""

import hashlib
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Self

_LFS_SUFFIXES = {".safetensors", ".bin", ".gguf"}
_LFS_BYTES = 10_000_000


def git_blob_id(content: bytes) -> str:
    """The hash that git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str, size: int) -> bool:
    """Whether the Hub would keep such a file as a large one."""
    return size > 0 and (PurePosixPath(path).suffix in _LFS_SUFFIXES or size > _LFS_BYTES)


@dataclass(frozen=True)
class StoredFile:
    """One file of a commit."""

    content: bytes
    is_lfs: bool

    @classmethod
    def at(cls, path: str, content: bytes) -> Self:
        return cls(content, is_lfs(path, len(content)))

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob_id(self) -> str:
        """The hash git gives the blob: of the content, or of its LFS pointer."""
        return git_blob_id(self.pointer if self.is_lfs else self.content)

    @property
    def pointer(self) -> bytes:
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\n"
            f"size {len(self.content)}\n"
        ).encode()


@dataclass
class Repository:
    """Branches, each a list of commits, each a whole tree."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: dict[str, StoredFile], message: str) -> str:
        name = f"{branch} {len(self.commits)} {message}"
        commit = hashlib.sha1(name.encode()).hexdigest()
        self.commits[commit], self.branches[branch] = tree, commit
        self.messages.append(message)
        return commit

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch name or commit hash."""
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Content by path, as a clone of the branch would hold it."""
        commit = self.resolve(revision)
        assert commit is not None, revision
        return {path: file.content for path, file in self.commits[commit].items()}
