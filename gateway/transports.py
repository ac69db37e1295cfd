"""Bytes to and from one client: a plain TCP socket, or TLS over one.

Responsibility: reads and writes that give up in time, and sending what a slot holds. `PlainTransport` reads straight
into the caller's memory and sends from the page cache; `TlsTransport` has to pass all bytes through the TLS library.

Invariants: every wait on the peer is bounded (`Stalled`), within the second that `Sweeper` takes to notice; a peer
that is gone is `Gone`; neither is ever another exception. A transport tries before it waits, so a busy peer costs no
turn of the event loop; callers give one (`breathe`) in loops.

Concurrency: one task reads and writes.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import trio

from kvfs import limits
from kvfs._native.receiver import END, GONE, MOVED, Receiver
from kvfs._native.s3_reads import Idle, Reads

Buffer = bytes | bytearray | memoryview


class Gone(Exception):
    """The client closed or reset the connection."""


class Stalled(Exception):
    """The client sent or took nothing for too long."""


class Transport(Protocol):
    peer: str
    secure: bool
    quiet_s: float
    """How long nothing may come where a request may begin."""

    @property
    def answered_s(self) -> float:
        """When a request was last answered here without the connection's task."""
        ...

    def wake(self) -> None:
        """End a wait for input as if the client had ended the stream."""
        ...

    def give_up(self) -> None:
        """End it as if the client had stalled."""
        ...

    async def receive_into(self, into: memoryview, timeout_s: float, *, idle: bool = False) -> int:
        """At least one byte, or 0 at the end of the stream; `idle`: there is most likely nothing yet. Raises Gone,
        Stalled."""
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """All of it, in as few packets as it takes. Raises Gone, Stalled."""
        ...

    async def send_file(self, head: bytes, descriptor: int, offset: int, count: int) -> None:
        """`head`, then `count` bytes of a sealed slot. Raises Gone, Stalled."""
        ...

    async def close(self, *, linger: bool) -> None:
        """`linger`: read on for a moment, so that a reset does not take the last answer from the client."""
        ...


async def breathe() -> None:
    """A turn for all others."""
    await trio.lowlevel.checkpoint()


class Sweeper:
    """Ends waits that took too long, once a second: a deadline then costs a wait nothing, where a cancel scope of its
    own takes 8 us, a tenth of a small request."""

    def __init__(self) -> None:
        self._waiting: set[PlainTransport] = set()

    def watch(self, transport: PlainTransport) -> None:
        self._waiting.add(transport)

    def forget(self, transport: PlainTransport) -> None:
        self._waiting.discard(transport)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(limits.SWEEP_INTERVAL_S)
            now_s = trio.current_time()
            for transport in list(self._waiting):
                transport.expire(now_s)


class Pace:
    """When the peer must have moved so many bytes at the latest: a trickle is bounded as a stall is."""

    __slots__ = ("_began_s", "moved")

    def __init__(self) -> None:
        self._began_s = trio.current_time()
        self.moved = 0

    def timeout_s(self) -> float:
        """How long the next wait may take; not above 0 where the peer is too slow altogether."""
        allowed_s = limits.BODY_GRACE_S + self.moved / limits.MIN_BODY_RATE_BYTES_S
        left_s = self._began_s + allowed_s - trio.current_time()
        return min(left_s, limits.BODY_STALL_S)


class PlainTransport:
    """See the module's header. Owns the socket."""

    secure = False

    def __init__(self, sock: socket.socket, peer: str, sweeper: Sweeper) -> None:
        self.peer = peer
        self._socket = sock
        self._sweeper = sweeper
        self._deadline_s = math.inf
        self._expired = False
        self._parked: Idle | None = None
        self.quiet_s = limits.FIRST_BYTE_S
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sweeper.watch(self)

    @property
    def answered_s(self) -> float:
        return 0.0 if self._parked is None else self._parked.served_s

    def expire(self, now_s: float) -> None:
        """Wake the task that waits on the socket, if its time is over."""
        if self.answered_s:
            self._deadline_s = max(self._deadline_s, self.answered_s + limits.KEEP_ALIVE_S)
        if now_s >= self._deadline_s and not self._expired:
            self.give_up()

    def give_up(self) -> None:
        self._expired = True
        self.wake()

    def wake(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    async def receive_into(self, into: memoryview, timeout_s: float, *, idle: bool = False) -> int:
        if idle:
            await self._wait_readable(timeout_s)
        while True:
            try:
                count = self._socket.recv_into(into)
            except BlockingIOError:
                pass
            except OSError as error:
                raise Gone(str(error)) from None
            else:
                if count == 0 and self._expired:
                    raise Stalled("nothing came")
                return count
            await self._wait_readable(timeout_s)

    async def receive_file(self, receiver: Receiver, descriptor: int, count: int, pace: Pace) -> bool:
        """Some of the next `count` bytes into a file, at least one; a turn for all others after limits.MIB. False at
        the end of the stream. Raises Gone, Stalled, KvfsError."""
        before = receiver.size_bytes
        while True:
            end = receiver.receive(self._socket.fileno(), descriptor, min(count, limits.MIB))
            if receiver.size_bytes > before:
                if end == MOVED and receiver.size_bytes - before < count:
                    await breathe()
                return True
            if end == GONE:
                raise Gone("the connection failed")
            if end == END:
                if self._expired:
                    raise Stalled("nothing came")
                return False
            await self._wait_readable(pace.timeout_s())

    async def park(self, reads: Reads) -> Idle:
        """Let `reads` answer what comes, until something is left to do here: what, is in the result. Not longer than
        `quiet_s`, or limits.KEEP_ALIVE_S after the last answer: then, as at the end of the stream, there is nothing in
        it."""
        self._parked = idle = Idle(self._socket.fileno())
        self._deadline_s = trio.current_time() + self.quiet_s

        def abort(_: object) -> trio.lowlevel.Abort:
            reads.unwatch(idle)
            return trio.lowlevel.Abort.SUCCEEDED

        reads.watch(idle, trio.lowlevel.current_task())
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            self._parked = None
            self._deadline_s = math.inf
        return idle

    async def _wait_readable(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise Stalled("nothing came")
        self._deadline_s = trio.current_time() + timeout_s
        await trio.lowlevel.wait_readable(self._socket)
        self._deadline_s = math.inf

    async def send(self, parts: Sequence[Buffer]) -> None:
        left: list[Buffer] = list(parts)
        pace: Pace | None = None
        while left:
            try:
                sent = self._socket.send(left[0]) if len(left) == 1 else self._socket.sendmsg(left)
            except BlockingIOError:
                pace = await self._wait_writable(pace)
                continue
            except OSError as error:
                raise Gone(str(error)) from None
            if pace is not None:
                pace.moved += sent
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = memoryview(left[0])[sent:]

    async def send_file(self, head: bytes, descriptor: int, offset: int, count: int) -> None:
        if count <= limits.SMALL_BODY_BYTES:
            data = os.pread(descriptor, count, offset)
            if len(data) != count:
                raise Gone("the slot is shorter than its object")
            await self.send([head + data])
            return
        await self._send_more(head)
        out, end = self._socket.fileno(), offset + count
        pace: Pace | None = None
        while offset < end:
            try:
                sent = os.sendfile(out, descriptor, offset, min(end - offset, limits.SEND_CHUNK_BYTES))
            except BlockingIOError:
                pace = await self._wait_writable(pace)
                continue
            except OSError as error:
                raise Gone(str(error)) from None
            if sent == 0:
                raise Gone("the slot is shorter than its object")
            offset += sent
            if pace is not None:
                pace.moved += sent

    async def send_rest(self, head: bytes, descriptor: int, offset: int, count: int) -> None:
        """`send_file`, and the descriptor is closed however it ends."""
        try:
            await self.send_file(head, descriptor, offset, count)
        finally:
            os.close(descriptor)

    async def _send_more(self, head: bytes) -> None:
        """Sent with the bytes that follow, in one packet where they fit."""
        if not head:
            return
        try:
            sent = self._socket.send(head, socket.MSG_MORE)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise Gone(str(error)) from None
        if sent < len(head):
            await self.send([head[sent:]])

    async def _wait_writable(self, pace: Pace | None) -> Pace:
        pace = pace or Pace()
        timeout_s = pace.timeout_s()
        if timeout_s > 0:
            with trio.move_on_after(timeout_s) as scope:
                await trio.lowlevel.wait_writable(self._socket)
            if not scope.cancelled_caught:
                return pace
        raise Stalled("the client takes nothing")

    async def close(self, *, linger: bool) -> None:
        self._sweeper.forget(self)
        try:
            if linger:
                with suppress(OSError, Gone, Stalled), trio.move_on_after(limits.LINGER_S):
                    self._socket.shutdown(socket.SHUT_WR)
                    await self._read_away()
        finally:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    async def _read_away(self) -> None:
        scratch = memoryview(bytearray(limits.SESSION_CHUNK_BYTES))
        while await self.receive_into(scratch, limits.LINGER_S):
            await breathe()


class TlsTransport:
    """TLS by trio's SSLStream; `handshake` first."""

    secure = True
    answered_s = 0.0

    def __init__(self, sock: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        self.peer = peer
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._stream = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        self.quiet_s = limits.FIRST_BYTE_S
        self._receiving: trio.CancelScope | None = None
        self._woken = False
        self._given_up = False

    def wake(self) -> None:
        self._woken = True
        if self._receiving is not None:
            self._receiving.cancel()

    def give_up(self) -> None:
        self._given_up = True
        if self._receiving is not None:
            self._receiving.cancel()

    async def handshake(self) -> None:
        """Raises Gone, Stalled."""
        with trio.move_on_after(limits.HEAD_TIMEOUT_S) as scope:
            try:
                await self._stream.do_handshake()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Gone(f"TLS handshake: {error.__cause__ or error}") from None
        if scope.cancelled_caught:
            raise Stalled("no TLS handshake")

    async def receive_into(self, into: memoryview, timeout_s: float, *, idle: bool = False) -> int:
        if self._given_up:
            raise Stalled("nothing came in time")
        with trio.move_on_after(timeout_s) as self._receiving:
            try:
                data = await self._stream.receive_some(min(len(into), limits.TLS_RECORDS_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Gone(str(error)) from None
            into[: len(data)] = data
            return len(data)
        if self._woken:
            return 0
        raise Stalled("nothing came")

    async def send(self, parts: Sequence[Buffer]) -> None:
        pace = Pace()
        for part in _joined(parts):
            view = memoryview(part)
            for at in range(0, len(view), limits.TLS_RECORDS_BYTES):
                await self._send_some(view[at : at + limits.TLS_RECORDS_BYTES], pace)

    async def _send_some(self, data: memoryview, pace: Pace) -> None:
        with trio.move_on_after(pace.timeout_s()):
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Gone(str(error)) from None
            pace.moved += len(data)
            return
        raise Stalled("the client takes nothing")

    async def send_file(self, head: bytes, descriptor: int, offset: int, count: int) -> None:
        first, end = head, offset + count
        pace = Pace()
        while offset < end:
            data = os.pread(descriptor, min(end - offset, limits.TLS_RECORDS_BYTES), offset)
            if not data:
                raise Gone("the slot is shorter than its object")
            offset += len(data)
            await self._send_some(memoryview(first + data), pace)
            first = b""
        if first:
            await self.send([first])

    async def close(self, *, linger: bool) -> None:
        with trio.move_on_after(limits.LINGER_S if linger else 0.1), suppress(Exception):
            await self._stream.aclose()
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream.transport_stream)


def _joined(parts: Sequence[Buffer]) -> list[Buffer]:
    """Small parts as one record."""
    if len(parts) > 1 and sum(map(len, parts)) <= limits.TLS_RECORDS_BYTES:
        return [b"".join(parts)]
    return list(parts)
