"""Bytes to and from one client over a plain TCP socket (`kvfs.http.tls`: TLS over one).

Responsibility: receive straight into the caller's memory, send a slot's bytes from the page cache, end every wait.

Invariants: every wait on the peer is bounded (`Stalled`), within the second that `Sweeper` takes to notice; a closed
connection is `Gone`; there is no other exception for the two. A transport tries before it waits, so a busy peer costs
no turn of the event loop; callers `breathe` in loops.

Concurrency: one task reads and writes.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import trio

from kvfs import limits
from kvfs._native.s3.fast_path import Idle, Reads
from kvfs._native.s3.receiver import END, GONE, MOVED, Receiver

Buffer = bytes | bytearray | memoryview


class Gone(Exception):
    """The client closed or reset the connection."""


class Stalled(Exception):
    """The client sent or took nothing for too long."""


class Transport(Protocol):
    """Transfer bytes to and from one client."""

    peer: str
    secure: bool
    quiet_s: float
    """How long nothing may come where a request may begin."""

    @property
    def answered_s(self) -> float:
        """Return when a request was last answered here without the connection's task."""
        ...

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        ...

    def wake(self) -> None:
        """End a wait for input as if the client had ended the stream."""
        ...

    def give_up(self) -> None:
        """End a wait for input as if the client had stalled."""
        ...

    def try_send(self, data: bytes) -> bool:
        """Send a few bytes from another task, if the peer has taken all before them; return whether they went."""
        ...

    async def receive_into(self, into: memoryview, timeout_s: float, *, idle: bool = False) -> int:
        """Receive at least one byte; return how many, 0 at the end. `idle`: wait first. Raises Gone, Stalled."""
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send all parts, in as few packets as possible. Raises Gone, Stalled."""
        ...

    async def send_file(self, head: bytes, descriptor: int, offset: int, count: int) -> None:
        """Send `head`, then `count` bytes of a sealed slot. Raises Gone, Stalled."""
        ...

    async def close(self, *, linger: bool) -> None:
        """Close; with `linger` read on for a moment, so that no reset takes the last answer from the client."""
        ...


async def breathe() -> None:
    """Give the event loop a turn."""
    await trio.lowlevel.checkpoint()


class Sweeper:
    """End waits past their deadline, once a second: a cancel scope for each would take 8 us, a tenth of a small
    request."""

    def __init__(self) -> None:
        self._waiting: set[PlainTransport] = set()

    def watch(self, transport: PlainTransport) -> None:
        """Begin to look at a transport's deadline."""
        self._waiting.add(transport)

    def unwatch(self, transport: PlainTransport) -> None:
        """Stop looking at a transport's deadline."""
        self._waiting.discard(transport)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await trio.sleep(limits.SWEEP_INTERVAL_S)
            now_s = trio.current_time()
            for transport in list(self._waiting):
                transport.expire(now_s)


class Pace:
    """The least speed of a body: a trickle is bounded as a stall is."""

    __slots__ = ("_began_s", "moved")

    def __init__(self) -> None:
        self._began_s = trio.current_time()
        self.moved = 0

    def timeout_s(self) -> float:
        """Return how long the next wait may take; 0 or less where the peer is too slow on average."""
        allowed_s = limits.BODY_GRACE_S + self.moved / limits.MIN_BODY_RATE_BYTES_S
        left_s = self._began_s + allowed_s - trio.current_time()
        return min(left_s, limits.BODY_STALL_S)


class PlainTransport:
    """Implement `Transport` over a TCP socket, which it owns."""

    secure = False

    def __init__(self, sock: socket.socket, peer: str, sweeper: Sweeper) -> None:
        self.peer = peer
        self._socket = sock
        self._sweeper = sweeper
        self._deadline_s = math.inf
        self._expired = False
        self._is_blocked = False
        """Whether a task waits to send."""
        self._parked: Idle | None = None
        self.quiet_s = limits.FIRST_BYTE_S
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sweeper.watch(self)

    @property
    def answered_s(self) -> float:
        return 0.0 if self._parked is None else self._parked.served_s

    def expire(self, now_s: float) -> None:
        """Wake the task that waits on the socket, past its deadline."""
        if self.answered_s:
            self._deadline_s = max(self._deadline_s, self.answered_s + limits.KEEP_ALIVE_S)
        if now_s >= self._deadline_s and not self._expired:
            self.give_up()

    def fileno(self) -> int:
        return self._socket.fileno()

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
        """Receive some of the next `count` bytes into a file, at least one; return False at the end of the stream.

        The event loop has a turn after limits.MIB. Raises Gone, Stalled, KvfsError.
        """
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
        """Let `reads` answer requests until one is left for this task, which the result describes.

        The result is empty at the end of the stream, after `quiet_s`, and limits.KEEP_ALIVE_S after the last answer.
        """
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

    def try_send(self, data: bytes) -> bool:
        with suppress(OSError):
            taken = not struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))[0]
            return taken and not self._is_blocked and self._socket.send(data) == len(data)
        return False

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
        """Send as `send_file` does, and close the descriptor."""
        try:
            await self.send_file(head, descriptor, offset, count)
        finally:
            os.close(descriptor)

    async def _send_more(self, head: bytes) -> None:
        """Send a head in one packet with the bytes that follow, where they fit."""
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
            self._is_blocked = True
            with trio.move_on_after(timeout_s) as scope:
                await trio.lowlevel.wait_writable(self._socket)
            self._is_blocked = False
            if not scope.cancelled_caught:
                return pace
        raise Stalled("the client takes nothing")

    async def close(self, *, linger: bool) -> None:
        self._sweeper.unwatch(self)
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
