"""One HTTP/1.1 connection: requests in, one exchange after the other, answers out in their order.

Responsibility: find each request's head, hand an `Exchange` to the application, and leave the stream where the next
request begins, or close. Bodies are read by the application, straight into its memory; `100 Continue` goes out when
it first asks for the body, so whatever refuses a request before that spares the client the upload.

Invariants:
- An answer's framing is right whatever the application does: an exchange without an answer, or with half of one,
  ends the connection.
- Who expects a `100 Continue` gets one before every success, also without a body, and a closed connection after
  every refusal.
- What is left of a body is read away up to limits.MAX_DRAIN_BYTES; past that, after a malformed body, and where a
  client waits for a `100 Continue` that never came, the connection closes after the answer.
- Memory per connection: one buffer of limits.MAX_HEAD_BYTES, for heads, pipelined requests and small bodies.

Concurrency: one task per connection.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus

import trio

from gateway.framing import BadChunk, ChunkedReader
from gateway.heads import END, BadHead, Head, parse_head
from gateway.places import Place
from gateway.plain import PlainPut
from gateway.room import Holding
from gateway.transports import Buffer, Gone, Pace, PlainTransport, Stalled, Transport, breathe
from kvfs import limits
from kvfs._native.receiver import Receiver
from kvfs.exchange import status_error

log = logging.getLogger("kvfs.gateway")

Headers = Iterable[tuple[str, str]]
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_BODY = frozenset((204, 304))


class BodyLost(Exception):
    """The body ended before its length, or is malformed: nothing can be answered that the client would read."""


class _Input:
    """What has come and is not consumed: at most one head, and what follows it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory = bytearray(limits.MAX_HEAD_BYTES)
        self._view = memoryview(self._memory)
        self._start = self._end = 0

    @property
    def pending(self) -> memoryview:
        return self._view[self._start : self._end]

    def consume(self, count: int) -> None:
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def feed(self, data: bytes) -> None:
        """Bytes that came another way, while nothing is pending."""
        assert self._start == self._end
        self._start, self._end = 0, len(data)
        self._memory[: len(data)] = data

    async def more(self, timeout_s: float, *, idle: bool = False) -> bool:
        """Read once into what is free; False at the end of the stream. Raises Gone, Stalled."""
        if self._start and self._end == len(self._memory):
            self._memory[: self._end - self._start] = self._memory[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        count = await self._transport.receive_into(self._view[self._end :], timeout_s, idle=idle)
        self._end += count
        return count > 0

    async def head(self) -> bytes | None:
        """The next head with its empty line; None at the end of the stream. Raises BadHead, Gone, Stalled."""
        deadline_s: float | None = None
        while True:
            self._skip_empty_lines()
            found = self._memory.find(END, self._start, self._end)
            if found >= 0:
                head = bytes(self._view[self._start : found + len(END)])
                self.consume(len(head))
                return head
            if self._end - self._start == len(self._memory):
                raise BadHead(431, f"headers of more than {limits.MAX_HEAD_BYTES} bytes")
            timeout_s = self._transport.quiet_s
            if self._start < self._end:
                deadline_s = deadline_s or trio.current_time() + limits.HEAD_TIMEOUT_S
                timeout_s = deadline_s - trio.current_time()
            if not await self.more(timeout_s, idle=deadline_s is None):
                return None

    def _skip_empty_lines(self) -> None:
        """Before a request line (RFC 9112, section 2.2)."""
        while self._memory[self._start : self._start + 2] == b"\r\n" and self._end - self._start >= 2:
            self.consume(2)


class Exchange:
    """One request and its answer. The application reads `head` and the body, and calls one of `respond*`."""

    def __init__(
        self, head: Head, transport: Transport, source: _Input, plain: PlainPut | None = None
    ) -> None:
        """`plain`: what the request is, if it was recognised; `head` then has no headers."""
        self.head = head
        self.plain = plain
        self.peer = transport.peer
        self.secure = transport.secure
        self.answered = False
        self.signed = plain is not None
        """Whether the application knows who asks."""
        self.keep_alive = head.keep_alive
        self._transport = transport
        self._input = source
        self._left = head.content_length
        self._chunked = ChunkedReader() if head.chunked else None
        self._waits_for_continue = head.expects_continue
        self._pace: Pace | None = None
        self._in_chunks = False

    # --- the body ----------------------------------------------------------------------------------------
    @property
    def body_done(self) -> bool:
        return self._chunked.done if self._chunked is not None else self._left == 0

    async def receive_into(self, into: memoryview) -> int:
        """Bytes of the body, 0 at its end. Raises BodyLost, Stalled, Gone."""
        if self.body_done or not len(into):
            return 0
        await self._continue()
        if self._pace is None:
            self._pace = Pace()
        count = await (self._receive_chunked(into) if self._chunked else self._receive_sized(into))
        self._pace.moved += count
        return count

    @property
    def received_bytes(self) -> int:
        """Of the body."""
        return 0 if self._pace is None else self._pace.moved

    def give_up(self) -> None:
        """End the body as if it had stalled."""
        self._transport.give_up()

    async def receive_file(self, descriptor: int, receiver: Receiver, holding: Holding | None = None) -> bool:
        """The body into an empty file, if it is of one length, not encrypted and not begun; else nothing is done, and
        False. `holding`: its room, which grows on the way. Raises BodyLost, Stalled, Gone, KvfsError of the file and of
        the room, S3Error SlowDown."""
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
            if holding is not None:
                if holding.held_bytes <= before:
                    await holding.grow()
                count = min(count, holding.held_bytes - before)
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
        """Tell a client that waits with its body to send it."""
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
        """A whole answer; of a HEAD request without its body, with its length. Raises Gone, Stalled."""
        length = None if status in _NO_BODY else len(body)
        head = self._render(status, headers, length)
        sends_body = length is not None and length > 0 and self.head.method != "HEAD"
        await self._transport.send([head, body] if sends_body else [head])

    async def respond_head(self, status: int, headers: Headers, length: int) -> None:
        """The answer to a HEAD request, of what a GET would bring."""
        await self._transport.send([self._render(status, headers, length)])

    async def respond_file(
        self, status: int, headers: Headers, descriptor: int, offset: int, count: int
    ) -> None:
        """`count` bytes of a sealed slot from `offset` on. Raises Gone, Stalled."""
        await self._transport.send_file(self._render(status, headers, count), descriptor, offset, count)

    async def begin_slowly(self, status: int, headers: Headers) -> None:
        """Begin an answer whose length is not known: `send_part`, then `end_slowly`. Raises Gone, Stalled."""
        self.keep_alive = self.keep_alive and self.head.takes_chunks
        self._in_chunks = self.keep_alive  # else it ends with the connection
        framing = [("Transfer-Encoding", "chunked")] if self._in_chunks else []
        await self._transport.send([self._render(status, [*headers, *framing], None)])

    async def send_part(self, data: bytes) -> None:
        """Some of it, at least a byte. Raises Gone, Stalled."""
        assert data
        await self._transport.send([b"%x\r\n%b\r\n" % (len(data), data) if self._in_chunks else data])

    async def end_slowly(self) -> None:
        """Nothing follows. Raises Gone, Stalled."""
        if self._in_chunks:
            await self._transport.send([b"0\r\n\r\n"])

    def begin(self, status: int, headers: Headers, length: int) -> bytes:
        """Begin an answer that is sent in pieces; what stands before the first."""
        return self._render(status, headers, length)

    async def send_piece(self, head: bytes, descriptor: int, count: int) -> None:
        """`head` and the first `count` bytes of a slot. Raises Gone, Stalled."""
        await self._transport.send_file(head, descriptor, 0, count)

    def _render(self, status: int, headers: Headers, length: int | None) -> bytes:
        assert not self.answered, "an exchange has one answer"
        self.answered = True
        left = limits.MAX_DRAIN_BYTES + 1 if self._chunked and not self.body_done else self._left
        first = b""
        if self._waits_for_continue and self.body_done and status < 300:
            # botocore that is answered without it takes the next answer on the connection for half of this one.
            first, self._waits_for_continue = _CONTINUE, False
        if self._waits_for_continue or left > limits.MAX_DRAIN_BYTES:
            self.keep_alive = False
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        lines.append(f"Date: {date_text()}")
        if not self.keep_alive:
            lines.append("Connection: close")
        lines.append("\r\n")
        return first + "\r\n".join(lines).encode("latin-1")

    async def drain(self) -> None:
        """Read what is left of the body away, if the connection goes on."""
        if not self.keep_alive or self.body_done:
            return
        scratch = memoryview(bytearray(limits.SESSION_CHUNK_BYTES))
        while await self.receive_into(scratch):
            await breathe()


class _Clock:
    """The Date header, made once a second."""

    second = -1
    text = ""


def date_text() -> str:
    """What a Date header says at this moment."""
    second = int(trio.current_time())
    if second != _Clock.second:
        _Clock.second, _Clock.text = second, formatdate(usegmt=True)
    return _Clock.text


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Raises NoSpace and what else becomes of a failed write."""
    while data:
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as error:
            raise status_error(error.errno or errno.EIO, f"writing at byte {offset}") from None
        offset += count
        data = data[count:]


Application = Callable[[Exchange], Awaitable[None]]
Refusal = Callable[[int, str], tuple[Headers, bytes]]
"""Headers and body of the answer to what is no request: a status and a message."""


class Connection:
    """Serves one transport to its end."""

    def __init__(
        self,
        transport: Transport,
        application: Application,
        refuse: Refusal,
        wait: Callable[[], Awaitable[tuple[bytes, PlainPut | None]]] | None = None,
        place: Place | None = None,
    ) -> None:
        """`place`: told whether a request is under way. `wait`: for the first bytes of a request, where that is not the
        transport's (`gateway.front`), and what they begin with if it is a plain PUT; b"" for the end of the stream.
        Raises Gone, Stalled."""
        self._transport = transport
        self._application = application
        self._refuse = refuse
        self._wait = wait
        self._place = place or Place("")
        self._place.transport = transport
        self._input = _Input(transport)
        self._is_idle = False
        self._exchange: Exchange | None = None
        self._stopping = False

    def stop(self) -> None:
        """End after the request that is being served; at once if there is none."""
        self._stopping = True
        if self._exchange is not None:
            self._exchange.keep_alive = False
        if self._is_idle:
            self._transport.wake()

    async def serve(self) -> None:
        linger = False
        try:
            while await self._serve_one():
                pass
            linger = True
        except BadHead as error:
            linger = True
            await self._answer_bad_head(error)
        except (Gone, Stalled, BodyLost) as error:
            log.debug("%s: %s", self._transport.peer, error)
        finally:
            with trio.CancelScope(shield=True):
                await self._transport.close(linger=linger)

    async def _serve_one(self) -> bool:
        """One exchange; whether there may be another."""
        if self._stopping:
            return False
        self._is_idle = True
        self._place.silent_s = trio.current_time()
        plain = None
        if self._wait is not None and not self._input.pending:
            data, plain = await self._wait()
            self._input.feed(data)
        if plain is not None:
            self._input.consume(plain.head_bytes)
            head = Head("PUT", plain.target, [], plain.size_bytes, False, plain.expects_continue, True)
        else:
            found = await self._input.head()
            if found is None:
                return False
            head = parse_head(found)
        self._is_idle = False
        self._place.silent_s = None
        self._exchange = exchange = Exchange(head, self._transport, self._input, plain)
        exchange.keep_alive = exchange.keep_alive and not self._stopping
        await self._application(exchange)
        self._exchange = None
        self._transport.quiet_s = limits.KEEP_ALIVE_S
        self._place.known = self._place.known or exchange.signed
        if not exchange.answered:
            log.error("%s: a request was left without an answer", self._transport.peer)
            return False
        await exchange.drain()
        return exchange.keep_alive

    async def _answer_bad_head(self, error: BadHead) -> None:
        headers, body = self._refuse(error.status, str(error))
        lines = [f"HTTP/1.1 {error.status} {_REASONS.get(error.status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += [f"Content-Length: {len(body)}", f"Date: {date_text()}", "Connection: close", "\r\n"]
        try:
            await self._transport.send(["\r\n".join(lines).encode("latin-1") + body])
        except (Gone, Stalled) as gone:
            log.debug("%s: %s", self._transport.peer, gone)
