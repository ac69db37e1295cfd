"""The session server: a Unix socket on which local processes use the store (docs/sessions.md).

Responsibility: accept, ask the kernel who connects, serve requests, and release everything when a session ends. What
the requests do is `tiers.sessions.batches` (batches) and `tiers.sessions.control`.

Invariants:
- One request of a session is read, served and answered before the next is read: answers keep the order, and
  a client that floods or does not read is held back by its own socket. Per session there is at most one
  frame of input and one of output in memory.
- Every wait on a peer is bounded: for HELLO, for the rest of a frame that has begun, for it to drain its
  socket. Only a quiet session between two frames may last.
- However a session ends, its drafts are aborted. Leases are the descriptors that its process has: the
  kernel ends them.

Concurrency: the service's trio thread; one task accepts, one per session serves. Sockets are non-blocking.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvfs import limits
from kvfs.errors import ConfigError, FormatMismatch, KvfsError, LimitExceeded, SessionClosed, StoreLocked
from kvfs.protocol.messages import (
    PROTOCOL_VERSION,
    Control,
    ControlAnswer,
    Failure,
    Hello,
    HelloAnswer,
    Op,
    operation_name,
    request_op,
)
from kvfs.protocol.state_machine import ReceivedRequest
from kvfs.rights import Caller
from kvfs.system.latencies import Latencies
from tiers.hbm.device_pools import DevicePools
from tiers.sessions.answers import log_refusal
from tiers.sessions.batches import serve_batch
from tiers.sessions.channel import Channel, ReceivedDescriptors, close_all
from tiers.sessions.control import serve_control
from tiers.sessions.hbm_operations import HBM_OPERATIONS, adopt_segment, serve_hbm
from tiers.sessions.native_seals import NativeSeals
from tiers.sessions.permissions import Access
from tiers.sessions.state import NoCluster, RemoteBlocks, Service, Session, SessionQuota, peer, peer_pidfd
from tiers.store.store import Store

log = logging.getLogger("kvfs.sessions")

SOCKET_MODE = 0o666
"""Whoever reaches the socket's directory may connect; rights follow the kernel's credentials."""
_RETRY_PAUSE_S = 0.05
"""Out of descriptors or memory: the connection waits in the backlog meanwhile."""


class SessionServer:
    """Serves one store on one socket. `stop_asked` is set when a client asked for a shutdown."""

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        service_uid: int | None = None,
        group_gid: int | None = None,
        quota: SessionQuota | None = None,
        describe: Callable[[], dict[str, Any]] = dict,
        latencies: Latencies | None = None,
        cluster: RemoteBlocks | None = None,
        pools: DevicePools | None = None,
    ) -> None:
        """Prepare a server. Members of `group_gid` may open slots; `describe` adds to STATUS; `latencies` counts the
        time of each request; `cluster` fetches blocks of other machines; `pools` has blocks in GPU memory.

        Raises ConfigError for too long a path.
        """
        if len(os.fsencode(path)) > limits.MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"socket path {path} is over {limits.MAX_SOCKET_PATH_BYTES} bytes")
        self.store = store
        self.path = path
        self.quota = quota or SessionQuota()
        self.stop_asked = trio.Event()
        self._describe = describe
        self._latencies = latencies or Latencies()
        service_uid = os.geteuid() if service_uid is None else service_uid
        self._service = Service(
            service_uid, group_gid, self._status, self.stop, cluster or NoCluster(), pools
        )
        self._seals, self._received = NativeSeals(store), ReceivedDescriptors()
        self._sessions: dict[int, Session] = {}
        self._per_uid: Counter[int] = Counter()
        self._idle: dict[int, trio.CancelScope] = {}
        self._accepted = 0
        self._cut_off = 0

    def stop(self) -> None:
        """Ask `serve` to end: idle sessions at once, others after the request that they are in."""
        self.stop_asked.set()

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` or cancellation; started once connections are accepted. Raises StoreLocked."""
        listener = _listen(self.path)
        try:
            async with trio.open_nursery() as nursery, trio.open_nursery() as accepting:
                accepting.start_soon(self._accept_loop, listener, nursery)
                accepting.start_soon(self._seals.run)
                accepting.start_soon(self.store.dram.filler.run)
                task_status.started()
                await self.stop_asked.wait()
                nursery.cancel_scope.deadline = trio.current_time() + limits.STOP_WAIT_S
                for scope in list(self._idle.values()):
                    scope.cancel()
                accepting.cancel_scope.cancel()
        finally:
            self._seals.close()
            listener.close()
            self.path.unlink(missing_ok=True)

    async def _accept_loop(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                log.warning("cannot accept a session: %s", error)
                await trio.sleep(_RETRY_PAUSE_S)
                continue
            self._admit(connection, nursery)

    def _admit(self, connection: socket.socket, nursery: trio.Nursery) -> None:
        connection.setblocking(False)
        channel, caller = Channel(connection, self._received), None
        try:
            caller = peer(connection)
            self._check_room(caller)
        except (KvfsError, OSError) as error:
            log.warning("refused a session: %s", error, extra=_cause(caller))
            channel.close(error if isinstance(error, KvfsError) else None)
            return
        self._accepted += 1
        access = Access(self.store, caller, self._service.service_uid)
        session = Session(
            self._accepted,
            caller,
            access,
            self.store,
            self.quota,
            self._seals,
            partial(peer_pidfd, connection, caller.pid),
        )
        self._sessions[session.number] = session
        self._per_uid[caller.uid] += 1
        nursery.start_soon(self._run, session, channel)

    def _check_room(self, caller: Caller) -> None:
        if len(self._sessions) >= self.quota.sessions:
            raise LimitExceeded(f"{len(self._sessions)} sessions are open, which is the limit")
        count = self._per_uid[caller.uid]
        if count >= self.quota.sessions_per_uid and caller.uid not in (0, self._service.service_uid):
            raise LimitExceeded(f"uid {caller.uid} has {count} sessions open, which is the limit")

    def _end(self, session: Session) -> None:
        aborted = session.release()
        if aborted:
            log.info("%s: ended with %d drafts open, which were aborted", session, aborted)
        self.store.names.clear_dead_readers()
        del self._sessions[session.number]
        self._per_uid[session.caller.uid] -= 1
        if self._per_uid[session.caller.uid] == 0:
            del self._per_uid[session.caller.uid]

    async def _run(self, session: Session, channel: Channel) -> None:
        """Serve one session until it ends, and release it, without an effect on others."""
        reason: KvfsError | None = None
        try:
            await self._serve_session(session, channel)
        except trio.Cancelled:
            reason = SessionClosed("the service stops")
            raise
        except SessionClosed as error:
            reason = error
        except KvfsError as error:
            reason = error
            self._cut_off += 1
            log.warning("%s: cut off: %s", session, error, extra=_cause(session.caller))
        except OSError as error:
            log.info("%s: connection lost: %s", session, error)
        except Exception:
            self._cut_off += 1
            log.exception("%s: cut off by an internal error", session)
        finally:
            self._end(session)
            channel.close(reason)

    async def _serve_session(self, session: Session, channel: Channel) -> None:
        timeout_s = limits.SESSION_HELLO_TIMEOUT_S
        with (
            trio.CancelScope() as scope
        ):  # one for all waits: a scope for each took as long as a small request
            while True:
                received = await self._next_request(session, channel, scope, timeout_s)
                if received is None:
                    return
                began_s = time.perf_counter()
                try:
                    await self._answer(session, channel, received)
                finally:
                    self._received.close(received.descriptors)
                self._latencies.observe(operation_name(received.request), time.perf_counter() - began_s)
                timeout_s = math.inf
        raise SessionClosed("the service stops")

    async def _next_request(
        self, session: Session, channel: Channel, scope: trio.CancelScope, timeout_s: float
    ) -> ReceivedRequest | None:
        """Receive the next request, None at the end of the stream; other tasks run meanwhile. Raises SessionClosed when
        the service stops. `scope` is cancelled in here alone."""
        self._idle[session.number] = scope
        try:
            if not self.stop_asked.is_set():
                received = await channel.next_request(quiet_timeout_s=timeout_s)
                if not scope.cancel_called:
                    return received
        finally:
            del self._idle[session.number]
        raise SessionClosed("the service stops")

    async def _answer(self, session: Session, channel: Channel, received: ReceivedRequest) -> None:
        request = received.request
        self._seals.catch_up()
        try:
            match request:
                case Hello():
                    await channel.send(self._greet(session, request))
                case Control(op=Op.HBM_ADOPT as op):
                    result = adopt_segment(self._service, session, request, *received.descriptors)
                    await channel.send(ControlAnswer(op, result))
                case Control(op=op) if op in HBM_OPERATIONS:
                    result, descriptors = serve_hbm(self._service, session, request)
                    channel.takes_descriptors = session.seat is not None
                    try:
                        await channel.send(ControlAnswer(op, result), descriptors)
                    finally:
                        close_all(descriptors)
                case Control():
                    result = await serve_control(self._service, session, request)
                    await channel.send(ControlAnswer(request.op, result))
                case _:
                    await serve_batch(session, request, channel)
        except KvfsError as error:
            if channel.failed:
                raise
            log_refusal(error)
            await channel.send(Failure(request_op(request), error))
            if isinstance(request, Hello):
                raise

    def _greet(self, session: Session, hello: Hello) -> HelloAnswer:
        session.client = hello.client
        if hello.version != PROTOCOL_VERSION:
            raise FormatMismatch(
                f"the client speaks session protocol {hello.version}, this service speaks {PROTOCOL_VERSION}"
            )
        log.debug("%s: begins", session)
        session.may_open = self._service.is_member(session.caller) or session.access.privileged
        # A tier with few slots keeps them for objects.
        spare_drafts = min(
            self.quota.drafts,
            limits.CLIENT_SPARE_DRAFTS,
            self.store.table.slots // limits.SLOTS_PER_SPARE_DRAFT,
        )
        return HelloAnswer(
            store_id=self.store.store_id,
            may_open=session.may_open,
            details={
                "directory": str(self.store.dram.directory),
                "table": self.store.table.path,
                "index": str(self.store.home.index),
                "keeps_pages": self.store.dram.keeps_pages,
                "devices": self._service.devices,
                "pools": self._service.pools.start if self._service.pools is not None else "",
                "limits": {
                    "frame_bytes": limits.MAX_FRAME_BYTES,
                    "batch": limits.MAX_BATCH,
                    "descriptors": limits.MAX_FDS_PER_MESSAGE,
                    "object_bytes": self.store.dram.usage().largest_object_bytes,
                    "large_object_bytes": self.store.journal.largest_object_bytes,
                },
                "quota": {
                    "drafts": self.quota.drafts,
                    "spare_drafts": spare_drafts,
                    "bytes": self.store.space.quota_bytes,
                },
            },
        )

    def _status(self) -> dict[str, Any]:
        return {
            "sessions": len(self._sessions),
            "sessions_accepted": self._accepted,
            "sessions_cut_off": self._cut_off,
            "session_drafts": sum(len(session.drafts) for session in self._sessions.values()),
            "socket": str(self.path),
            **self._describe(),
        }


def _listen(path: Path) -> socket.socket:
    """Listen at `path`; one that a dead service left there is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise StoreLocked(f"a service already listens on {path}")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(SOCKET_MODE)
        listener.listen(limits.SESSION_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _cause(caller: Caller | None) -> dict[str, int | None]:
    """Return the cause for `kvfs.system.bounded_log`: many lines of one uid hide none of another."""
    return {"cause": None if caller is None else caller.uid}
