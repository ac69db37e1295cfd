"""Snapshots: what was made durable of drafts before their seal.

Responsibility: copies of drafts in DRAM, written, renamed and settled; which files are still being written
(`kvfs.index.draft_snapshots`), those larger than DRAM takes included.

Invariants: a snapshot counts as durable, whatever its bucket. What became of a draft is in the index before the log has
its record.
Concurrency: the service's trio thread; `settle` awaits the log.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import DeviceFailed, KvfsError, NoSpace, Superseded
from kvfs.index.draft_snapshots import OPEN, SnapshotIndex
from kvfs.index.rows import PINNED, NameRow
from tiers.dram.tier import DramTier
from tiers.log.records import MetaBody
from tiers.model.objects import Bucket, Name
from tiers.model.tier import Extent, object_key
from tiers.nvme.stored import Stored, slot_payloads
from tiers.nvme.tickets import Tickets
from tiers.nvme.tier import NvmeTier


class Snapshots:
    """See the module's header."""

    def __init__(self, nvme: NvmeTier, dram: DramTier, tickets: Tickets, index: SnapshotIndex) -> None:
        self._nvme, self._dram, self._tickets, self.index = nvme, dram, tickets, index

    def note(self, object_id: int, sealed_as: int = OPEN) -> None:
        """Note that a draft is being written, or which object it was sealed as."""
        self.index.note(object_id, sealed_as, lambda each: self._nvme.known(each) is None)

    def put(self, extent: Extent, bucket: Bucket, name: Name, row: NameRow) -> int:
        """Queue what a draft holds now under a name; return its id. Raises NoSpace, DeviceFailed."""
        self._nvme.log.check_queue()
        self._nvme.check_durable_room((row.size_bytes,))
        self.note(row.object_id)
        key = object_key(row.object_id)
        stored = Stored(key, row.object_id, row.size_bytes, bucket.bucket_id, uid=row.uid, kept=True)
        payloads = slot_payloads(self._nvme.pool, partial(self._dram.open_draft, extent), row.size_bytes)
        stored.ticket = self._nvme.put(stored, payloads, MetaBody(name.bucket, name.key, row))
        return row.object_id

    async def settle(self, snapshot: int, previous: int | None) -> None:
        """Wait until what `put` has queued is durable; then `previous`, an earlier one, is no more. Raises NoSpace,
        DeviceFailed, and then it is dropped."""
        stored = self._nvme.objects.get(snapshot)
        if stored is None:
            return
        try:
            await self.settle_object(snapshot, stored.ticket)
        except KvfsError:
            if self._nvme.objects.get(snapshot) is stored:  # what was answered as failed must not come later
                self.index.remove(snapshot)
                self._tickets.drop(snapshot)
            raise
        self._tickets.drop(previous, behind=True, awaited=False)

    async def settle_object(self, object_id: int, ticket: int) -> None:
        """Wait until an object is durable, whose last record has this ticket, or is no more. Raises NoSpace,
        DeviceFailed."""
        stored = self._nvme.objects.get(object_id)
        await self._nvme.log.settle(ticket)
        problem = stored.problem if stored is not None else None
        if problem is None or self._nvme.holds(object_id):
            return
        if isinstance(problem, (NoSpace, Superseded)):  # or it made room in DRAM before it was written
            raise NoSpace(f"object {object_id} found no room in the NVMe tier")
        raise DeviceFailed(f"object {object_id} was not written: {problem}")

    def rename(self, bucket: Bucket, name: Name, row: NameRow, size_bytes: int | None = None) -> None:
        """Rename a snapshot; `size_bytes`: of what is durable, where the draft may have grown since."""
        stored = self._nvme.objects.get(row.object_id)
        if stored is not None:
            stored.bucket_id = bucket.bucket_id
            size_bytes = stored.size_bytes if size_bytes is None else size_bytes
            self._name(stored, name, replace(row, size_bytes=size_bytes))

    def keep(self, object_id: int, bucket: Bucket, name: Name, row: NameRow) -> Stored:
        """Make a snapshot the sealed object whose bytes it has already."""
        self.index.remove(object_id)
        stored = self._nvme.objects[object_id]
        self._nvme.keep(stored, bucket.durable or bool(row.flags & PINNED))
        self._name(stored, name, row)
        return stored

    def _name(self, stored: Stored, name: Name, row: NameRow) -> None:
        stored.ticket = self._nvme.put_name(stored, MetaBody(name.bucket, name.key, row))
        self._tickets.required = stored.ticket

    def is_same(self, object_id: int, descriptor: int) -> bool:
        """Return whether a snapshot has exactly the bytes of this file."""
        stored, size_bytes = self._nvme.objects.get(object_id), os.fstat(descriptor).st_size
        if stored is None or not stored.readable or stored.size_bytes != size_bytes:
            return False
        step = self._nvme.pool.extent_bytes
        return all(
            piece is not None and xxh3_64(os.pread(descriptor, step, number * step)) == piece.checksum
            for number, piece in enumerate(stored.pieces if size_bytes else ())
        )
