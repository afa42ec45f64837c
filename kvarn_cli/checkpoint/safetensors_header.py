"""The header of a safetensors file: read with every claim checked, and encoded.

A file is an 8-byte little-endian header length, the header (a JSON object from tensor name to
dtype, shape and byte range, padded with spaces) and the tensors' bytes without gap or overlap.
Only the header is ever read here.

Source: the safetensors format description, and its limits as in the reference implementation.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn_cli.checkpoint.strict_json import MAX_JSON_BYTES, parse_object, quoted
from kvarn_cli.errors import CheckpointError

LENGTH_BYTES = 8
DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
}

_METADATA_KEY = "__metadata__"
_MAX_COUNT = 2**63


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file.

    Attributes:
        dtype: the format's own name, e.g. `BF16`.
        shape: sizes of the dimensions; empty for a scalar.
        start: offset of the first byte from the start of the file.
        end: offset behind the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of itself.

    Attributes:
        metadata: the file's own strings; empty when they are missing or null.
        tensors: in the order of the header, which need not be the order of the bytes.
        data_start: offset of the first byte behind the header.
        file_bytes: size of the whole file.
        sha256: of the header's text.
    """

    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    data_start: int
    file_bytes: int
    sha256: str = ""


def read_header(path: Path) -> Header:
    """Read and check the header of one file.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is broken; the
            message names the file and, where one is at fault, the tensor.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing or no regular file")
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(LENGTH_BYTES)
            text = file.read(header_bytes_of(start, file_bytes, str(path)))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return parse_header(text, file_bytes, str(path))


def header_bytes_of(start: bytes, file_bytes: int, where: str) -> int:
    """The length of a header, from the first bytes of its file.

    Raises:
        CheckpointError: the file is too short, or the length cannot be meant.
    """
    header_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
    if header_bytes > MAX_JSON_BYTES or LENGTH_BYTES + header_bytes > file_bytes:
        raise CheckpointError(
            f"{where} claims a header of {header_bytes} bytes, but has {file_bytes} bytes "
            f"and a header may have {MAX_JSON_BYTES}",
            hint="the file is no safetensors file, or its download was cut short",
        )
    return header_bytes


def parse_header(text: bytes, file_bytes: int, where: str) -> Header:
    """Check a header's text against the size of its file.

    Args:
        text: the whole header, without its length.
        file_bytes: size of the file.
        where: what errors call the file.

    Raises:
        CheckpointError: the header is broken.
    """
    document = parse_object(text, f"the header of {where}")
    data_start = LENGTH_BYTES + len(text)
    metadata = _read_metadata(document.pop(_METADATA_KEY, None), where)
    tensors = {
        name: _read_tensor(entry, data_start, f"{where}: tensor {quoted(name)}")
        for name, entry in document.items()
    }
    sha256 = hashlib.sha256(text).hexdigest()
    header = Header(metadata, tensors, data_start, file_bytes, sha256)
    _check_ranges(header, where)
    return header


def encode_header(metadata: Mapping[str, str], header: Header) -> bytes:
    """The length and header of a file with other metadata, and tensors as in `header`.

    The tensors' bytes follow it in the same order and without change.
    """
    entries: dict[str, object] = {_METADATA_KEY: dict(metadata)}
    for name, info in header.tensors.items():
        offsets = [info.start - header.data_start, info.end - header.data_start]
        entries[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _read_metadata(metadata: Any, where: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{where}: {_METADATA_KEY} must be an object or null")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointError(f"{where}: {_METADATA_KEY} entry {quoted(key)} must be a string")
    return metadata


def _read_tensor(entry: Any, data_start: int, where: str) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} must be described by an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        said = quoted(dtype) if isinstance(dtype, str) else "none at all"
        raise CheckpointError(f"{where} has an unknown dtype: {said}")
    shape = _read_counts(entry.get("shape"), f"{where}: shape")
    offsets = _read_counts(entry.get("data_offsets"), f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be two numbers in ascending order")
    begin, end = offsets
    needed_bits = _element_count(shape, where) * DTYPE_BITS[dtype]
    if needed_bits != (end - begin) * 8:
        raise CheckpointError(
            f"{where}: its {dtype} elements take {needed_bits} bits, "
            f"but its data_offsets span {(end - begin) * 8}"
        )
    return TensorInfo(dtype, shape, data_start + begin, data_start + end)


def _read_counts(counts: Any, where: str) -> tuple[int, ...]:
    if not isinstance(counts, list):
        raise CheckpointError(f"{where} must be a list")
    for count in counts:
        if type(count) is not int or not 0 <= count < _MAX_COUNT:
            raise CheckpointError(f"{where} must hold whole numbers from 0 to 2^63 - 1")
    return tuple(counts)


def _element_count(shape: tuple[int, ...], where: str) -> int:
    elements = 1
    for size in shape:
        elements *= size
        if elements >= _MAX_COUNT:
            raise CheckpointError(f"{where}: its shape has too many elements for any file")
    return elements


def _check_ranges(header: Header, where: str) -> None:
    """Refuse byte ranges that overlap, leave gaps, or do not end where the file ends."""
    position = header.data_start
    by_range = sorted(header.tensors.items(), key=lambda item: (item[1].start, item[1].end))
    for name, info in by_range:
        if info.start != position:
            problem = "overlaps the bytes of" if info.start < position else "leaves a gap behind"
            raise CheckpointError(f"{where}: tensor {quoted(name)} {problem} the tensor before it")
        if info.end > header.file_bytes:
            raise CheckpointError(
                f"{where}: tensor {quoted(name)} ends at byte {info.end}, "
                f"but the file ends at {header.file_bytes}",
                hint="the file is truncated; download it again",
            )
        position = info.end
    if position != header.file_bytes:
        raise CheckpointError(
            f"{where} has {header.file_bytes - position} bytes that belong to no tensor"
        )
