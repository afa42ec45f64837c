"""Headers of weight files on the Hub, read by range requests: a few kilobytes of each file."""

import re
from collections.abc import Sequence

import httpx2
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from kvarn_cli.checkpoint.hub_errors import hub_error
from kvarn_cli.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    Header,
    header_bytes_of,
    parse_header,
)
from kvarn_cli.errors import CheckpointError, HubError

MOST_SHARDS = 1000
_FIRST_BYTES = 64 << 10
_PIECE_BYTES = 16 << 10
_TOTAL = re.compile(r"bytes \d+-\d+/(?P<total>\d+)")


class RemoteHeaders:
    """Reads headers of one repository at one commit, with at most two requests a file.

    A server that ignores ranges sends the file from its start; it is hung up on as soon as the
    header has arrived.

    Args:
        repo_id: the repository.
        revision: its commit.
        token: Hub token, or None for the login.

    Attributes:
        requests: sent so far.
        received_bytes: read so far.
    """

    def __init__(self, repo_id: str, revision: str | None, token: str | None) -> None:
        self._repo_id, self._revision, self._token = repo_id, revision, token
        self.requests = 0
        self.received_bytes = 0

    def __call__(self, names: Sequence[str]) -> dict[str, Header]:
        """The headers of the named files.

        Raises:
            CheckpointError: there are too many files, or a header is broken.
            HubError: the Hub or the network did not deliver.
        """
        if len(names) > MOST_SHARDS:
            raise CheckpointError(
                f"{self._repo_id} has {len(names)} weight files; at most {MOST_SHARDS} are read "
                "from afar",
                hint="download it and name its folder",
            )
        try:
            return {name: self._header(name) for name in names}
        except (OSError, RuntimeError, httpx2.HTTPError) as error:
            action = f"cannot read the headers of {self._repo_id}"
            raise hub_error(error, action, token=self._token) from None

    def _header(self, name: str) -> Header:
        url = hf_hub_url(self._repo_id, name, revision=self._revision, endpoint=constants.ENDPOINT)
        where = f"{self._repo_id}/{name}"
        start, file_bytes = self._read(url, 0, _FIRST_BYTES)
        end = LENGTH_BYTES + header_bytes_of(start, file_bytes, where)
        if end > len(start):
            start += self._read(url, len(start), end)[0]
        return parse_header(start[LENGTH_BYTES:end], file_bytes, where)

    def _read(self, url: str, start: int, end: int) -> tuple[bytes, int]:
        """Bytes from `start` to `end`, fewer where the file ends before, and the file's size."""
        headers = build_hf_headers(token=self._token) | {
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        self.requests += 1
        data = bytearray()
        with http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            partial = response.status_code == httpx2.codes.PARTIAL_CONTENT
            first = 0 if partial else start
            for piece in response.iter_raw(_PIECE_BYTES):
                data += piece
                self.received_bytes += len(piece)
                if len(data) >= first + end - start:
                    break
            total = _TOTAL.fullmatch(response.headers.get("content-range", ""))
            said = total["total"] if total else response.headers.get("content-length", "")
        if not said.isdigit() or (partial and total is None):
            raise HubError(f"the Hub does not say how large {url.rsplit('/', 1)[-1]} is")
        return bytes(data[first : first + end - start]), int(said)
