"""Transfer-Encoding: chunked as a state machine: bytes in, spans of payload out, no I/O (RFC 9112, section 7.1).

Responsibility: find the payload between the chunk lines, and the end of the message. Chunk extensions and the trailer
section are skipped; S3's own trailers are inside the payload.

Invariants: however the stream is cut, the same payload comes out. Lines end in CRLF, sizes are bare hex digits; all
else is refused. Nothing is buffered here: the caller keeps the bytes not consumed, at most one line.

Concurrency: one owner.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from kvfs.limits import MAX_CHUNK_LINE_BYTES, MAX_TRAILER_BYTES

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e]*)?\Z")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\Z")


class BadChunk(Exception):
    """The chunked body is malformed; nothing after it on this connection can be trusted."""


class Step(NamedTuple):
    """One step: how many bytes it consumed; the last `payload` of them belong to the body."""

    consumed: int
    payload: int = 0


class _State(Enum):
    SIZE = "size"
    DATA = "data"
    END_OF_DATA = "end of data"
    TRAILER = "trailer"
    DONE = "done"


class ChunkedReader:
    """Read one body. Call `step` until `done`; a step that consumes nothing needs more bytes."""

    def __init__(self) -> None:
        self._state = _State.SIZE
        self._left = 0
        self._trailer_bytes = 0

    @property
    def done(self) -> bool:
        """Return whether the body's last byte was read, trailers included."""
        return self._state is _State.DONE

    def step(self, data: memoryview, most: int) -> Step:
        """Read at the start of `data`, at most `most` bytes of payload. Raises BadChunk."""
        if self._state is _State.DATA:
            count = min(self._left, len(data), most)
            self._left -= count
            if self._left == 0:
                self._state = _State.END_OF_DATA
            return Step(count, count)
        if self._state is _State.END_OF_DATA:
            if len(data) < 2:
                return Step(0)
            if bytes(data[:2]) != b"\r\n":
                raise BadChunk("a chunk does not end where its size says")
            self._state = _State.SIZE
            return Step(2)
        return self._line(data)

    def _line(self, data: memoryview) -> Step:
        head = bytes(data[: MAX_CHUNK_LINE_BYTES if self._state is _State.SIZE else MAX_TRAILER_BYTES])
        end = head.find(b"\n")
        if end < 0:
            if len(head) < len(data):
                raise BadChunk(f"a chunk's line is over {len(head)} bytes")
            return Step(0)
        line = head[:end].removesuffix(b"\r")
        if len(line) == end:
            raise BadChunk("a chunk's line ends in a bare LF")
        if self._state is _State.SIZE:
            self._take_size(line)
        else:
            self._take_trailer(line)
        return Step(end + 1)

    def _take_size(self, line: bytes) -> None:
        found = _SIZE.match(line)
        if found is None:
            raise BadChunk("a chunk's size is not a hexadecimal number")
        self._left = int(found[1], 16)
        self._state = _State.DATA if self._left else _State.TRAILER

    def _take_trailer(self, line: bytes) -> None:
        if not line:
            self._state = _State.DONE
            return
        self._trailer_bytes += len(line)
        if self._trailer_bytes > MAX_TRAILER_BYTES or not _FIELD.match(line):
            raise BadChunk("a trailer that is no header field, or too long")
