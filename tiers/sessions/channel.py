"""Frames of one session over its socket.

Responsibility: requests in, answers and descriptors out, every wait on the peer bounded.

Invariants: bytes are read only when the protocol has no complete request left, so input in memory stays below one frame
and one chunk; descriptors are opened when the socket takes a message and closed at once; a peer that stalls or breaks
the protocol ends in a KvfsError and `failed`. The service's thread neither asks nor closes a file of a file system that
a client may serve; while MAX_CLOSING_DESCRIPTORS of these wait, no descriptor is taken.

Concurrency: one task of the service's trio thread; the socket is non-blocking. One daemon thread closes what came from
clients, begun with the first descriptor that is not memory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import queue
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import trio

from kvfs import limits
from kvfs.errors import DeadlinePassed, KvfsError
from kvfs.protocol.messages import Answer, ExtentAnswer, Failure, Op
from kvfs.protocol.state_machine import Closed, Connection, ReceivedRequest, Side
from kvfs.system import linux

log = logging.getLogger("kvfs.sessions")

_IN_FLIGHT_PAUSE_S = 0.01
_DESCRIPTOR = struct.Struct("i")


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


def is_memory(descriptor: int) -> bool:
    """Return whether a descriptor is a memory file or a device, as exported memory is: its close waits for nobody."""
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        return True
    with suppress(OSError):
        return stat.S_ISCHR(linux.known_mode(descriptor))
    return False


class ReceivedDescriptors:
    """Closes descriptors that clients sent: beside the service's thread where a file system of theirs may take as long
    as it likes (FUSE flushes a file at each close)."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._begun = self._done = 0

    @property
    def has_room(self) -> bool:
        """Return whether more may be received."""
        return self._begun - self._done < limits.MAX_CLOSING_DESCRIPTORS

    def close(self, descriptors: Iterable[int]) -> None:
        """Close descriptors, now or later; of memory at once."""
        for descriptor in descriptors:
            if is_memory(descriptor):
                os.close(descriptor)
                continue
            self._begun += 1
            self._waiting.put(descriptor)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="kvfs-closer")
                self._thread.start()

    def _run(self) -> None:
        while True:
            descriptor = self._waiting.get()
            with suppress(OSError):  # of the flush: it is closed all the same
                os.close(descriptor)
            self._done += 1


class Channel:
    """Moves frames at the service's end of one connection."""

    def __init__(self, connection: socket.socket, received: ReceivedDescriptors) -> None:
        """Take a connection, and what closes the descriptors that came on it."""
        self._socket = connection
        self._received = received
        self._protocol = Connection(Side.SERVER)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self.failed = False
        """Whether sending failed: the stream may end inside a frame, nothing more can be sent on it."""
        self.takes_descriptors = False
        """Whether requests may bring descriptors, one each; the kernel drops them otherwise."""

    async def next_request(self, *, quiet_timeout_s: float = math.inf) -> ReceivedRequest | None:
        """Receive the next request, None at the end of the stream. Raises ProtocolError, DeadlinePassed, OSError.

        Other tasks run meanwhile. Without a time limit there is no scope until a frame comes in pieces: most come
        whole, and a scope takes as long as a small request.
        """
        event = self._protocol.next_event()
        if event is not None:
            await trio.lowlevel.checkpoint()
        while event is None and quiet_timeout_s == math.inf and not self._protocol.receiving:
            await self._receive(yields=True)
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
                await self._receive()
        raise DeadlinePassed("a frame that had begun was not completed" if begun else "no HELLO came")

    async def _receive(self, *, yields: bool = False) -> None:
        while True:
            try:
                if self.takes_descriptors and self._received.has_room:
                    self._receive_both()
                else:
                    self._protocol.receive_data(self._socket.recv(limits.SESSION_CHUNK_BYTES))
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                yields = False
                continue
            if yields:
                await trio.lowlevel.checkpoint()
            return

    def _receive_both(self) -> None:
        """Receive bytes, and the first descriptor that came with them; the kernel drops others."""
        data, ancillary, _, _ = self._socket.recvmsg(
            limits.SESSION_CHUNK_BYTES, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
        )
        found = [
            _DESCRIPTOR.unpack(payload)[0]
            for level, kind, payload in ancillary
            if (level, kind, len(payload)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.size)
        ]
        self._protocol.receive_data(data, found)

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
        self._received.close(self._protocol.unused_descriptors())
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
