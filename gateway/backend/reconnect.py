"""The sessions of a gateway process, kept alive, and what is tied to them.

Responsibility: connect and connect again; with each session come the files that are read in place
(`gateway.backend.local_reads`), the spare drafts, and the batches of seals and opens. Hits that were read without the
service are reported here.

Invariants: what is tied to a session ends with it. Promotions from NVMe have a session of their own, since a session
serves one request after the other; if either ends, both do. So have fetches from other machines, once one is wanted.

Concurrency: one trio thread. `run` keeps the sessions, with a task for each thing that is tied to them.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from gateway.backend.batcher import Batcher
from gateway.backend.local_reads import LocalReads
from gateway.backend.lookup import BucketInfo
from gateway.backend.session import Session
from gateway.backend.spare_drafts import SpareDrafts
from kvfs import limits
from kvfs.errors import KvfsError, SessionClosed, Unsupported
from kvfs.protocol.messages import DigestBatch, ExtentResult, NameSeal, Op, OpenNames, Result, SealNames

log = logging.getLogger("kvfs.gateway")

_CLIENT = "kvfs gateway"
"""The name of these sessions at the service."""


@dataclass(slots=True)
class Link:
    """A session with the service, and what is tied to it."""

    session: Session
    slow: Session
    """The session of requests that wait for the device."""
    nursery: trio.Nursery
    local: LocalReads | None
    """The files that are read in place; None where this process may not."""
    spares: SpareDrafts
    seals: Batcher[NameSeal, Result]
    opens: Batcher[tuple[bytes, bytes], tuple[ExtentResult, int | None]]
    fetches: Batcher[tuple[BucketInfo, bytes], bool]
    """Whether other machines were asked for a block of a bucket."""
    namespaces: dict[str, int] = field(default_factory=dict)
    """The session's handles of bound buckets, by name."""

    def close(self) -> None:
        """End both sessions; what waits for them fails."""
        for each in (self.session, self.slow, self.local, self.spares, self.seals, self.opens, self.fetches):
            if each is not None:
                each.close()


class ReconnectingSession:
    """See the module's header. `run` must run beside it."""

    def __init__(self, socket_path: Path, connected: Callable[[Session], None]) -> None:
        """Make an object without a session; `connected` is called with each new one."""
        self._path = socket_path
        self._connected = connected
        self._link: Link | None = None
        self._changed = trio.Event()
        self._touched: list[bytes] = []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a session open until cancelled; `started` is called with the first one.

        Raises SessionClosed, FormatMismatch where the first one cannot be opened.
        """
        pause_s = limits.GATEWAY_RECONNECT_MIN_S
        first = True
        while True:
            try:
                async with trio.open_nursery() as nursery:
                    session = await Session.connect(self._path, _CLIENT, nursery)
                    slow = await Session.connect(self._path, _CLIENT, nursery)
                    link = self._link = self._make_link(session, slow, nursery)
                    self._changed.set()
                    for task in (link.spares.run, link.seals.run, link.opens.run, link.fetches.run):
                        nursery.start_soon(task)
                    nursery.start_soon(self._report_hits, session)
                    nursery.start_soon(_end_with, session, slow)
                    if first:
                        first = False
                        task_status.started()
                    pause_s = limits.GATEWAY_RECONNECT_MIN_S
                    await session.ended.wait()
                    nursery.cancel_scope.cancel()
            except* KvfsError as group:
                if first:
                    raise first_error(group) from None
            finally:
                self._drop()
            log.warning("the service's session ended; connecting again")
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.GATEWAY_RECONNECT_MAX_S)

    def _make_link(self, session: Session, slow: Session, nursery: trio.Nursery) -> Link:
        """Make what depends on these sessions."""
        local = None
        if session.hello.may_open and "index" in session.hello.details:
            try:
                local = LocalReads(session.hello.details, session.hello.store_id)
            except (OSError, KvfsError) as error:
                log.info("names are asked of the service: %s", error)
        self._connected(session)
        return Link(
            session,
            slow,
            nursery,
            local,
            SpareDrafts(session),
            Batcher(partial(_send_seals, session)),
            Batcher(lambda names: slow.opened(OpenNames(tuple(names)))),
            Batcher(_Fetching(self).send),
        )

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._touched.clear()
        self._changed = trio.Event()

    @property
    def is_connected(self) -> bool:
        """Return whether there is a session now."""
        return self._link is not None and self._link.session.is_open

    @property
    def local(self) -> LocalReads | None:
        """Return what is read in place; None without a session that allows it."""
        return None if self._link is None else self._link.local

    @property
    def largest_object_bytes(self) -> int:
        """Return the size of the largest object that a slot of the connected service takes; 0 without one."""
        return self._limit("object_bytes")

    @property
    def largest_large_bytes(self) -> int:
        """Return the size of the largest object that no slot holds; 0 without an NVMe tier."""
        return self._limit("large_object_bytes")

    def _limit(self, name: str) -> int:
        return self._link.session.hello.details["limits"][name] if self._link else 0

    async def link(self) -> Link:
        """Return the open session with what is tied to it, waiting a moment for a new one. Raises SessionClosed."""
        if self._link is not None and self._link.session.is_open:
            return self._link
        with trio.move_on_after(limits.GATEWAY_RECONNECT_WAIT_S):
            while self._link is None or not self._link.session.is_open:
                await self._changed.wait()
                await trio.lowlevel.checkpoint()
            return self._link
        raise SessionClosed(f"{self._path}: no service answers")

    def link_of(self, session: Session) -> Link | None:
        """Return what is tied to this session; None where it has ended or is an extra one."""
        return self._link if self._link is not None and self._link.session is session else None

    async def session(self) -> Session:
        """Return the session, waiting a moment for a new one. Raises SessionClosed."""
        return (await self.link()).session

    async def extra_session(self) -> Session:
        """Connect another session, which the caller closes. Raises SessionClosed, LimitExceeded."""
        link = await self.link()
        return await Session.connect(self._path, _CLIENT, link.nursery)

    async def control(self, op: Op, **arguments: Any) -> dict[str, Any]:
        """Return the service's answer to a request. Raises its error, SessionClosed."""
        return await (await self.session()).control(op, **arguments)

    async def namespace(self, session: Session, bucket: BucketInfo) -> int:
        """Return the session's handle of a bound bucket."""
        link = self.link_of(session)
        known = link.namespaces.get(bucket.name) if link is not None else None
        if known is None:
            known = await open_namespace(session, bucket)
            if link is not None:
                link.namespaces[bucket.name] = known
        return known

    # --- hits --------------------------------------------------------------------------------------------
    def touch(self, store_key: bytes) -> None:
        """Count a hit, with the next report."""
        if len(self._touched) < limits.MAX_BATCH:
            self._touched.append(store_key)

    async def _report_hits(self, session: Session) -> None:
        while True:
            await trio.sleep(limits.GATEWAY_TOUCH_INTERVAL_S)
            if self._touched:
                keys, self._touched = self._touched, []
                try:
                    await session.count(DigestBatch(Op.TOUCH, 0, b"".join(keys)))
                except KvfsError as error:
                    log.debug("hits were not reported: %s", error)


class _Fetching:
    """Has the service fetch blocks from other machines, for one link."""

    def __init__(self, sessions: ReconnectingSession) -> None:
        self._sessions = sessions
        self._session: Session | None = None
        self._handles: dict[str, int] = {}
        self._is_alone = False
        """The service said that it knows no other machines."""

    async def send(self, wanted: Sequence[tuple[BucketInfo, bytes]]) -> list[bool]:
        """Fetch blocks, bucket by bucket; return for each whether others were asked. Raises SessionClosed."""
        digests: dict[str, list[bytes]] = {}
        for bucket, digest in wanted:
            digests.setdefault(bucket.name, []).append(digest)
        buckets = {bucket.name: bucket for bucket, _ in wanted}
        asked = {name: await self._fetch(buckets[name], some) for name, some in digests.items()}
        return [asked[bucket.name] for bucket, _ in wanted]

    async def _fetch(self, bucket: BucketInfo, digests: Sequence[bytes]) -> bool:
        if self._is_alone:
            return False
        if self._session is None:  # ends with the link, as its `run` does
            self._session = await self._sessions.extra_session()
        try:
            handle = self._handles.get(bucket.name)
            if handle is None:
                handle = self._handles[bucket.name] = await open_namespace(self._session, bucket)
            joined = b64encode(b"".join(digests)).decode()
            await self._session.control(Op.FETCH, namespace=handle, digests=joined)
        except SessionClosed:
            raise
        except Unsupported:
            self._is_alone = True
        except KvfsError as error:  # the bucket was made anew, or has no room
            self._handles.pop(bucket.name, None)
            log.debug("blocks of %s were not fetched: %s", bucket.name, error)
        return not self._is_alone


async def open_namespace(session: Session, bucket: BucketInfo) -> int:
    """Return a session's new handle of a bound bucket."""
    assert bucket.namespace is not None
    opened = await session.control(Op.OPEN_NAMESPACE, digest=bucket.namespace.hex(), bucket=bucket.name)
    return int(opened["handle"])


async def _send_seals(session: Session, seals: Sequence[NameSeal]) -> list[Result]:
    """Send seals in as many messages as their metadata takes."""
    found: list[Result] = []
    some: list[NameSeal] = []
    size_bytes = 0
    for seal in seals:
        size_bytes += len(seal.user_metadata) + limits.MAX_KEY_BYTES + limits.MAX_BUCKET_NAME_BYTES
        if some and size_bytes > limits.MAX_FRAME_BYTES // 2:
            found += await session.results(SealNames(tuple(some)))
            some, size_bytes = [], len(seal.user_metadata)
        some.append(seal)
    return found + await session.results(SealNames(tuple(some)))


async def _end_with(session: Session, other: Session) -> None:
    """End `session` when `other` ends: one is of no use alone."""
    await other.ended.wait()
    session.close()


def first_error(group: BaseExceptionGroup[KvfsError]) -> KvfsError:
    """Return the first error in a group, however deep."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KvfsError)
    return error
