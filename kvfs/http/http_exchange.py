"""One HTTP/1.1 request and its answer.

Responsibility: the body into the application's memory, the answer's framing, `100 Continue`.

Invariants:
- An answer's framing is right whatever the application does: an exchange without a whole answer ends the connection.
- A client that expects a `100 Continue` gets one before every success, also without a body; a refusal closes its
  connection.
- The rest of a body is read away up to limits.MAX_DRAIN_BYTES. Past that, after a malformed body, and where a client
  waits for a `100 Continue` that never came, the connection closes after the answer.

Concurrency: one task per connection.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from time import time
from typing import Protocol

import trio

from kvfs import limits
from kvfs._native.s3.receiver import Receiver
from kvfs.errors import status_error
from kvfs.http.head import Head
from kvfs.http.input_buffer import InputBuffer
from kvfs.http.transfer_chunks import BadChunk, ChunkedReader
from kvfs.http.transports import Buffer, Pace, PlainTransport, Transport, breathe

Headers = Iterable[tuple[str, str]]
REASONS = {status.value: status.phrase for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_BODY = frozenset((204, 304))


class BodyRoom(Protocol):
    """The room that a body has in its tier."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of room that the body holds."""

    async def grow(self) -> None:
        """Take more room."""
        ...


class Recognised(Protocol):
    """A PUT whose head was parsed natively."""

    @property
    def head_bytes(self) -> int:
        """Return the size of the head."""

    @property
    def target(self) -> bytes:
        """Return the request's target as it came."""

    @property
    def size_bytes(self) -> int:
        """Return the size of the body."""

    @property
    def expects_continue(self) -> bool:
        """Return whether the client waits for `100 Continue`."""


class BodyLost(Exception):
    """The body ended before its length, or is malformed: nothing can be answered that the client would read."""


class Exchange:
    """One request and its answer. The application reads `head` and the body, and calls one of `respond*`."""

    def __init__(
        self,
        head: Head,
        transport: Transport,
        source: InputBuffer,
        recognised: Recognised | None = None,
        scope: trio.CancelScope | None = None,
    ) -> None:
        """Serve one request. `recognised`: the request, if it was parsed natively; `head` then has no headers.

        `scope`: that of the connection, for `abandon`.
        """
        self.head = head
        self.recognised = recognised
        self.peer = transport.peer
        self.secure = transport.secure
        self.answered = False
        self.signed = recognised is not None
        """Whether the application has verified a signature."""
        self.operation = ""
        """The name under which the application counts the request; empty while unknown."""
        self.keep_alive = head.keep_alive
        self._transport = transport
        self._input = source
        self._left = head.content_length
        self._chunked = ChunkedReader() if head.chunked else None
        self._waits_for_continue = head.expects_continue
        self._pace: Pace | None = None
        self._in_chunks = False
        self._scope = scope
        self._lingers_until_s = 0.0
        self.abandoned = False
        self.whole = False
        """Whether all of the answer is on its way: a client may close then, before it has seen the framing's end."""
        self.filler = b""
        """What a client passes over between two parts of the answer; empty: nothing."""

    # --- the body ----------------------------------------------------------------------------------------
    @property
    def body_done(self) -> bool:
        """Return whether the whole body was read."""
        return self._chunked.done if self._chunked is not None else self._left == 0

    async def receive_into(self, into: memoryview) -> int:
        """Read bytes of the body, 0 at its end. Raises BodyLost, Stalled, Gone."""
        if self.body_done or not len(into):
            return 0
        await self._continue()
        if self._pace is None:
            self._pace = Pace()
        count = await (self._receive_chunked(into) if self._chunked else self._receive_sized(into))
        self._pace.moved += count
        return count

    def received_body(self) -> bytes | None:
        """Return the body if all of it has come with its head; else None, and it is still to be received."""
        pending = self._input.pending
        if self._chunked is not None or len(pending) < self._left:
            return None
        body = bytes(pending[: self._left])
        self._input.consume(self._left)
        self._left = 0
        return body

    @property
    def received_bytes(self) -> int:
        """Return how many bytes of the body have come."""
        return 0 if self._pace is None else self._pace.moved

    def fileno(self) -> int:
        """Return the descriptor of the client's connection."""
        return self._transport.fileno()

    @property
    def connection(self) -> object:
        """Return what the exchanges of one connection share, and no other's; without a scope each is alone."""
        return self._scope or self

    def give_up(self) -> None:
        """End the wait for the body as if it had stalled."""
        self._transport.give_up()

    def abandon(self) -> None:
        """Cancel the connection's task, at once or when it has lingered: the client is gone, unless it went with the
        whole answer."""
        if self.whole:
            return
        self.abandoned = True
        if self._scope is None:
            return
        if self._lingers_until_s > trio.current_time():
            self._scope.deadline = self._lingers_until_s
        else:
            self._scope.cancel()

    def linger(self, timeout_s: float) -> None:
        """Have the work outlive its client for so long from now on."""
        self._lingers_until_s = trio.current_time() + timeout_s

    def probe(self) -> bool:
        """Send from another task what the client passes over, which its socket resets if it is closed.

        Return whether it was sent: before the answer (RFC 9110, section 15.2) and between its parts it can be.
        """
        if not self.answered:
            return self.head.takes_chunks and self._transport.try_send(_CONTINUE)
        return bool(self._in_chunks and self.filler) and self._transport.try_send(self._framed(self.filler))

    async def receive_file(self, descriptor: int, receiver: Receiver, room: BodyRoom | None = None) -> bool:
        """Receive the body into an empty file; return False where it is chunked, encrypted or begun.

        `room`: its room in the tier, which grows on the way. Raises BodyLost, Stalled, Gone, and the errors of the file
        and of the room.
        """
        transport = self._transport
        if self._chunked is not None or self._pace is not None or not isinstance(transport, PlainTransport):
            return False
        await self._continue()
        self._pace = Pace()
        pending = self._input.pending[: self._left]
        if pending:
            write_all(descriptor, pending, 0)
            receiver.update(pending)
            self._took(len(pending))
            self._input.consume(len(pending))
        while self._left:
            before = receiver.size_bytes
            count = self._left
            if room is not None:
                if room.held_bytes <= before:
                    await room.grow()
                count = min(count, room.held_bytes - before)
            alive = await transport.receive_file(receiver, descriptor, count, self._pace)
            self._took(receiver.size_bytes - before)
            if not alive:
                self.keep_alive = False
                raise BodyLost(f"the connection ended {self._left} bytes before the body did")
        return True

    def _took(self, count: int) -> None:
        assert self._pace is not None
        self._left -= count
        self._pace.moved += count

    async def _continue(self) -> None:
        """Ask a client that waits with its body to send it."""
        if self._waits_for_continue:
            self._waits_for_continue = False
            await self._transport.send([_CONTINUE])

    async def _receive_sized(self, into: memoryview) -> int:
        into = into[: self._left]
        pending = self._input.pending
        if len(pending):
            count = min(len(pending), len(into))
            into[:count] = pending[:count]
            self._input.consume(count)
        else:
            assert self._pace is not None
            count = await self._transport.receive_into(into, self._pace.timeout_s())
        if count == 0:
            self.keep_alive = False
            raise BodyLost(f"the connection ended {self._left} bytes before the body did")
        self._left -= count
        return count

    async def _receive_chunked(self, into: memoryview) -> int:
        assert self._chunked is not None
        assert self._pace is not None
        while not self._chunked.done:
            pending = self._input.pending
            try:
                step = self._chunked.step(pending, len(into))
            except BadChunk as error:
                self.keep_alive = False
                raise BodyLost(str(error)) from None
            if step.payload:
                into[: step.payload] = pending[: step.payload]
            self._input.consume(step.consumed)
            if step.payload:
                return step.payload
            if not step.consumed and not await self._input.more(self._pace.timeout_s()):
                self.keep_alive = False
                raise BodyLost("the connection ended inside a chunked body")
        return 0

    # --- the answer --------------------------------------------------------------------------------------
    async def respond(self, status: int, headers: Headers, body: Buffer = b"") -> None:
        """Send a whole answer; to HEAD, its length without its body. Raises Gone, Stalled."""
        length = None if status in _NO_BODY else len(body)
        head = self.begin(status, headers, length)
        sends_body = length is not None and length > 0 and self.head.method != "HEAD"
        self.whole = True
        await self._transport.send([head, body] if sends_body else [head])

    async def respond_head(self, status: int, headers: Headers, length: int) -> None:
        """Answer a HEAD request with the length of a GET's answer."""
        await self._transport.send([self.begin(status, headers, length)])

    async def respond_file(
        self, status: int, headers: Headers, descriptor: int, offset: int, count: int
    ) -> None:
        """Send `count` bytes of a sealed slot from `offset` on. Raises Gone, Stalled."""
        await self._transport.send_file(self.begin(status, headers, count), descriptor, offset, count)

    async def begin_slowly(
        self, status: int, headers: Headers, first: bytes = b"", *, last: bool = False
    ) -> None:
        """Begin an answer of unknown length by its `first` part; `send_part` and `end_slowly` follow, unless it is the
        `last`.

        Raises Gone, Stalled.
        """
        self.keep_alive = self.keep_alive and self.head.takes_chunks
        self._in_chunks = self.keep_alive  # else the end of the connection ends it
        framing = [("Transfer-Encoding", "chunked")] if self._in_chunks else []
        head = self.begin(status, [*headers, *framing], None)
        await self._transport.send([head + self._framed(first, last=last) if first else head])

    async def send_part(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of an answer of unknown length, at least a byte, and the end with the `last`.

        Raises Gone, Stalled.
        """
        assert data
        await self._transport.send([self._framed(data, last=last)])

    def _framed(self, data: bytes, *, last: bool = False) -> bytes:
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._in_chunks else data
        return framed + self._end() if last else framed

    async def end_slowly(self) -> None:
        """End an answer of unknown length. Raises Gone, Stalled."""
        if end := self._end():
            await self._transport.send([end])

    def _end(self) -> bytes:
        self.whole, self.filler = True, b""
        return b"0\r\n\r\n" if self._in_chunks else b""

    async def send_piece(self, head: bytes, descriptor: int, count: int) -> None:
        """Send `head` and the first `count` bytes of a slot. Raises Gone, Stalled."""
        await self._transport.send_file(head, descriptor, 0, count)

    def begin(self, status: int, headers: Headers, length: int | None) -> bytes:
        """Begin the answer; return its head, for a caller that sends the body in pieces. None: no Content-Length."""
        assert not self.answered, "an exchange has one answer"
        self.answered = True
        left = limits.MAX_DRAIN_BYTES + 1 if self._chunked and not self.body_done else self._left
        first = b""
        if self._waits_for_continue and self.body_done and status < 300:
            # Without it botocore takes the next answer on the connection for half of this one.
            first, self._waits_for_continue = _CONTINUE, False
        if self._waits_for_continue or left > limits.MAX_DRAIN_BYTES:
            self.keep_alive = False
        head = f"HTTP/1.1 {status} {REASONS.get(status, '')}\r\n"
        for name, value in headers:
            head += f"{name}: {value}\r\n"
        if length is not None:
            head += f"Content-Length: {length}\r\n"
        end = "" if self.keep_alive else "Connection: close\r\n"
        return first + f"{head}Date: {date_text()}\r\n{end}\r\n".encode("latin-1")

    async def drain(self) -> None:
        """Read the rest of the body away, if the connection goes on."""
        if not self.keep_alive:
            return
        scratch = memoryview(bytearray(limits.SESSION_CHUNK_BYTES))
        while await self.receive_into(scratch):
            await breathe()


class _Clock:
    """Hold the Date header's text and the second it was made for."""

    second = -1
    text = ""


def date_text() -> str:
    """Return the text of a Date header at this moment."""
    second = int(time())
    if second != _Clock.second:
        _Clock.second, _Clock.text = second, formatdate(usegmt=True)
    return _Clock.text


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write `data` at `offset`. Raises NoSpace and what else becomes of a failed write."""
    while data:
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as error:
            raise status_error(error.errno or errno.EIO, f"writing at byte {offset}") from None
        offset += count
        data = data[count:]
