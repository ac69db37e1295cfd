"""The store as the gateway's operations see it: names, bytes and drafts over one session that is kept alive.

Responsibility: connect and connect again, choose between reading in place (`gateway.direct`) and asking the session,
and keep the two from being mixed up: metadata and bytes of one answer are of one object.

Invariants: a draft or descriptor that a method returns is the caller's; on every other way out it was given back.
Without a service every method raises SessionClosed within limits.GATEWAY_RECONNECT_WAIT_S. What a session answered is
seen by the next look, whichever way it goes (`kvfs.name_reader`).

Concurrency: one trio thread. `run` keeps the session; hits are reported by a task of its own.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from gateway.direct import Direct
from gateway.drafts import Draft, SpareDrafts
from gateway.found import (
    BucketInfo,
    Found,
    Listed,
    bucket_of_object,
    found_of_object,
)
from gateway.seals import SealQueue
from gateway.session import Session
from kvfs import limits
from kvfs.errors import BucketNotFound, IsDirectory, KvfsError, NotFound, SessionClosed, Superseded
from kvfs.exchange import status_error
from kvfs.messages import (
    Abort,
    BlockSeal,
    DigestBatch,
    NameSeal,
    Op,
    OpenNames,
    Reserve,
    SealBlocks,
    untext,
)

log = logging.getLogger("kvfs.gateway")

_OPEN_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Seal:
    """Under which name a draft is sealed, and on what condition."""

    bucket: str
    key: str
    user_metadata: bytes
    replace: bool = True
    expected_id: int | None = None
    mtime_ns: int | None = None
    checksum: int | None = None
    """XXH3-64 of the bytes, where it is known."""


class Backend:
    """See the module's header. `run` must run beside it."""

    def __init__(self, socket_path: Path, *, client: str = "kvfs gateway") -> None:
        self._path = socket_path
        self._client = client
        self._session: Session | None = None
        self._direct: Direct | None = None
        self._changed = trio.Event()
        self._touched: list[bytes] = []
        self._spares: SpareDrafts | None = None
        self._seals: SealQueue | None = None
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
                    spares, seals = self._take(session)
                    nursery.start_soon(spares.run)
                    nursery.start_soon(seals.run)
                    nursery.start_soon(self._report_hits, session)
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

    def _take(self, session: Session) -> tuple[SpareDrafts, SealQueue]:
        if session.hello.may_open and "index" in session.hello.details:
            try:
                self._direct = Direct(session.hello.details, session.hello.store_id)
            except (OSError, KvfsError) as error:
                log.info("names are asked of the service: %s", error)
        self._session, self._spares, self._seals = session, SpareDrafts(session), SealQueue(session)
        self._changed.set()
        return self._spares, self._seals

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._direct is not None:
            self._direct.close()
        if self._spares is not None:
            self._spares.close()
        if self._seals is not None:
            self._seals.close()
        self._session = self._direct = self._spares = self._seals = None
        self._touched.clear()
        self._namespaces.clear()
        self._changed = trio.Event()

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.is_open

    @property
    def reads_in_place(self) -> bool:
        return self._direct is not None

    @property
    def largest_object_bytes(self) -> int:
        """Of the last service connected to."""
        return self._session.hello.details["limits"]["object_bytes"] if self._session else 0

    @property
    def store_id(self) -> bytes:
        return self._session.hello.store_id if self._session else b""

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

    async def control(self, op: Op, **arguments: Any) -> dict[str, Any]:
        return await (await self.session()).control(op, **arguments)

    # --- looking up --------------------------------------------------------------------------------------
    async def bucket(self, name: str) -> BucketInfo:
        """Raises BucketNotFound."""
        if self._direct is not None:
            return self._direct.bucket(name)
        return next_bucket(await self.buckets(), name)

    async def buckets(self) -> list[BucketInfo]:
        if self._direct is not None:
            return self._direct.buckets()
        found: list[BucketInfo] = []
        after: str | None = ""
        while after is not None:
            page = await self.control(Op.BUCKET_LIST, after=after)
            found += map(bucket_of_object, page["buckets"])
            after = page["next_after"]
        return found

    async def find(self, bucket: str, key: str) -> Found | None:
        """What a key names; None where there is nothing. Raises BucketNotFound.

        A miss is asked of the service, which waits for a file that was just closed on the mount.
        """
        if self._direct is not None:
            found = self._direct.find(bucket, key)
            if found is not None:
                return found
        try:
            values = await self.control(Op.STAT, name=[bucket, key])
            return None if values["directory"] and not key.endswith("/") else found_of_object(values)
        except BucketNotFound:
            raise
        except NotFound:
            return None

    async def list(
        self, bucket: str, *, prefix: str = "", after: str = "", delimiter: str = "", limit: int = 1000
    ) -> Listed:
        """Raises BucketNotFound."""
        if self._direct is not None and self._direct.bucket(bucket).namespace is None:
            return self._direct.list(bucket, prefix, after, delimiter, limit)
        page = await self.control(
            Op.LIST, bucket=bucket, prefix=prefix, after=after, delimiter=delimiter, limit=limit
        )
        entries: list[tuple[str, Found | None]] = []
        for values in page["entries"]:
            key = values["key"]
            common = delimiter != "" and key.find(delimiter, len(prefix)) >= 0
            entries.append((key, None if common else found_of_object(values)))
        return Listed(entries, page["next_after"])

    # --- reading -----------------------------------------------------------------------------------------
    async def open(self, bucket: str, key: str) -> tuple[Found, int] | None:
        """An object and a read-only descriptor of its bytes, -1 for a marker; None where there is nothing.

        Brings up what is not in DRAM. Raises BucketNotFound, NoSpace, QuotaExceeded, Superseded (of a key that
        changes all the time).
        """
        for _ in range(_OPEN_ATTEMPTS):
            found = await self.find(bucket, key)
            if found is None or found.marker:
                return None if found is None else (found, -1)
            descriptor = -1
            if self._direct is not None and found.tier == "dram":
                descriptor = self._direct.open(found)
            if descriptor >= 0:
                self.touch(found.store_key)
                return found, descriptor
            descriptor = await self._open_by_session(bucket, key, found)
            if descriptor >= 0:
                return found, descriptor
        raise Superseded(f"{bucket}/{key} was replaced {_OPEN_ATTEMPTS} times while it was opened")

    async def _open_by_session(self, bucket: str, key: str, found: Found) -> int:
        """-1 where the name stands for another object by now, or for none."""
        session = await self.session()
        [(entry, descriptor)] = await session.opened(OpenNames(((untext(bucket), untext(key)),)))
        if descriptor is None:
            if entry.status in (errno.ENOENT, errno.ESTALE, errno.EISDIR):
                return -1
            raise status_error(entry.status, f"{bucket}/{key}")
        try:
            if self._direct is not None:
                same = found.block or self._direct.holds(entry.slot, entry.generation, found.object_id)
            else:
                again = await self.find(bucket, key)
                same = again is not None and again.object_id == found.object_id
            if same and entry.size_bytes == found.size_bytes:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return -1

    def touch(self, store_key: bytes) -> None:
        """Count a hit, with the next report."""
        if len(self._touched) < limits.MAX_BATCH:
            self._touched.append(store_key)

    async def _report_hits(self, session: Session) -> None:
        """And see that the session answers: a request that waits has no deadline of its own."""
        while True:
            await trio.sleep(limits.GATEWAY_TOUCH_INTERVAL_S)
            session.check_time()
            if self._touched:
                keys, self._touched = self._touched, []
                try:
                    await session.count(DigestBatch(Op.TOUCH, 0, b"".join(keys)))
                except KvfsError as error:
                    log.debug("hits were not reported: %s", error)

    # --- writing -----------------------------------------------------------------------------------------
    async def reserve(self, size_bytes: int) -> Draft:
        """Raises NoSpace, ObjectTooLarge, QuotaExceeded."""
        session = await self.session()
        spare = self._spares.take(size_bytes) if self._spares is not None else None
        if spare is not None:
            return spare
        [(entry, descriptor)] = await session.opened(Reserve((size_bytes,)))
        if descriptor is None:
            raise status_error(entry.status, f"room for {size_bytes} bytes")
        return Draft(session, entry.slot, entry.generation, descriptor)

    async def abort(self, draft: Draft) -> None:
        """Give a draft back; after a seal it does nothing. Never raises for a session that ended."""
        draft.close()
        if draft.open and draft.session.is_open:
            draft.open = False
            try:
                await draft.session.results(Abort(((draft.slot, draft.generation),)))
            except KvfsError as error:
                log.debug("a draft was not given back: %s", error)

    async def seal(self, draft: Draft, seal: Seal) -> None:
        """Publish a draft. Raises Exists, NotFound as its condition says; the draft then stays."""
        draft.close()
        if draft.session is not self._session or self._seals is None:
            raise SessionClosed("the session that granted the draft has ended")
        status = await self._seals.seal(
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
            )
        )
        if status:
            raise status_error(status, f"{seal.bucket}/{seal.key}")
        draft.open = False

    async def seal_block(self, draft: Draft, bucket: BucketInfo, digest: bytes) -> bool:
        """Publish a draft as a block; False where the block was there already, and counts."""
        handle = await self.namespace(draft.session, bucket)
        draft.close()
        seal = BlockSeal(draft.slot, draft.generation, digest)
        [result] = await draft.session.results(SealBlocks(handle, (seal,)))
        if result.status not in (0, errno.EEXIST):
            raise status_error(result.status, digest.hex())
        draft.open = False
        return result.status == 0

    async def namespace(self, session: Session, bucket: BucketInfo) -> int:
        """The session's handle of a bound bucket."""
        known = self._namespaces.get(bucket.name)
        if known is None or known[0] is not session:
            assert bucket.namespace is not None
            found = await session.control(
                Op.OPEN_NAMESPACE, digest=bucket.namespace.hex(), bucket=bucket.name
            )
            known = session, found["handle"]
            self._namespaces[bucket.name] = known
        return known[1]

    async def match(self, bucket: BucketInfo, digests: Sequence[bytes]) -> int:
        """How many blocks are in the bucket without a gap from the first on."""
        session = await self.session()
        handle = await self.namespace(session, bucket)
        hits = 0
        for at in range(0, len(digests), limits.MAX_BATCH):
            some = digests[at : at + limits.MAX_BATCH]
            found = await session.count(DigestBatch(Op.MATCH, handle, b"".join(some)))
            hits += found
            if found < len(some):
                break
        return hits

    async def put_marker(self, bucket: str, key: str, user_metadata: bytes) -> None:
        """A key that ends in '/'."""
        encoded = base64.b64encode(user_metadata).decode()
        await self.control(Op.MKDIR, name=[bucket, key], marker=encoded)

    async def set_metadata(
        self, bucket: str, key: str, found: Found, user_metadata: bytes, mtime_ns: int | None = None
    ) -> None:
        """Replace the user metadata of this very object. Raises Exists where another has the name, NotFound."""
        arguments: dict[str, Any] = {} if mtime_ns is None else {"mtime_ns": mtime_ns}
        await self.control(
            Op.SET_ATTRIBUTES,
            name=[bucket, key],
            user_metadata=base64.b64encode(user_metadata).decode(),
            expected_id=found.object_id,
            **arguments,
        )

    async def pin(self, bucket: str, key: str, pinned: bool) -> None:
        await self.control(Op.PIN, name=[bucket, key], pinned=pinned)

    async def remove(self, bucket: str, key: str, *, expected_id: int | None = None) -> bool:
        """Remove a key; whether there was one. Raises BucketNotFound, Exists where another than expected has it."""
        arguments: dict[str, Any] = {"marker": True} if key.endswith("/") else {}
        if expected_id is not None:
            arguments["expected_id"] = expected_id
        try:
            await self.control(Op.REMOVE, name=[bucket, key], **arguments)
        except BucketNotFound:
            raise
        except (NotFound, IsDirectory):
            return False
        return True

    async def status(self) -> dict[str, Any]:
        return await self.control(Op.STATUS)


def next_bucket(buckets: list[BucketInfo], name: str) -> BucketInfo:
    for bucket in buckets:
        if bucket.name == name:
            return bucket
    raise BucketNotFound(f"no bucket {name}")


def _first_error(group: BaseExceptionGroup[KvfsError]) -> KvfsError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KvfsError)
    return error
