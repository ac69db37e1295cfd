"""A session server on a real store, and clients with other uids, each in a process of its own.

Responsibility: fork the service and its clients, and leave neither processes nor mounts behind. Processes
are forked, not started anew, so that a uid without access to the sources can run in them, and each has one
thread.

Concurrency: one thread here; the service's process runs trio.
"""

from __future__ import annotations

import array
import codecs
import logging
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import trio

import kvfs
from kvfs.errors import LimitExceeded
from kvfs.protocol.messages import Hello, Request
from kvfs.protocol.state_machine import Closed, Connection, ReceivedAnswer, Side
from tests.support.processes import end_with
from tests.support.service import detach_mounts
from tests.support.waits import WAIT_S
from tiers.recovery.start import StoreOptions, open_store
from tiers.sessions.server import SessionServer
from tiers.sessions.state import SessionQuota
from tiers.store.store import Store

codecs.lookup("unicode_escape")
"""Imported when it is first used, which a child without access to the interpreter's files could not do."""
SERVICE_GID = 4242
"""The group whose members may open slots themselves."""
MIB = 1 << 20
UPKEEP_S = 0.02


@dataclass
class Child:
    """A forked process. What it returns or raises comes back through `result`."""

    pid: int
    pipe: socket.socket
    _reaped: int | None = field(default=None)

    @property
    def running(self) -> bool:
        return self._reaped is None

    def result(self) -> Any:
        """What the child's function returned. Raises what it raised."""
        data = b""
        while chunk := self.pipe.recv(1 << 16):
            data += chunk
        self.reap()
        value = pickle.loads(data)
        if isinstance(value, BaseException):
            raise value
        return value

    def wait_for(self, word: bytes) -> None:
        """Wait until the child has said `word`."""
        assert self.pipe.recv(len(word), socket.MSG_WAITALL) == word

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._reaped is None:
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                self.reap()

    def wait_stopped(self) -> None:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def reap(self) -> None:
        if self._reaped is None:
            self._reaped = os.waitpid(self.pid, 0)[1]
        self.pipe.close()


def fork(
    do: Callable[[socket.socket], Any], *, uid: int = 0, gid: int = 0, groups: tuple[int, ...] = ()
) -> Child:
    """Run `do` in a child with these credentials; its argument is the child's end of a pipe. Ends with this thread."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_child(do, theirs, parent, uid, gid, groups)
    theirs.close()
    ours.settimeout(WAIT_S)
    return Child(pid, ours)


def _run_child(
    do: Callable[[socket.socket], Any],
    pipe: socket.socket,
    parent: int,
    uid: int,
    gid: int,
    groups: tuple[int, ...],
) -> NoReturn:
    code = 0
    try:
        if uid:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        end_with(parent)
        value = do(pipe)
    except BaseException as error:
        value, code = error, 1
        if not isinstance(error, kvfs.KvfsError):
            traceback.print_exc()
    with suppress(BaseException):
        pipe.sendall(pickle.dumps(value))
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Server:
    """A running service."""

    directory: Path
    child: Child

    @property
    def socket(self) -> Path:
        return self.directory / "data" / "kvfs.sock"

    def connect(self, timeout_s: float = WAIT_S) -> kvfs.Client:
        return kvfs.connect(self.socket, timeout_s=timeout_s, client="test")

    def run(
        self,
        do: Callable[[kvfs.Client], Any],
        *,
        uid: int,
        gid: int | None = None,
        groups: tuple[int, ...] = (),
    ) -> Any:
        """The result of `do` with a client of another uid."""

        def with_client(_: socket.socket) -> Any:
            with self.connect() as client:
                return do(client)

        return fork(with_client, uid=uid, gid=uid if gid is None else gid, groups=groups).result()

    def stop(self) -> None:
        """Stop cleanly, unless it has stopped. Raises what the service raised."""
        if self.child.running:
            self.child.kill(signal.SIGTERM)
            self.child.result()

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status that meets `condition`; fails after WAIT_S."""
        end = time.monotonic() + WAIT_S
        with self._connect_until(end) as client:
            while not condition(found := client.status()):
                assert time.monotonic() < end, f"never came: {found}"
            return found

    def _connect_until(self, end: float) -> kvfs.Client:
        """Connect once there is room: sessions that were closed end a moment later."""
        while True:
            try:
                return self.connect()
            except LimitExceeded:
                assert time.monotonic() < end, "there never was room for a session"


@contextmanager
def session_server(
    *,
    dram_bytes: int = 32 * MIB,
    quota_bytes: int | None = None,
    quota: SessionQuota | None = None,
    uid: int = 0,
    open_files: int | None = None,
    backing: str = "auto",
) -> Iterator[Server]:
    """A service of user `uid` on a fresh directory that every uid may enter."""
    directory = Path(tempfile.mkdtemp(prefix="kvfs-sessions-"))
    directory.chmod(0o755)
    os.chown(directory, uid, uid)

    def serve(pipe: socket.socket) -> None:
        if open_files is not None:  # of its own: what the test's process has open is not to count
            sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
            logging.getLogger().handlers.clear()
            os.closerange(3, pipe.fileno())
            os.closerange(pipe.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
        logging.basicConfig(filename=directory / "log", level=logging.DEBUG, force=True)
        with open_store(
            StoreOptions(
                directory / "data",
                dram_bytes=dram_bytes,
                max_slots=4096,
                gid=SERVICE_GID,
                quota_bytes=quota_bytes,
                backing=backing,
            )
        ) as store:
            server = SessionServer(
                store, directory / "data" / "kvfs.sock", group_gid=SERVICE_GID, quota=quota
            )
            trio.run(_serve, server, pipe)

    child = fork(serve, uid=uid, gid=uid, groups=(SERVICE_GID,))
    server = Server(directory, child)
    try:
        child.wait_for(b"ready")
        yield server
        server.stop()
    finally:
        child.kill()
        detach_mounts(directory)
        shutil.rmtree(directory)


async def _serve(server: SessionServer, pipe: socket.socket) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_upkeep, server.store)
        nursery.start_soon(_stop_on_signal, server)
        await nursery.start(_serve_then_cancel, server, nursery)
        pipe.sendall(b"ready")


async def _serve_then_cancel(
    server: SessionServer, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None]
) -> None:
    await server.serve(task_status=task_status)
    nursery.cancel_scope.cancel()


async def _upkeep(store: Store) -> None:
    while True:
        store.maintain()
        await trio.sleep(UPKEEP_S)


async def _stop_on_signal(server: SessionServer) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            server.stop()


class RawClient:
    """A client that may break every rule: bytes by hand, messages by the protocol."""

    def __init__(self, server: Server, *, greet: bool = True) -> None:
        self.protocol = Connection(Side.CLIENT)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(str(server.socket))
        if greet:
            self.ask(Hello("raw", os.getpid()))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, *requests: Request) -> list[ReceivedAnswer]:
        """Send the requests together; all frames of their answers."""
        self.send(b"".join(map(self.protocol.send_request, requests)))
        answers: list[ReceivedAnswer] = []
        while sum(not answer.more for answer in answers) < len(requests):
            answers.append(self.receive())
        return answers

    def receive(self) -> ReceivedAnswer:
        while (event := self.protocol.next_event()) is None:
            # socket.recv_fds drops its flags, so the descriptors would not be close-on-exec.
            data, ancillary, _, _ = self.socket.recvmsg(1 << 16, 1024, socket.MSG_CMSG_CLOEXEC)
            descriptors = array.array("i", b"".join(payload for _, _, payload in ancillary))
            self.protocol.receive_data(data, descriptors)
        if event is Closed.CLOSED:
            raise EOFError
        assert isinstance(event, ReceivedAnswer)
        return event

    def at_end(self) -> bool:
        """Whether the service has closed; what it sent before is dropped."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True
