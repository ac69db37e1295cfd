"""Signed requests as bytes, and answers read from a plain socket: what no client library would send.

Responsibility: sign with botocore's own signer, write what the test wants, read one answer after the other.
Concurrency: one thread.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.gateway import ACCESS, REGION, SECRET, Gateway

UNSIGNED = "UNSIGNED-PAYLOAD"


@dataclass
class Response:
    """One answer."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def code(self) -> str:
        """Of an error document."""
        text = self.body.decode()
        return text.partition("<Code>")[2].partition("</Code>")[0]


def signed_head(
    gateway: Gateway,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    unsigned: Mapping[str, str] | None = None,
    body: bytes | None = b"",
    payload: str | None = None,
    access: str = ACCESS,
    secret: str = SECRET,
    host: str | None = None,
) -> bytes:
    """Request line and headers with the empty line. `payload`: what x-amz-content-sha256 says, else the SHA-256 of
    `body`. `unsigned` headers are added after signing; Content-Length comes from `body`, None: none."""
    host = host or f"{gateway.host}:{gateway.port}"
    said = payload or sha256(body or b"").hexdigest()
    request = AWSRequest(
        method, f"http://{host}{path}", headers={"x-amz-content-sha256": said, **(headers or {})}
    )
    request.context["payload_signing_enabled"] = True
    request.context["client_config"] = None
    _Signer(Credentials(access, secret), "s3", REGION, said).add_auth(request)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() != "host"]
    if body is not None and not any(name.lower() == "content-length" for name in request.headers):
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in (unsigned or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Signer(S3SigV4Auth):
    def __init__(self, credentials: Credentials, service: str, region: str, payload: str) -> None:
        super().__init__(credentials, service, region)
        self._payload = payload

    def payload(self, request: AWSRequest) -> str:
        return self._payload

    def _modify_request_before_signing(self, request: AWSRequest) -> None:
        said = request.headers["x-amz-content-sha256"]
        super()._modify_request_before_signing(request)
        del request.headers["x-amz-content-sha256"]
        request.headers["x-amz-content-sha256"] = said


class RawClient:
    """One connection."""

    def __init__(self, gateway: Gateway, *, timeout_s: float = 15.0) -> None:
        self.gateway = gateway
        self.socket = socket.create_connection((gateway.host, gateway.port), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, method: str, path: str, body: bytes = b"", **options: object) -> Response:
        """A signed request, sent in one piece."""
        head = signed_head(self.gateway, method, path, body=body, **options)  # type: ignore[arg-type]
        self.send(head + body)
        return self.response(head_only=method == "HEAD")

    def response(self, *, head_only: bool = False) -> Response:
        """The next answer, 100 Continue included. Raises EOFError where there is none."""
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if head_only or status in (100, 204, 304):
            length = 0
        while len(self._data) < length:
            self._more()
        body, self._data = self._data[:length], self._data[length:]
        return Response(status, headers, body)

    def _more(self) -> None:
        some = self.socket.recv(1 << 16)
        if not some:
            raise EOFError(f"the connection ended after {self._data[:200]!r}")
        self._data += some

    def at_end(self) -> bool:
        """Whether the gateway has closed the connection, and sent nothing more."""
        try:
            return self._data == b"" and self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()


@contextmanager
def raw_client(gateway: Gateway) -> Iterator[RawClient]:
    client = RawClient(gateway)
    try:
        yield client
    finally:
        client.close()
