"""`kvarn_manifest.json`: the files of a converted folder, with sizes and hashes."""

from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kvarn_cli.metadata.base import FORMAT_VERSION, Block, read_block

MANIFEST_NAME = "kvarn_manifest.json"
MODEL_CARD_NAME = "README.md"

HashName = Literal["sha256", "xxh3_128"]
_SHA256: Final = r"^[0-9a-f]{64}$"


def _relative_path(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\\" in path:
        raise ValueError(f"{path!r} is no plain path inside the folder")
    return path


class FileRecord(Block):
    """Size and hash of one file: XXH3 for weights, hashed while they are copied, else SHA-256."""

    size_bytes: int = Field(ge=0)
    sha256: str | None = Field(default=None, pattern=_SHA256)
    xxh3_128: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")

    @model_validator(mode="after")
    def _has_one_hash(self) -> Self:
        if (self.sha256 is None) == (self.xxh3_128 is None):
            raise ValueError("a file has either sha256 or xxh3_128")
        return self

    @property
    def algorithm(self) -> HashName:
        """Which hash it is."""
        return "sha256" if self.xxh3_128 is None else "xxh3_128"

    @property
    def digest(self) -> str | None:
        """The hash's value, in hexadecimal."""
        return self.sha256 or self.xxh3_128


class Manifest(Block):
    """Every file of a converted folder but the manifest itself and the model card."""

    format_version: Literal[1] = FORMAT_VERSION
    kvarn_version: str
    files: dict[Annotated[str, AfterValidator(_relative_path)], FileRecord]
    tensors: dict[str, Annotated[str, Field(pattern=_SHA256)]] = Field(
        default={}, description="SHA-256 of the bytes of each rotated tensor, by name"
    )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read `kvarn_manifest.json`.

        Raises:
            CheckpointError: the manifest is broken or of an unknown format version.
        """
        return read_block(cls, text, MANIFEST_NAME)
