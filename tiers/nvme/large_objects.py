"""Objects larger than DRAM takes: read in place, and written extent by extent to NVMe.

Responsibility: leases for reading in place; drafts begun, made durable, renamed and sealed. Their bytes are
`tiers.nvme.large_draft`'s.

Invariants: what is read is held in the tier (`NvmeTier.hold`) until it is closed.
Concurrency: the service's trio thread.
"""

from __future__ import annotations

from kvfs.errors import NotFound
from kvfs.index.rows import PINNED, NameRow
from tiers.log.entries import Barrier
from tiers.log.records import MetaBody
from tiers.model.objects import Bucket, Name
from tiers.nvme.extent_reader import ExtentReader
from tiers.nvme.large_buffers import LargeBuffers, spans
from tiers.nvme.large_draft import LargeDraft
from tiers.nvme.snapshots import Snapshots
from tiers.nvme.stored import Stored
from tiers.nvme.tickets import Tickets
from tiers.nvme.tier import NvmeTier


class LargeReader:
    """Reads an object in place; the lease ends with `close`."""

    def __init__(self, buffers: LargeBuffers, stored: Stored) -> None:
        buffers.nvme.hold(stored)
        buffers.opened(1)
        self._buffers = buffers
        self._stored = stored
        self._next = 0
        """The extent that follows the one read last."""

    @property
    def size_bytes(self) -> int:
        """Return the object's size."""
        return self._stored.size_bytes

    async def read(self, offset: int, size: int) -> bytes:
        """Return a range, short only at the end. Raises Corrupt, Superseded (damaged before), DeviceFailed."""
        parts = []
        for number, start, count in spans(
            offset, min(size, self.size_bytes - offset), self._buffers.extent_bytes
        ):
            if number == self._next:
                self._buffers.cache.read_ahead(self._stored, number + 1)
            self._next = number + 1
            parts.append(await self._buffers.cache.copy(self._stored, number, start, count))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """End the lease."""
        self._buffers.nvme.release(self._stored)
        self._buffers.opened(-1)


class LargeObjects:
    """Opens readers and begins drafts of one NVMe tier."""

    def __init__(self, nvme: NvmeTier, reader: ExtentReader, tickets: Tickets, snapshots: Snapshots) -> None:
        self._nvme, self._tickets, self._snapshots = nvme, tickets, snapshots
        self._buffers = LargeBuffers(nvme, reader)

    async def run(self) -> None:
        """Read ahead, until cancelled."""
        await self._buffers.cache.run()

    def open(self, object_id: int) -> LargeReader:
        """Take a lease on an object. Raises NotFound, QuotaExceeded."""
        return LargeReader(self._buffers, self._need(object_id))

    def begin(self, object_id: int, bucket_id: int, *, uid: int, base: int | None = None) -> LargeDraft:
        """Begin a draft, of the bytes of object `base` where that is given. Raises NotFound, QuotaExceeded."""
        return LargeDraft(
            self._buffers, object_id, bucket_id, uid, None if base is None else self._need(base)
        )

    async def persist(self, draft: LargeDraft, bucket: Bucket, name: Name, row: NameRow) -> None:
        """Make what was written of a draft durable under a name. Raises NoSpace, DeviceFailed."""
        self._snapshots.note(row.object_id)
        draft.stored.bucket_id = bucket.bucket_id
        await self._nvme.log.settle(self._nvme.put_name(draft.stored, MetaBody(name.bucket, name.key, row)))
        draft.check()

    def rename(self, draft: LargeDraft, bucket: Bucket, name: Name, row: NameRow) -> None:
        """Rename what `persist` made durable."""
        self._snapshots.rename(bucket, name, row, draft.persisted_bytes)

    def keep_order(self) -> None:
        """Have what is queued from here on written once all before it is durable."""
        self._nvme.log.append(Barrier())

    def sealed(
        self, draft: LargeDraft, bucket: Bucket, name: Name, row: NameRow, replaced: int | None
    ) -> None:
        """Note that a draft has its name, in the place of object `replaced`."""
        stored = draft.stored
        self._snapshots.index.remove(stored.object_id)
        stored.bucket_id, stored.sealed_at_ns = bucket.bucket_id, row.mtime_ns
        self._nvme.keep(stored, bucket.durable or bool(row.flags & PINNED))
        stored.ticket = self._nvme.put_name(stored, MetaBody(name.bucket, name.key, row))
        if bucket.durable:
            self._tickets.required = stored.ticket
        self._nvme.counts.objects_written += 1
        self._nvme.counts.bytes_written += stored.size_bytes
        self._tickets.drop(replaced, behind=True, awaited=not bucket.durable)

    def _need(self, object_id: int) -> Stored:
        stored = self._nvme.objects.get(object_id)
        if stored is None or not stored.readable:
            raise NotFound(f"object {object_id} is not in the NVMe tier")
        return stored
