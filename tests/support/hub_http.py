"""Plain HTTP for the fake Hub: read a request, let it fail where it should, send an answer."""

import json
import re
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from fake_hub import FakeHub

_PIECE_BYTES = 1 << 16

Answer = tuple[int, object, dict[str, str]]
"""Status, a body of bytes or to be sent as JSON, headers."""


class Request(NamedTuple):
    """One request, as it arrived."""

    method: str
    path: str
    token: str | None
    body: bytes


@dataclass
class Fault:
    """Something that goes wrong with the next matching requests."""

    method: str
    pattern: str
    times: int
    status: int | None
    message: str | bytes
    headers: dict[str, str]
    after: bool

    def takes(self, request: Request) -> bool:
        return (
            self.times > 0
            and self.method == request.method
            and re.search(self.pattern, request.path) is not None
        )


class RefusedError(Exception):
    """A refusal, told as the Hub tells it: in the body and in headers."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message} | (
            {} if code is None else {"X-Error-Code": code}
        )


class _HangupError(Exception):
    pass


class HttpHandler(BaseHTTPRequestHandler):
    """One connection to the server."""

    hub: ClassVar["FakeHub"]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (_HangupError, ConnectionError):
            self.close_connection = True

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        request = Request(self.command, url.path, token, self._read_body())
        self.request_now = request
        self.hub.requests.append(request)
        fault = self.hub.fault_for(request)
        if fault is not None and not fault.after:
            self._fail(fault)
            return
        try:
            with self.hub.lock:
                answer = self.answer_to(request)
        except RefusedError as refusal:
            answer = refusal.status, {"error": refusal.message}, refusal.headers
        if fault is not None:
            self._fail(fault)
            return
        self._send(*answer)

    def _fail(self, fault: Fault) -> None:
        if fault.status is None:
            raise _HangupError
        body = fault.message if isinstance(fault.message, bytes) else {"error": fault.message}
        self._send(fault.status, body, fault.headers)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if not isinstance(body, bytes):
            self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(content), _PIECE_BYTES):
                self.wfile.write(content[start : start + _PIECE_BYTES])
                self.hub.sent_bytes += len(content[start : start + _PIECE_BYTES])

    def answer_to(self, request: Request) -> Answer:
        """What a healthy server says; under the server's lock.

        Raises:
            RefusedError: it says no.
        """
        raise NotImplementedError

    def body_json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.request_now.body)
        return content
