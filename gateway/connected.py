"""The sessions of a gateway process, kept alive, and what is tied to them.

Responsibility: connect and connect again; with each session come the place that is read in place (`gateway.direct`),
the spare drafts, and the batches of seals and opens. Hits that were read without the service are reported here.

Invariants: what is tied to a session goes with it. What brings objects up from NVMe has a session of its own, since
one serves one request after the other; if either ends, both do.

Concurrency: one trio thread. `run` keeps the sessions, with a task for each thing that is tied to them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from gateway.batches import Batches
from gateway.direct import Direct
from gateway.drafts import SpareDrafts
from gateway.room import Holding, Room
from gateway.session import Session
from gateway.turns import Turns
from kvfs import limits
from kvfs.errors import KvfsError, SessionClosed
from kvfs.messages import DigestBatch, ExtentResult, NameSeal, Op, OpenNames, Result, SealNames

log = logging.getLogger("kvfs.gateway")


class Connected:
    """What `gateway.backend` stands on. `run` must run beside it."""

    def __init__(self, socket_path: Path, *, client: str = "kvfs gateway", processes: int = 1) -> None:
        """`processes`: how many gateways there are like this one, which share the user's quota."""
        self._processes = processes
        self._path = socket_path
        self._client = client
        self._session: Session | None = None
        self._slow: Session | None = None
        self._direct: Direct | None = None
        self._changed = trio.Event()
        self._touched: list[bytes] = []
        self.room = Room(self.grow)
        self.turns = Turns(self.room.hurry)
        self._spares: SpareDrafts | None = None
        self._seals: Batches[NameSeal, Result] | None = None
        self._opens: Batches[tuple[bytes, bytes], tuple[ExtentResult, int | None]] | None = None
        self._nursery: trio.Nursery | None = None
        self._namespaces: dict[str, tuple[Session, int]] = {}

    # --- the session -------------------------------------------------------------------------------------
    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a session until cancelled; started with the first one. Raises SessionClosed, FormatMismatch at first."""
        pause_s = limits.GATEWAY_RECONNECT_MIN_S
        first = True
        while True:
            try:
                async with trio.open_nursery() as nursery:
                    session = await Session.connect(self._path, self._client, nursery)
                    slow = await Session.connect(self._path, self._client, nursery)
                    self._nursery = nursery
                    for task in self._take(session, slow):
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
                    raise _first_error(group) from None
            finally:
                self._drop()
            log.warning("the service's session ended; connecting again")
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.GATEWAY_RECONNECT_MAX_S)

    def _take(self, session: Session, slow: Session) -> list[Callable[[], Awaitable[None]]]:
        """Use these sessions; the tasks that must run beside them."""
        if session.hello.may_open and "index" in session.hello.details:
            try:
                self._direct = Direct(session.hello.details, session.hello.store_id)
            except (OSError, KvfsError) as error:
                log.info("names are asked of the service: %s", error)
        self._session, self._slow = session, slow
        told = session.hello.details
        largest_bytes = told["limits"]["object_bytes"]
        self.room.resize(max(told["quota"]["bytes"] // self._processes, largest_bytes), largest_bytes)
        self._spares = SpareDrafts(session)
        self._seals = Batches(partial(_send_seals, session))
        self._opens = Batches(lambda names: slow.opened(OpenNames(tuple(names))))
        self._changed.set()
        return [self._spares.run, self._seals.run, self._opens.run]

    def _drop(self) -> None:
        for each in (self._session, self._slow, self._direct, self._spares, self._seals, self._opens):
            if each is not None:
                each.close()
        self._session = self._slow = self._direct = self._spares = self._seals = self._opens = None
        self._nursery = None
        self._touched.clear()
        self._namespaces.clear()
        self._changed = trio.Event()

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.is_open

    @property
    def direct(self) -> Direct | None:
        """What is read in place, while there is a session that lets us."""
        return self._direct

    @property
    def largest_object_bytes(self) -> int:
        """Of those in a slot; of the last service connected to."""
        return self._session.hello.details["limits"]["object_bytes"] if self._session else 0

    @property
    def largest_large_bytes(self) -> int:
        """Of objects that no slot holds; 0: there is no NVMe tier."""
        return self._session.hello.details["limits"]["large_object_bytes"] if self._session else 0

    async def session(self) -> Session:
        """The session, waiting a moment for a new one. Raises SessionClosed."""
        if self._session is not None and self._session.is_open:
            return self._session
        with trio.move_on_after(limits.GATEWAY_RECONNECT_WAIT_S):
            while self._session is None or not self._session.is_open:
                await self._changed.wait()
                await trio.lowlevel.checkpoint()
            return self._session
        raise SessionClosed(f"{self._path}: no service answers")

    async def extra_session(self) -> Session:
        """Another session, which the caller closes. Raises SessionClosed, LimitExceeded."""
        await self.session()
        if self._nursery is None:
            raise SessionClosed(f"{self._path}: no service answers")
        return await Session.connect(self._path, self._client, self._nursery)

    async def grow(self, holding: Holding) -> None:
        """More of the tier for a body. Raises NoSpace, SessionClosed; S3Error SlowDown."""
        draft = holding.draft
        assert draft is not None

        async def ask() -> None:
            before = holding.held_bytes
            self.room.set(holding, holding.next_bytes)
            try:
                await draft.session.control(
                    Op.PROMISE, slot=draft.slot, generation=draft.generation, size_bytes=holding.held_bytes
                )
            except BaseException:
                self.room.set(holding, before)
                raise

        await self.turns.grow(ask, holding.owner)

    async def control(self, op: Op, **arguments: Any) -> dict[str, Any]:
        return await (await self.session()).control(op, **arguments)

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


async def _send_seals(session: Session, seals: Sequence[NameSeal]) -> list[Result]:
    """In as many messages as their metadata takes."""
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
    """One is of no use without the other."""
    await other.ended.wait()
    session.close()


def _first_error(group: BaseExceptionGroup[KvfsError]) -> KvfsError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KvfsError)
    return error
