"""GETs of small answers, over a connection of their own or one that is kept.

Responsibility: ask, and read an answer of a bounded size; whoever asks bounds the time.

Concurrency: one trio task per call, and per kept connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import trio

from kvfs.errors import ConfigError
from kvfs.http.server_place import Place, place_of
from kvfs.http.tls import client_context
from kvfs.limits import SESSION_CHUNK_BYTES

_FAILURES = (OSError, trio.BrokenResourceError, ssl.SSLError, ValueError, ConfigError)


class GetFailed(Exception):
    """A server does not answer, or not with what was asked for; `status` is that of another answer than 200."""

    status: int | None = None


def _failed(error: Exception) -> GetFailed:
    says_nothing = isinstance(error, trio.BrokenResourceError)
    cause = (error.__cause__ if says_nothing else None) or error
    return GetFailed(f"{type(cause).__name__}: {cause}")


class _Answer:
    """Collect one response."""

    def __init__(self, most_bytes: int) -> None:
        self.body, self.is_done = bytearray(), False
        self.status = 0
        """0 until the head has come."""
        self.keeps_alive = False
        """Whether the whole answer has come, nothing behind it, and the server keeps the connection."""
        self._most_bytes = most_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._may_keep = False

    def feed(self, data: bytes | bytearray) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.keeps_alive = False

    def on_headers_complete(self) -> None:
        if not self.is_done:
            self.status = self._parser.get_status_code()
        self._may_keep = bool(self._parser.should_keep_alive())  # at the end llhttp has it no more

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self._most_bytes:
            raise GetFailed(f"more than {self._most_bytes} bytes of a body")

    def on_message_complete(self) -> None:
        self.is_done, self.keeps_alive = True, self._may_keep


async def get(
    url: str, most_bytes: int, headers: Sequence[str] = (), authorities: Path | None = None
) -> bytes:
    """Return the body at a URL; `authorities`: see `client_context`. Raises GetFailed, which says why."""
    try:
        return await _get(url, most_bytes, headers, authorities)
    except _FAILURES as error:
        raise _failed(error) from None


async def _get(url: str, most_bytes: int, headers: Sequence[str], authorities: Path | None) -> bytes:
    parts = urlsplit(url)
    async with await _connect(place_of(url), authorities) as stream:
        await _ask(stream, parts.path, parts.netloc, [*headers, "Connection: close"])
        answer = await _read(stream, most_bytes)
    if answer.status != 200:
        failed = GetFailed(f"status {answer.status}")
        failed.status = answer.status
        raise failed
    return bytes(answer.body)


class KeptConnection:
    """GETs of one server, one after the other, over a connection that is kept while the server keeps it."""

    def __init__(self, url: str, most_bytes: int, authorities: Path | None = None) -> None:
        """`url`: what all paths begin with; `most_bytes` of a body are read; `authorities`: see `client_context`."""
        self._url, self._most_bytes, self._authorities = url, most_bytes, authorities
        self._kept: trio.abc.Stream | None = None

    async def status(self, path: str) -> int:
        """Return the status of the answer at a path. Raises GetFailed, which says why there is none.

        What fails on the kept connection, which the server may have closed, is asked again on a new one.
        """
        if self._kept is not None:
            with suppress(*_FAILURES, GetFailed):
                return await self._status(self._kept, path)
        try:
            return await self._status(await _connect(place_of(self._url), self._authorities), path)
        except _FAILURES as error:
            raise _failed(error) from None

    async def _status(self, stream: trio.abc.Stream, path: str) -> int:
        self._kept = stream
        keeps = False
        try:
            parts = urlsplit(self._url)
            await _ask(stream, parts.path.rstrip("/") + path, parts.netloc, ())
            answer = await _read(stream, self._most_bytes)
            if not answer.status:
                raise GetFailed("it closed the connection without an answer")
            keeps = answer.keeps_alive
            return answer.status
        finally:
            if not keeps:
                await self.close()

    async def close(self) -> None:
        """Close the connection, if there is one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            await trio.aclose_forcefully(kept)


async def _connect(place: Place, authorities: Path | None) -> trio.abc.Stream:
    stream = await trio.open_tcp_stream(place.host, place.port)
    if not place.secure:
        return stream
    context = client_context(authorities)
    return trio.SSLStream(stream, context, server_hostname=place.host, https_compatible=True)


async def _ask(stream: trio.abc.SendStream, path: str, host: str, headers: Sequence[str]) -> None:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "\r\n"]
    await stream.send_all("\r\n".join(lines).encode("ascii"))


async def _read(stream: trio.abc.ReceiveStream, most_bytes: int) -> _Answer:
    answer = _Answer(most_bytes)
    received = 0
    while not answer.is_done:
        data = await stream.receive_some(SESSION_CHUNK_BYTES)
        if not data:
            break
        received += len(data)
        if received > 2 * most_bytes:
            raise GetFailed(f"more than {2 * most_bytes} bytes of an answer")
        try:
            answer.feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # What a callback raises is the cause.
            raise GetFailed(str(error.__context__ or error)) from None
    return answer
