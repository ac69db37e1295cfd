"""Drafts of the gateway: reserved in order and within the budget, sealed, aborted.

Responsibility: room for bodies as they come (`gateway.backend.body_budget`), in order (`gateway.backend.draft_queue`),
and seals under names and as blocks.

Invariants: a draft that a method returns is the caller's; on every other way out it was aborted.

Concurrency: one trio thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.backend.body_budget import Arriving, BodyBudget, Draft, Holding
from gateway.backend.draft_queue import DraftQueue
from gateway.backend.lookup import BucketInfo
from gateway.backend.reconnect import ReconnectingSession
from gateway.backend.session import Session
from kvfs.errors import KvfsError, SessionClosed, status_error
from kvfs.protocol.messages import Abort, BlockSeal, NameSeal, Op, Reserve, SealBlocks, untext

log = logging.getLogger("kvfs.gateway")


@dataclass(frozen=True, slots=True)
class Seal:
    """The name under which a draft is sealed, and the condition."""

    bucket: str
    key: str
    user_metadata: bytes
    replace: bool = True
    expected_id: int | None = None
    mtime_ns: int | None = None
    checksum: int | None = None
    """XXH3-64 of the bytes, where it is known."""
    needs: tuple[str, str] | None = None
    """A directory's marker, which has to be there."""


class Drafts:
    """The drafts of one gateway process."""

    def __init__(self, sessions: ReconnectingSession, processes: int) -> None:
        """Make the drafts of a gateway; `processes` like it share the user's quota."""
        self._sessions = sessions
        self._processes = processes
        self.budget = BodyBudget(self._grow)
        self.queue = DraftQueue(self.budget.hurry)

    def resize(self, session: Session) -> None:
        """Set the budget to the quota of a new session."""
        details = session.hello.details
        largest_bytes = details["limits"]["object_bytes"]
        quota_bytes = max(details["quota"]["bytes"] // self._processes, largest_bytes)
        self.budget.resize(quota_bytes, largest_bytes)

    async def reserve(self, owner: str, size_bytes: int, body: Arriving | None = None) -> Draft:
        """Reserve a draft, whose room grows with a `body`. Raises NoSpace, ObjectTooLarge; S3Error SlowDown."""
        return await self.reserve_in(await self._sessions.session(), owner, size_bytes, body)

    @asynccontextmanager
    async def reserved(
        self, owner: str, size_bytes: int, body: Arriving | None = None
    ) -> AsyncIterator[Draft]:
        """Reserve as `reserve` does, and in the end abort what was not sealed."""
        draft = await self.reserve(owner, size_bytes, body)
        try:
            yield draft
        finally:
            await self.abort(draft)

    async def reserve_in(
        self,
        session: Session,
        owner: str,
        size_bytes: int,
        body: Arriving | None = None,
        *,
        whole: bool = False,
    ) -> Draft:
        """Reserve a draft of one session; `whole`: with all of its room at once. Raises as `reserve`."""

        async def ask() -> Draft:
            holding = self.budget.admit(owner, size_bytes, body, whole=whole)
            try:
                link = self._sessions.link_of(session)
                draft = None if link is None else link.spares.take(holding.held_bytes)
                if draft is None:
                    draft = await _reserve_some(session, holding.held_bytes)
            except BaseException:
                holding.release()
                raise
            draft.holding, holding.draft = holding, draft
            return draft

        return await self.queue.reserve(ask, owner)

    async def abort(self, draft: Draft) -> None:
        """Abort a draft; after a seal it does nothing. Never raises for a session that ended."""
        draft.close()
        if draft.open and draft.session.is_open:
            draft.open = False
            try:
                await draft.session.results(Abort(((draft.slot, draft.generation),)))
            except KvfsError as error:
                log.debug("a draft was not aborted: %s", error)

    async def seal(self, draft: Draft, seal: Seal) -> int:
        """Seal a draft under a name, and return the object's id.

        Raises Exists, NotFound as the seal's condition says, NotFound where the marker that it needs is gone; the
        draft then stays.
        """
        draft.close()
        link = self._sessions.link_of(draft.session)
        if link is None:
            raise SessionClosed("the session that granted the draft has ended")
        result = await link.seals.ask(
            NameSeal(
                draft.slot,
                draft.generation,
                untext(seal.bucket),
                untext(seal.key),
                replace=seal.replace,
                mtime_ns=seal.mtime_ns,
                checksum=seal.checksum,
                user_metadata=seal.user_metadata,
                expected_id=seal.expected_id,
                needs=None if seal.needs is None else (untext(seal.needs[0]), untext(seal.needs[1])),
            )
        )
        if result.status:
            raise status_error(result.status, f"{seal.bucket}/{seal.key}")
        draft.open = False
        return result.value

    async def seal_block(self, draft: Draft, bucket: BucketInfo, digest: bytes) -> int:
        """Seal a draft as a block, and return the id of the block that counts, which may have been there before."""
        handle = await self._sessions.namespace(draft.session, bucket)
        draft.close()
        seal = BlockSeal(draft.slot, draft.generation, digest)
        [result] = await draft.session.results(SealBlocks(handle, (seal,)))
        if result.status not in (0, errno.EEXIST):
            raise status_error(result.status, digest.hex())
        draft.open = False
        return result.value

    async def _grow(self, holding: Holding) -> None:
        """Reserve more of the tier for a body. Raises NoSpace, SessionClosed; S3Error SlowDown."""
        draft = holding.draft
        assert draft is not None

        async def ask() -> None:
            before = holding.held_bytes
            self.budget.set(holding, holding.next_bytes)
            try:
                await draft.session.control(
                    Op.RESERVE_BYTES,
                    slot=draft.slot,
                    generation=draft.generation,
                    size_bytes=holding.held_bytes,
                )
            except BaseException:
                self.budget.set(holding, before)
                raise

        await self.queue.grow(ask, holding.owner)


async def _reserve_some(session: Session, size_bytes: int) -> Draft:
    [(entry, descriptor)] = await session.opened(Reserve((size_bytes,)))
    if descriptor is None:
        raise status_error(entry.status, f"room for {size_bytes} bytes")
    return Draft(session, entry.slot, entry.generation, descriptor)
