"""The read path without a call to the service: name index, shared table and slots, all read in place.

Responsibility: name -> row -> table entry -> descriptor. For processes that may open slots themselves and read the
index: the service's own user.

Invariants: a descriptor is returned only when the slot's generation did not move between the look at the table and the
open: its bytes are that object's, and stay so, since the open descriptor is the lease. An object that is not there, not
in DRAM, or moves meanwhile is looked up through the session.

Concurrency: one thread; nothing waits but a table reader for a writer in mid-change (limits.TABLE_READER_WAIT_S).
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gateway.backend.lookup import (
    BucketInfo,
    ListedPage,
    ObjectLookup,
    bucket_of_row,
    is_in_row,
    lookup_of_row,
)
from kvfs._native.shared.slots import open_slot
from kvfs._native.shared.table import TIER_DRAM, Table
from kvfs.errors import NotFound, SessionClosed, Unsupported
from kvfs.index.reader import NameReader
from kvfs.index.rows import RETIRED
from kvfs.keys import parse_block_name
from kvfs.protocol.messages import text, untext
from kvfs.system.linux import hides_reads

_READ = os.O_RDONLY | os.O_NONBLOCK


class LocalReads:
    """The name index, table and slots of a service, open for reading."""

    def __init__(self, details: dict[str, Any], store_id: bytes) -> None:
        """Open what `details`, the service's HELLO, names. Raises OSError, KvfsError where this process may not, and
        where the kernel would not note its reads: what `sendfile` has sent keeps a slot's pages from being reused."""
        if details["keeps_pages"] and hides_reads(details["directory"]):
            raise Unsupported(f"{details['directory']} is mounted read-only or without access times")
        with ExitStack() as undo:
            self.names = undo.enter_context(closing(NameReader(Path(details["index"]))))
            self.table = undo.enter_context(closing(Table.attach(details["table"], store_id)))
            self.slots = os.open(details["directory"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.pop_all()

    def close(self) -> None:
        """Close index, table and slots."""
        self.names.close()
        self.table.close()
        os.close(self.slots)

    def bucket(self, name: str) -> BucketInfo:
        """Find a bucket. Raises BucketNotFound."""
        return bucket_of_row(self.names.bucket(untext(name)))

    def buckets(self) -> list[BucketInfo]:
        """Return all buckets."""
        return [bucket_of_row(row) for row in self.names.buckets()]

    def find(self, bucket: str, key: str) -> ObjectLookup | None:
        """Find an object; return None where it cannot be read in place. Raises BucketNotFound, SessionClosed."""
        raw = key.encode("utf-8", "surrogateescape")
        where, row = self.names.find(bucket.encode("utf-8", "surrogateescape"), raw)
        if where.namespace is not None:
            digest = parse_block_name(raw)
            if digest is not None:
                return self._find_block(digest, where.bucket_id)
        if (
            row is None or row.flags & RETIRED
        ):  # a file that was closed on the mount is about to take its place
            return None
        if is_in_row(row):
            return lookup_of_row(row, None)
        entry = self.table.get(row.object_id.to_bytes(16, "big"))
        if entry is not None:
            return lookup_of_row(row, entry)
        if not self.table.alive:
            raise SessionClosed("the service's table is no longer in use")
        return None

    def _find_block(self, digest: bytes, bucket_id: int) -> ObjectLookup | None:
        """Find a block that is in DRAM, in the bucket that it was sealed into."""
        entry = self.table.get(digest)
        if entry is None or not entry.tiers & TIER_DRAM:
            return None
        header = self.table.read_header(entry.slot)
        if header.key != digest or header.generation != entry.generation or header.bucket_id != bucket_id:
            return None
        return ObjectLookup(
            header.sequence,
            entry.size_bytes,
            header.sealed_at_ns,
            b"",
            digest,
            "dram",
            entry.hits,
            block=True,
            slot=entry.slot,
            generation=entry.generation,
        )

    def list(self, bucket: str, prefix: str, after: str, delimiter: str, limit: int) -> ListedPage:
        """List a page of a bucket that is bound to no namespace: blocks have no rows."""
        page = self.names.list(
            untext(bucket),
            prefix=untext(prefix),
            after=untext(after),
            delimiter=untext(delimiter) or None,
            limit=limit,
        )
        entries: list[tuple[str, ObjectLookup | None]] = []
        for name, row in page.entries:
            if row is None:
                entries.append((text(name), None))
            elif is_in_row(row):
                entries.append((text(name), lookup_of_row(row, None)))
            elif (entry := self.table.get(row.object_id.to_bytes(16, "big"))) is not None:
                entries.append((text(name), lookup_of_row(row, entry)))
        return ListedPage(entries, text(page.entries[-1].name) if page.truncated else None)

    def open(self, found: ObjectLookup) -> int:
        """Open an object's bytes for reading; return -1 where they are not there any more."""
        try:
            descriptor = open_slot(self.slots, found.slot, _READ)
        except NotFound:
            return -1
        if descriptor >= 0 and self.table.generation(found.slot) != found.generation:
            os.close(descriptor)
            return -1
        return descriptor

    def holds(self, slot: int, generation: int, object_id: int) -> bool:
        """Return whether this slot has, or had, that object under this generation."""
        header = self.table.read_header(slot)
        return header.generation == generation and header.object_id == object_id
