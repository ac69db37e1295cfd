"""Frames of one session over its socket.

Responsibility: requests in, answers and descriptors out, every wait on the peer bounded.

Invariants: bytes are read only when the protocol has no complete request left, so input in memory stays below one frame
and one chunk; descriptors are opened when the socket takes a message and closed at once; a peer that stalls or breaks
the protocol ends in a KvfsError and `failed`.

Concurrency: one task of the service's trio thread; the socket is non-blocking.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import trio

from kvfs import limits
from kvfs.errors import DeadlinePassed, KvfsError
from kvfs.protocol.messages import Answer, ExtentAnswer, Failure, Op
from kvfs.protocol.state_machine import Closed, Connection, ReceivedRequest, Side

log = logging.getLogger("kvfs.sessions")

_IN_FLIGHT_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class OpenedFrame:
    """Holds one frame of an answer and its descriptors; whoever sends it closes them."""

    answer: ExtentAnswer
    descriptors: list[int]
    more: bool


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that were sent, or will not be."""
    for descriptor in descriptors:
        os.close(descriptor)


class Channel:
    """Moves frames at the service's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._protocol = Connection(Side.SERVER)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self.failed = False
        """Whether sending failed: the stream may end inside a frame, nothing more can be sent on it."""

    async def next_request(self, *, quiet_timeout_s: float = math.inf) -> ReceivedRequest | None:
        """Receive the next request, None at the end of the stream. Raises ProtocolError, DeadlinePassed, OSError.

        Other tasks run meanwhile. Without a time limit there is no scope until a frame comes in pieces: most come
        whole, and a scope takes as long as a small request.
        """
        event = self._protocol.next_event()
        if event is not None:
            await trio.lowlevel.checkpoint()
        while event is None and quiet_timeout_s == math.inf and not self._protocol.receiving:
            self._protocol.receive_data(await self._receive(yields=True))
            event = self._protocol.next_event()
        if event is not None:
            return event if isinstance(event, ReceivedRequest) else None
        begun = False
        with trio.CancelScope(deadline=trio.current_time() + quiet_timeout_s) as scope:
            while True:
                event = self._protocol.next_event()
                if isinstance(event, ReceivedRequest):
                    return event
                if event is Closed.CLOSED:
                    return None
                if self._protocol.receiving and not begun:
                    begun = True
                    latest = trio.current_time() + limits.SESSION_FRAME_TIMEOUT_S
                    scope.deadline = min(scope.deadline, latest)
                self._protocol.receive_data(await self._receive())
        raise DeadlinePassed("a frame that had begun was not completed" if begun else "no HELLO came")

    async def _receive(self, *, yields: bool = False) -> bytes:
        while True:
            try:
                data = self._socket.recv(limits.SESSION_CHUNK_BYTES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                yields = False
                continue
            if yields:
                await trio.lowlevel.checkpoint()
            return data

    async def send(self, answer: Answer, descriptors: Sequence[int] = ()) -> None:
        """Send an answer, with descriptors that stay the caller's. Raises LimitExceeded with nothing sent;
        DeadlinePassed, OSError where the peer fails."""
        data = memoryview(self._protocol.send_answer(answer))
        if descriptors:
            with self._bounded():
                data = data[await self._send_first(data, descriptors) :]
        self.failed = True
        with suppress(BlockingIOError):
            data = data[self._socket.send(data) :]
        self.failed = False
        if data:
            with self._bounded():
                await self._send_rest(data)

    async def send_opened(self, prepare: Callable[[], OpenedFrame]) -> OpenedFrame:
        """Wait until the socket takes a message, only then prepare it, and send it at once."""
        if not self._writable.poll(0):
            with self._bounded():
                await trio.lowlevel.wait_writable(self._socket)
        frame = prepare()
        try:
            data = memoryview(self._protocol.send_answer(frame.answer, more=frame.more))
            with self._bounded():
                sent = await self._send_first(data, frame.descriptors)
        finally:
            close_all(frame.descriptors)
        if sent < len(data):
            with self._bounded():
                await self._send_rest(data[sent:])
        return frame

    def close(self, reason: KvfsError | None = None) -> None:
        """Close, with the reason where the peer takes it at once."""
        if reason is not None and not self.failed:
            data = self._protocol.send_closed(Failure(Op.CLOSED, reason))
            try:
                self._socket.send(data)
            except OSError:
                self.failed = True
        self._socket.close()

    async def _send_first(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """Send the first bytes with the descriptors. A writable socket takes a message this small at once."""
        if not descriptors:
            return 0
        while True:
            try:
                return socket.send_fds(self._socket, [data], descriptors)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
            except OSError as error:
                # Without CAP_SYS_RESOURCE the kernel bounds a user's descriptors in flight by RLIMIT_NOFILE.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                log.debug("as many descriptors in flight as the limit of open files: waiting")
                await trio.sleep(_IN_FLIGHT_PAUSE_S)

    async def _send_rest(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        limit_s = limits.SESSION_IDLE_WRITE_TIMEOUT_S
        self.failed = True
        with trio.move_on_after(limit_s) as scope:
            yield
        if scope.cancelled_caught:
            raise DeadlinePassed(f"the client did not read its answers for {limit_s:g} s")
        self.failed = False
