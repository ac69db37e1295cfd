"""The client's end of a session: one request, one answer, over a blocking socket.

Responsibility: find the socket behind an address, say HELLO, move frames and descriptors, bound every wait.

Invariants: after any failure in the middle of an exchange the connection is closed and stays so
(`SessionClosed` until a new one is made): an answer is never taken for another request's. Descriptors of an
answer that is not delivered are closed. Received descriptors are close-on-exec.

Concurrency: one exchange at a time; a lock keeps threads apart. Any thread may close: that wakes the thread in an
exchange, which closes the socket then, so that its number is not another file's meanwhile. A forked process makes a
connection of its own.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs import limits
from kvfs.errors import DeadlinePassed, InvalidRequest, LimitExceeded, SessionClosed
from kvfs.protocol.messages import Failure, Hello, HelloAnswer, Op, Request
from kvfs.protocol.state_machine import Connection, ReceivedAnswer, Side

SOCKET_XATTR = "user.kvfs.socket"
SOCKET_NAME = "kvfs.sock"
_LONGEST_WAIT_S = 1e6
"""A longer wait is cut to this: sockets and locks take no much larger number."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * limits.MAX_FDS_PER_MESSAGE)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Hold the moment, on the monotonic clock, by which a call must end, and the wait it was given."""

    limit_s: float
    end_s: float

    @classmethod
    def after(cls, limit_s: float) -> Deadline:
        """Return the deadline of a call that begins now."""
        limit_s = min(limit_s, _LONGEST_WAIT_S)
        return cls(limit_s, time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """Return the seconds left, 0 past the end."""
        return max(self.end_s - time.monotonic(), 0.0)


def socket_path(address: str | os.PathLike[str], *, timeout_s: float) -> Path:
    """Return the session socket that an address stands for: a mount, a data directory, or the socket itself.

    Raises SessionClosed when no service is there, DeadlinePassed, InvalidRequest for anything else.
    """
    # On a mount whose service hangs, stat() does too, and no timeout ends it: a thread of its own waits.
    key = os.getpid(), os.fspath(address)
    look = _looks.get(key)
    if look is None or look.found.done() or time.monotonic() >= look.joined_until_s:
        look = _Look(Future(), time.monotonic() + limits.CLIENT_LOOK_S)
        threading.Thread(target=look.run, args=[key], daemon=True, name="kvfs-address").start()
        _looks[key] = look
    if not wait([look.found], timeout_s).done:
        raise DeadlinePassed(f"{os.fspath(address)}: no answer within {timeout_s:g} s")
    return look.found.result()


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at an address, for all who ask while it is under way."""

    found: Future[Path]
    joined_until_s: float
    """Who asks later begins another: what is mounted there now may answer."""

    def run(self, key: tuple[int, str]) -> None:
        try:
            self.found.set_result(_socket_path(Path(key[1])))
        except Exception as error:
            self.found.set_exception(error)
        if _looks.get(key) is self:
            _looks.pop(key, None)


_looks: dict[tuple[int, str], _Look] = {}
"""The last one begun at each address, by process, since a fork has no threads of its parent."""


def _socket_path(path: Path) -> Path:
    try:
        found = path.stat()
        if stat.S_ISSOCK(found.st_mode):
            return path
        if stat.S_ISDIR(found.st_mode):
            return _socket_of_directory(path)
    except FileNotFoundError:
        raise SessionClosed(f"{path}: no such mount, data directory or socket") from None
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):  # the latter while it goes
            raise SessionClosed(f"{path}: the service behind this mount is gone") from None
        raise
    raise InvalidRequest(f"{path}: neither a mount, nor a data directory, nor a session socket")


def _socket_of_directory(path: Path) -> Path:
    try:
        return Path(os.fsdecode(os.getxattr(path, SOCKET_XATTR)))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
    if not (path / SOCKET_NAME).exists():
        raise SessionClosed(f"{path}: no kvfs mount, and no {SOCKET_NAME} in it")
    return path / SOCKET_NAME


class Transport:
    """One connection to the service."""

    def __init__(self, path: Path, *, timeout_s: float, client: str) -> None:
        """Connect and say HELLO. Raises SessionClosed, DeadlinePassed, FormatMismatch, LimitExceeded."""
        if len(os.fsencode(path)) > limits.MAX_SOCKET_PATH_BYTES:
            raise InvalidRequest(f"socket path {path} is over {limits.MAX_SOCKET_PATH_BYTES} bytes")
        self.path = path
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._protocol = Connection(Side.CLIENT)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._open = True
        try:
            self._connect()
            [hello] = self.exchange(Hello(client, self._pid))
        except BaseException:
            self.close()
            raise
        assert isinstance(hello.answer, HelloAnswer)
        self.hello = hello.answer

    def _connect(self) -> None:
        # While the backlog is full a non-blocking connect fails at once with EAGAIN; a blocking one waits.
        limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._socket.connect(str(self.path))
        except BlockingIOError:
            raise DeadlinePassed(f"{self.path}: not accepted within {self._timeout_s:g} s") from None
        except OSError as error:
            raise SessionClosed(f"{self.path}: no service answers: {error.strerror}") from None

    @property
    def is_open(self) -> bool:
        """Return whether requests can be sent."""
        return self._open

    def close(self) -> None:
        """End the session: the service aborts what was not sealed. Closing twice is harmless.

        A thread in an exchange wakes and raises SessionClosed; the socket is closed when nobody uses it any more.
        """
        if self._open:
            self._open = False
            if os.getpid() == self._pid:  # a child ends nothing but its own descriptor
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._free_unless_used()

    def _free_unless_used(self) -> None:
        """Close the socket of a closed connection when nobody uses it. Whoever holds the lock calls this after its
        release, so that one of two threads frees it."""
        if self._open or not self._lock.acquire(blocking=False):
            return
        try:
            self._socket.close()
            close_all(self._protocol.unused_descriptors())
        finally:
            self._lock.release()

    def exchange(
        self, request: Request, *, timeout_s: float | None = None, descriptors: Sequence[int] = ()
    ) -> list[ReceivedAnswer]:
        """Send a request, with descriptors that stay the caller's, and collect its answer's frames; the caller closes
        those in them.

        Raises the service's error for a request that failed. Raises DeadlinePassed, SessionClosed, ProtocolError; the
        connection is closed then, unless another thread's exchange took too long.
        """
        deadline = Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        if os.getpid() != self._pid:  # the lock may be a parent's thread's, for ever
            raise SessionClosed(f"{self.path}: another process made this session: connect anew")
        if not self._lock.acquire(timeout=deadline.left_s):
            raise DeadlinePassed(f"{self.path}: another thread's request is not answered yet")
        try:
            if not self._open:
                raise SessionClosed(f"{self.path}: this session is closed: reconnect")
            data = self._protocol.send_request(request)
            answers: list[ReceivedAnswer] = []
            try:
                self._send(data, descriptors, deadline)
                while not answers or answers[-1].more:
                    answers.append(self._receive(deadline))
            except BaseException:
                self.close()
                close_answers(answers)
                raise
        finally:
            self._lock.release()
            self._free_unless_used()
        last = answers[-1].answer
        if isinstance(last, Failure):
            close_answers(answers)
            raise last.error
        return answers

    def _send(self, data: bytes, descriptors: Sequence[int], deadline: Deadline) -> None:
        left = memoryview(data)
        while left:
            self._set_timeout(deadline)
            try:
                if descriptors:  # with the first byte
                    left, descriptors = left[socket.send_fds(self._socket, [left], descriptors) :], ()
                else:
                    left = left[self._socket.send(left) :]
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return  # why the service closed is in what it sent before

    def _receive(self, deadline: Deadline) -> ReceivedAnswer:
        while True:
            event = self._protocol.next_event()
            if isinstance(event, ReceivedAnswer):
                if isinstance(event.answer, Failure) and event.answer.op is Op.CLOSED:
                    raise event.answer.error
                return event
            self._set_timeout(deadline)
            try:
                receive_some(self._socket, self._protocol, self.path)
            except TimeoutError:
                continue
            except ConnectionResetError:
                raise SessionClosed(f"{self.path}: the service ended the session") from None

    def _set_timeout(self, deadline: Deadline) -> None:
        left_s = deadline.left_s
        if left_s <= 0:
            raise DeadlinePassed(f"{self.path}: no answer within {deadline.limit_s:g} s")
        self._socket.settimeout(left_s)


def close_answers(answers: list[ReceivedAnswer]) -> None:
    """Close the descriptors of all answers."""
    for answer in answers:
        close_all(answer.descriptors)


def receive_some(connected: socket.socket, protocol: Connection, path: Path) -> None:
    """Receive bytes and descriptors of a session into `protocol`; error messages name `path`.

    Raises OSError as recvmsg(2) does, SessionClosed at the end, LimitExceeded when descriptors were lost.
    """
    data, ancillary, outcome, _ = connected.recvmsg(
        limits.SESSION_CHUNK_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if outcome & socket.MSG_CTRUNC:
        close_all(descriptors)
        raise LimitExceeded("descriptors were lost on arrival: this process is at its limit of open files")
    if not data:
        raise SessionClosed(f"{path}: the service ended the session")
    protocol.receive_data(data, descriptors)


def close_all(descriptors: tuple[int, ...] | list[int] | array.array[int]) -> None:
    """Close all descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
