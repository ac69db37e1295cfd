"""One GET of a small answer, over a connection of its own.

Responsibility: ask, and read an answer of a bounded size; whoever asks bounds the time.

Concurrency: one trio task per call.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

import httptools
import trio

from kvfs.errors import ConfigError
from kvfs.http.server_place import place_of
from kvfs.http.tls import client_context
from kvfs.limits import SESSION_CHUNK_BYTES


class GetFailed(Exception):
    """A server does not answer, or not with what was asked for; `status` is that of another answer than 200."""

    status: int | None = None


class _Answer:
    """Collect one response."""

    def __init__(self, most_bytes: int) -> None:
        self.body, self.is_done = bytearray(), False
        self._most_bytes = most_bytes

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self._most_bytes:
            raise GetFailed(f"more than {self._most_bytes} bytes of a body")

    def on_message_complete(self) -> None:
        self.is_done = True


async def get(url: str, most_bytes: int, headers: Sequence[str] = ()) -> bytes:
    """Return the body at a URL. Raises GetFailed, which says why."""
    try:
        return await _get(url, most_bytes, headers)
    except (OSError, trio.BrokenResourceError, ssl.SSLError, ValueError, ConfigError) as error:
        raise GetFailed(f"{type(error).__name__}: {error}") from None


async def _get(url: str, most_bytes: int, headers: Sequence[str]) -> bytes:
    parts, place = urlsplit(url), place_of(url)
    stream: trio.abc.Stream = await trio.open_tcp_stream(place.host, place.port)
    if place.secure:
        stream = trio.SSLStream(stream, client_context(), server_hostname=place.host, https_compatible=True)
    async with stream:
        lines = [
            f"GET {parts.path} HTTP/1.1",
            f"Host: {parts.netloc}",
            *headers,
            "Connection: close",
            "\r\n",
        ]
        await stream.send_all("\r\n".join(lines).encode("ascii"))
        return await _read(stream, most_bytes)


async def _read(stream: trio.abc.ReceiveStream, most_bytes: int) -> bytes:
    answer = _Answer(most_bytes)
    parser = httptools.HttpResponseParser(answer)
    received = 0
    while not answer.is_done:
        data = await stream.receive_some(SESSION_CHUNK_BYTES)
        if not data:
            break
        received += len(data)
        if received > 2 * most_bytes:
            raise GetFailed(f"more than {2 * most_bytes} bytes of an answer")
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # What a callback raises is the cause.
            raise GetFailed(str(error.__context__ or error)) from None
    if parser.get_status_code() != 200:
        failed = GetFailed(f"status {parser.get_status_code()}")
        failed.status = parser.get_status_code()
        raise failed
    return bytes(answer.body)
