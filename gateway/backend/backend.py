"""The store as the gateway's operations see it: names, bytes and drafts.

Responsibility: choose between reading in place (`gateway.backend.local_reads`) and asking the session
(`gateway.backend.reconnect`), and keep the two from being mixed up: metadata and bytes of one answer are of one object.

Invariants: a draft or descriptor that a method returns is the caller's; else it was aborted or closed.
Without a service every method raises SessionClosed within limits.GATEWAY_RECONNECT_WAIT_S. What a session answered is
seen by the next look, whichever way it goes (`kvfs.index.reader`).

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
from pathlib import Path
from typing import Any

from gateway.backend.drafts import Drafts, Seal
from gateway.backend.lookup import (
    NO_SLOT,
    BucketInfo,
    ListedPage,
    ObjectLookup,
    bucket_of_values,
    lookup_of_values,
)
from gateway.backend.reconnect import ReconnectingSession
from kvfs import limits
from kvfs.errors import (
    BucketNotFound,
    Exists,
    IsDirectory,
    KvfsError,
    NotFound,
    Superseded,
    status_error,
)
from kvfs.keys import parse_block_name
from kvfs.protocol.messages import (
    DigestBatch,
    Op,
    text,
    untext,
)

log = logging.getLogger("kvfs.gateway")

_OPEN_ATTEMPTS = 4

Expected = tuple[str, int | None]
"""A key, and the id of the object that it must name; None: any."""


class Backend:
    """See the module's header. `sessions.run` must run beside it."""

    def __init__(self, socket_path: Path, *, processes: int = 1) -> None:
        """Make the sessions and drafts of a gateway; `processes` like it share the user's quota."""
        self.sessions = ReconnectingSession(socket_path, lambda session: self.drafts.resize(session))
        self.drafts = Drafts(self.sessions, processes)

    # --- looking up --------------------------------------------------------------------------------------
    async def bucket(self, name: str) -> BucketInfo:
        """Find a bucket. Raises BucketNotFound."""
        if self.sessions.local is not None:
            return self.sessions.local.bucket(name)
        for bucket in await self.buckets():
            if bucket.name == name:
                return bucket
        raise BucketNotFound(f"no bucket {name}")

    async def buckets(self) -> list[BucketInfo]:
        """Return all buckets, in place where they can be read so, else by the session."""
        if self.sessions.local is not None:
            return self.sessions.local.buckets()
        found: list[BucketInfo] = []
        after: str | None = ""
        while after is not None:
            page = await self.sessions.control(Op.BUCKET_LIST, after=after)
            found += map(bucket_of_values, page["buckets"])
            after = page["next_after"]
        return found

    async def find(self, bucket: str, key: str) -> ObjectLookup | None:
        """Find the object of a key; return None where there is none. Raises BucketNotFound.

        After a miss in place the service is asked, which waits for a file that was just closed on the mount.
        """
        if self.sessions.local is not None:
            found = self.sessions.local.find(bucket, key)
            if found is not None:
                return found
        try:
            values = await self.sessions.control(Op.STAT, name=[bucket, key])
            return None if values["directory"] and not key.endswith("/") else lookup_of_values(values)
        except BucketNotFound:
            raise
        except NotFound:
            return None

    async def list(
        self, bucket: str, *, prefix: str = "", after: str = "", delimiter: str = "", limit: int = 1000
    ) -> ListedPage:
        """List a page of keys. Raises BucketNotFound."""
        if self.sessions.local is not None and self.sessions.local.bucket(bucket).namespace is None:
            return self.sessions.local.list(bucket, prefix, after, delimiter, limit)
        page = await self.sessions.control(
            Op.LIST, bucket=bucket, prefix=prefix, after=after, delimiter=delimiter, limit=limit
        )
        entries: list[tuple[str, ObjectLookup | None]] = []
        for values in page["entries"]:
            key = values["key"]
            common = delimiter != "" and key.find(delimiter, len(prefix)) >= 0
            entries.append((key, None if common else lookup_of_values(values)))
        return ListedPage(entries, page["next_after"])

    # --- reading -----------------------------------------------------------------------------------------
    async def open(self, bucket: str, key: str) -> tuple[ObjectLookup, int] | None:
        """Return the object of a key and a descriptor of its bytes, -1 for a marker or symbolic link, which is not
        followed; None where there is nothing.

        An object that is not in DRAM is promoted. Raises BucketNotFound, NoSpace, QuotaExceeded, Superseded (of a key
        that changes all the time).
        """
        failed_id = 0
        for _ in range(_OPEN_ATTEMPTS):
            found = await self.find(bucket, key)
            if found is None or found.marker or found.target:
                return None if found is None else (found, -1)
            descriptor = -1
            if self.sessions.local is not None and found.tier == "dram":
                descriptor = self.sessions.local.open(found)
            if descriptor >= 0:
                self.sessions.touch(found.store_key)
                return found, descriptor
            descriptor = await self._open_by_session(bucket, key, found)
            if descriptor >= 0:
                return found, descriptor
            if found.tier == "cold" or (found.tier == "nvme" and found.object_id == failed_id):
                return None  # the bucket elsewhere, or the drive, does not answer: it is a miss until it does
            failed_id = found.object_id
        raise Superseded(f"{bucket}/{key} was replaced {_OPEN_ATTEMPTS} times while it was opened")

    async def _open_by_session(self, bucket: str, key: str, found: ObjectLookup) -> int:
        """Have the service open an object; return -1 where its name stands for another one by now, or for none."""
        link = await self.sessions.link()
        entry, descriptor = await link.opens.ask((untext(bucket), untext(key)))
        if descriptor is None:
            if entry.status in (errno.ENOENT, errno.ESTALE, errno.EISDIR, errno.ELOOP):
                return -1
            raise status_error(entry.status, f"{bucket}/{key}")
        try:
            if self.sessions.local is not None and entry.slot != NO_SLOT:
                same = found.block or self.sessions.local.holds(entry.slot, entry.generation, found.object_id)
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

    async def fetch(self, bucket: str, key: str) -> bool:
        """Have a block that is not here fetched from another machine; return whether one was asked: look again then.

        Only of a cache: what is fetched into a durable bucket stays there. Raises BucketNotFound, SessionClosed.
        """
        digest = parse_block_name(untext(key))
        if digest is None:
            return False
        found = await self.bucket(bucket)
        if found.namespace is None or found.durable:
            return False
        return await (await self.sessions.link()).fetches.ask((found, digest))

    # --- changing ----------------------------------------------------------------------------------------
    async def match(self, bucket: BucketInfo, digests: Sequence[bytes]) -> int:
        """Count the blocks that are in the bucket without a gap from the first on."""
        session = await self.sessions.session()
        handle = await self.sessions.namespace(session, bucket)
        hits = 0
        for at in range(0, len(digests), limits.MAX_BATCH):
            some = digests[at : at + limits.MAX_BATCH]
            found = await session.count(DigestBatch(Op.MATCH, handle, b"".join(some)))
            hits += found
            if found < len(some):
                break
        return hits

    async def put_marker(self, bucket: str, key: str, user_metadata: bytes) -> ObjectLookup:
        """Make or replace a key that ends in '/'."""
        encoded = base64.b64encode(user_metadata).decode()
        made = lookup_of_values(await self.sessions.control(Op.MKDIR, name=[bucket, key], marker=encoded))
        assert made is not None, "MKDIR answers with the marker that it made"
        return made

    async def put_link(
        self, bucket: str, key: str, target: bytes, user_metadata: bytes, condition: Seal
    ) -> ObjectLookup:
        """Make a symbolic link, on the condition of a seal. Raises Exists, NotFound."""
        arguments: dict[str, Any] = {}
        if condition.expected_id is not None:
            arguments["expected_id"] = condition.expected_id
        made = await self.sessions.control(
            Op.SYMLINK,
            name=[bucket, key],
            target=text(target),
            replace=condition.replace,
            user_metadata=base64.b64encode(user_metadata).decode(),
            **arguments,
        )
        found = lookup_of_values(made)
        assert found is not None, "SYMLINK answers with the link that it made"
        return found

    async def set_metadata(
        self, bucket: str, key: str, found: ObjectLookup, user_metadata: bytes, mtime_ns: int | None = None
    ) -> None:
        """Replace the user metadata of one object. Raises Exists where another has its name, NotFound."""
        arguments: dict[str, Any] = {} if mtime_ns is None else {"mtime_ns": mtime_ns}
        await self.sessions.control(
            Op.SET_ATTRIBUTES,
            name=[bucket, key],
            user_metadata=base64.b64encode(user_metadata).decode(),
            expected_id=found.object_id,
            **arguments,
        )

    async def pin(self, bucket: str, key: str, object_id: int) -> None:
        """Pin an object, unless its key stands for another one by now, or for none."""
        with suppress(Exists, NotFound):
            await self.sessions.control(Op.PIN, name=[bucket, key], expected_id=object_id)

    async def remove(self, bucket: str, key: str, *, expected_id: int | None = None) -> bool:
        """Remove a key, and return whether there was one.

        Raises BucketNotFound, Exists where it names another object than `expected_id`.
        """
        arguments: dict[str, Any] = {"marker": True} if key.endswith("/") else {}
        if expected_id is not None:
            arguments["expected_id"] = expected_id
        try:
            await self.sessions.control(Op.REMOVE, name=[bucket, key], **arguments)
        except BucketNotFound:
            raise
        except (NotFound, IsDirectory):
            return False
        return True

    async def remove_many(self, bucket: str, keys: Sequence[Expected]) -> Sequence[KvfsError | None]:
        """Remove keys that name the objects that are expected, and return for each why it was not removed.

        A missing key counts as removed.
        """
        failed = deque[KvfsError | None]()
        for some in _batches(keys):
            found = await self.sessions.control(
                Op.REMOVE_NAMES,
                names=[[bucket, key] for key, _ in some],
                expected_ids=[expected for _, expected in some],
            )
            for (key, _), status in zip(some, found["statuses"], strict=True):
                gone = status in (0, errno.ENOENT, errno.EISDIR)
                failed.append(None if gone else status_error(status, f"{bucket}/{key}"))
        return failed

    async def settle(self) -> None:
        """Wait until all that the service has done so far is as durable as its answers say."""
        await self.sessions.control(Op.REMOVE_NAMES, names=[], expected_ids=[])

    async def status(self) -> dict[str, Any]:
        """Return the service's status as JSON values."""
        return await self.sessions.control(Op.STATUS)


def _batches(keys: Sequence[Expected]) -> Iterator[Sequence[Expected]]:
    """Yield the keys in batches that fit into one request, escaped as JSON."""
    start = size_bytes = 0
    for at, (key, _) in enumerate(keys):
        more_bytes = 6 * len(untext(key)) + limits.MAX_BUCKET_NAME_BYTES + 64
        if at - start >= limits.MAX_REMOVED_NAMES or size_bytes + more_bytes > limits.MAX_CONTROL_BYTES:
            yield keys[start:at]
            start, size_bytes = at, 0
        size_bytes += more_bytes
    yield keys[start:]
