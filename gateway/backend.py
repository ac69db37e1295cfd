"""The store as the gateway's operations see it: names, bytes and drafts.

Responsibility: choose between reading in place (`gateway.direct`) and asking the session (`gateway.connected`), and
keep the two from being mixed up: metadata and bytes of one answer are of one object.

Invariants: a draft or descriptor that a method returns is the caller's; on every other way out it was given back.
Without a service every method raises SessionClosed within limits.GATEWAY_RECONNECT_WAIT_S. What a session answered is
seen by the next look, whichever way it goes (`kvfs.name_reader`).

Concurrency: one trio thread.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gateway.connected import Connected
from gateway.drafts import Draft
from gateway.found import (
    NO_SLOT,
    BucketInfo,
    Found,
    Listed,
    bucket_of_object,
    found_of_object,
)
from gateway.room import Arriving
from gateway.session import Session
from kvfs import limits
from kvfs.errors import BucketNotFound, Exists, IsDirectory, KvfsError, NotFound, SessionClosed, Superseded
from kvfs.exchange import status_error
from kvfs.messages import (
    Abort,
    BlockSeal,
    DigestBatch,
    NameSeal,
    Op,
    Reserve,
    SealBlocks,
    untext,
)

log = logging.getLogger("kvfs.gateway")

_OPEN_ATTEMPTS = 4

Expected = tuple[str, int | None]
"""A key, and the id of the object that it must name, if that matters."""


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


class Backend(Connected):
    """See the module's header. `run` must run beside it."""

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
            if found.tier == "cold":  # the bucket elsewhere does not answer: it is a miss until it does
                return None
        raise Superseded(f"{bucket}/{key} was replaced {_OPEN_ATTEMPTS} times while it was opened")

    async def _open_by_session(self, bucket: str, key: str, found: Found) -> int:
        """-1 where the name stands for another object by now, or for none."""
        await self.session()
        if self._opens is None:
            raise SessionClosed(f"{self._path}: no service answers")
        entry, descriptor = await self._opens.ask((untext(bucket), untext(key)))
        if descriptor is None:
            if entry.status in (errno.ENOENT, errno.ESTALE, errno.EISDIR):
                return -1
            raise status_error(entry.status, f"{bucket}/{key}")
        try:
            if self._direct is not None and entry.slot != NO_SLOT:
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

    # --- writing -----------------------------------------------------------------------------------------
    async def reserve(self, owner: str, size_bytes: int, body: Arriving | None = None) -> Draft:
        """Room for so many bytes; of a `body`, as they come. Raises NoSpace, ObjectTooLarge; S3Error SlowDown."""
        return await self.reserve_in(await self.session(), owner, size_bytes, body)

    async def reserve_in(
        self,
        session: Session,
        owner: str,
        size_bytes: int,
        body: Arriving | None = None,
        *,
        whole: bool = False,
    ) -> Draft:
        """A draft of this session, when it is its turn; `whole`: with all of its room. Raises as `reserve`."""

        async def ask() -> Draft:
            holding = self.room.admit(owner, size_bytes, body, whole=whole)
            try:
                draft = self._spare(session, holding.held_bytes)
                if draft is None:
                    draft = await _reserve_some(session, holding.held_bytes)
            except BaseException:
                holding.release()
                raise
            draft.holding, holding.draft = holding, draft
            return draft

        return await self.turns.reserve(ask, owner)

    def _spare(self, session: Session, size_bytes: int) -> Draft | None:
        if self._spares is None or session is not self._session:
            return None
        return self._spares.take(size_bytes)

    async def abort(self, draft: Draft) -> None:
        """Give a draft back; after a seal it does nothing. Never raises for a session that ended."""
        draft.close()
        if draft.open and draft.session.is_open:
            draft.open = False
            try:
                await draft.session.results(Abort(((draft.slot, draft.generation),)))
            except KvfsError as error:
                log.debug("a draft was not given back: %s", error)

    async def seal(self, draft: Draft, seal: Seal) -> int:
        """Publish a draft; the object's id. Raises Exists, NotFound as its condition says; the draft then stays."""
        draft.close()
        if draft.session is not self._session or self._seals is None:
            raise SessionClosed("the session that granted the draft has ended")
        result = await self._seals.ask(
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
        if result.status:
            raise status_error(result.status, f"{seal.bucket}/{seal.key}")
        draft.open = False
        return result.value

    async def seal_block(self, draft: Draft, bucket: BucketInfo, digest: bytes) -> int:
        """Publish a draft as a block; the id of the one that counts, which may have been there before."""
        handle = await self.namespace(draft.session, bucket)
        draft.close()
        seal = BlockSeal(draft.slot, draft.generation, digest)
        [result] = await draft.session.results(SealBlocks(handle, (seal,)))
        if result.status not in (0, errno.EEXIST):
            raise status_error(result.status, digest.hex())
        draft.open = False
        return result.value

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

    async def put_marker(self, bucket: str, key: str, user_metadata: bytes) -> Found:
        """Make or replace a key that ends in '/'."""
        encoded = base64.b64encode(user_metadata).decode()
        made = found_of_object(await self.control(Op.MKDIR, name=[bucket, key], marker=encoded))
        assert made is not None, "MKDIR answers with the marker that it made"
        return made

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

    async def pin(self, bucket: str, key: str, object_id: int) -> None:
        """Pin this very object; nothing where the key has come to stand for another one, or for none."""
        with suppress(Exists, NotFound):
            await self.control(Op.PIN, name=[bucket, key], expected_id=object_id)

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

    async def remove_many(self, bucket: str, keys: Sequence[Expected]) -> Sequence[KvfsError | None]:
        """Remove keys, each if it names the object that is expected; what failed of each. A missing one is removed."""
        failed = deque[KvfsError | None]()
        for some in _batches(keys):
            found = await self.control(
                Op.REMOVE_NAMES,
                names=[[bucket, key] for key, _ in some],
                expected_ids=[expected for _, expected in some],
            )
            for (key, _), status in zip(some, found["statuses"], strict=True):
                gone = status in (0, errno.ENOENT, errno.EISDIR)
                failed.append(None if gone else status_error(status, f"{bucket}/{key}"))
        return failed

    async def status(self) -> dict[str, Any]:
        return await self.control(Op.STATUS)


def _batches(keys: Sequence[Expected]) -> Iterator[Sequence[Expected]]:
    """As many keys as one request takes, escaped as JSON."""
    start = size_bytes = 0
    for at, (key, _) in enumerate(keys):
        more_bytes = 6 * len(untext(key)) + limits.MAX_BUCKET_NAME_BYTES + 64
        if at - start >= limits.MAX_REMOVED_NAMES or size_bytes + more_bytes > limits.MAX_CONTROL_BYTES:
            yield keys[start:at]
            start, size_bytes = at, 0
        size_bytes += more_bytes
    yield keys[start:]


async def _reserve_some(session: Session, size_bytes: int) -> Draft:
    [(entry, descriptor)] = await session.opened(Reserve((size_bytes,)))
    if descriptor is None:
        raise status_error(entry.status, f"room for {size_bytes} bytes")
    return Draft(session, entry.slot, entry.generation, descriptor)


def next_bucket(buckets: list[BucketInfo], name: str) -> BucketInfo:
    for bucket in buckets:
        if bucket.name == name:
            return bucket
    raise BucketNotFound(f"no bucket {name}")
