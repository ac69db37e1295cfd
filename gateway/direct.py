"""The read path without a call to the service: name index, shared table and slots, all read in place.

Responsibility: name -> row -> table entry -> descriptor. For processes that may open slots themselves and read the
index: the service's own user.

Invariants: a descriptor is given out only when the slot's generation did not move between the look at the table and
the open: what it shows is that object, and stays so, since the open descriptor is the lease. What is not there, or
not in DRAM, or moves under our hands is left to the session.

Concurrency: one thread; nothing waits but a table reader for a writer in mid-change (limits.TABLE_READER_WAIT_S).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gateway.found import BucketInfo, Found, Listed, bucket_of_row, found_of_row, is_marker
from kvfs._native.slots import open_slot
from kvfs._native.table import TIER_DRAM, Table
from kvfs.errors import NotFound, SessionClosed
from kvfs.keys import parse_block_name
from kvfs.messages import text, untext
from kvfs.name_reader import NameReader
from kvfs.name_rows import RETIRED

_READ = os.O_RDONLY | os.O_NONBLOCK


class Direct:
    """Raises, when built: OSError, KvfsError where this process cannot read what the service shows it."""

    def __init__(self, details: dict[str, Any], store_id: bytes) -> None:
        """`details`: what the service said at HELLO."""
        self.names = NameReader(Path(details["index"]))
        try:
            self.table = Table.attach(details["table"], store_id)
            try:
                self.slots = os.open(details["directory"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except BaseException:
                self.table.close()
                raise
        except BaseException:
            self.names.close()
            raise

    def close(self) -> None:
        self.names.close()
        self.table.close()
        os.close(self.slots)

    def bucket(self, name: str) -> BucketInfo:
        """Raises BucketNotFound."""
        return bucket_of_row(self.names.bucket(untext(name)))

    def buckets(self) -> list[BucketInfo]:
        return [bucket_of_row(row) for row in self.names.buckets()]

    def find(self, bucket: str, key: str) -> Found | None:
        """None where nothing is found in place. Raises BucketNotFound, SessionClosed."""
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
        if is_marker(row):
            return found_of_row(row, None)
        entry = self.table.get(row.object_id.to_bytes(16, "big"))
        if entry is not None:
            return found_of_row(row, entry)
        if not self.table.alive:
            raise SessionClosed("the service's table is no longer in use")
        return None

    def _find_block(self, digest: bytes, bucket_id: int) -> Found | None:
        """A block that is in DRAM, in the bucket that it was sealed into."""
        entry = self.table.get(digest)
        if entry is None or not entry.tiers & TIER_DRAM:
            return None
        header = self.table.read_header(entry.slot)
        if header.key != digest or header.generation != entry.generation or header.bucket_id != bucket_id:
            return None
        return Found(
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

    def list(self, bucket: str, prefix: str, after: str, delimiter: str, limit: int) -> Listed:
        """Of a bucket that is bound to no namespace: blocks have no rows."""
        page = self.names.list(
            untext(bucket),
            prefix=untext(prefix),
            after=untext(after),
            delimiter=untext(delimiter) or None,
            limit=limit,
        )
        entries: list[tuple[str, Found | None]] = []
        for name, row in page.entries:
            if row is None:
                entries.append((text(name), None))
            elif is_marker(row):
                entries.append((text(name), found_of_row(row, None)))
            elif (entry := self.table.get(row.object_id.to_bytes(16, "big"))) is not None:
                entries.append((text(name), found_of_row(row, entry)))
        return Listed(entries, text(page.entries[-1].name) if page.truncated else None)

    def open(self, found: Found) -> int:
        """A read-only descriptor of the object's bytes, or -1 where it is not there any more."""
        try:
            descriptor = open_slot(self.slots, found.slot, _READ)
        except NotFound:
            return -1
        if descriptor >= 0 and self.table.generation(found.slot) != found.generation:
            os.close(descriptor)
            return -1
        return descriptor

    def holds(self, slot: int, generation: int, object_id: int) -> bool:
        """Whether this slot has, or had, that object under this generation."""
        header = self.table.read_header(slot)
        return header.generation == generation and header.object_id == object_id
