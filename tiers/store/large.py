"""Objects larger than DRAM takes, under their names: opened, begun, persisted, renamed, sealed.

Responsibility: their names, table entries and listeners; bytes are `tiers.nvme.large_objects`'.

Invariants: as `tiers.store.sealing`; the table entry is put first, since nothing but it refers to the extents.
Concurrency: the service's trio thread; only `persist_large` awaits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_fields

from kvfs._native.shared.table import TIER_NVME
from kvfs.errors import WriterActive
from kvfs.index.names import NameRow
from kvfs.index.rows import SNAPSHOT
from kvfs.system import crashpoints
from tiers.model.objects import Attributes, Change, ChangeKind, Name, ObjectInfo
from tiers.model.tier import NO_SLOT, StoreKey
from tiers.nvme.large_draft import LargeDraft
from tiers.nvme.large_objects import LargeReader
from tiers.store.context import Context
from tiers.store.name_ops import new_row
from tiers.store.placement import Placement
from tiers.store.residency import Residency


class LargeNames:
    """See the module's header."""

    def __init__(
        self, context: Context, residency: Residency, placement: Placement, touch: Callable[[StoreKey], None]
    ) -> None:
        self._catalog, self._listeners, self._journal = context.catalog, context.listeners, context.journal
        self._residency, self._placement, self._touch = residency, placement, touch

    def open_large(self, info: ObjectInfo) -> LargeReader:
        """Take a lease on an object in the NVMe tier; the caller closes it. Raises NotFound, QuotaExceeded."""
        reader = self._journal.large.open(info.object_id)
        self._touch(info.key)
        return reader

    def begin_large(self, bucket: bytes, *, uid: int, base: ObjectInfo | None = None) -> LargeDraft:
        """Begin a draft that is written extent by extent to the NVMe tier, empty or with the bytes of `base`; the
        caller closes it, sealed or not (`abort_large`).

        Raises BucketNotFound, NotFound (`base` is not in that tier), QuotaExceeded, DeviceMissing.
        """
        where = self._catalog.bucket(bucket)
        self._journal.check_queue()
        return self._journal.large.begin(
            self._catalog.names.next_ids(1),
            where.bucket_id,
            uid=uid,
            base=None if base is None else base.object_id,
        )

    async def persist_large(self, draft: LargeDraft, name: Name, attributes: Attributes) -> None:
        """Make what was written so far durable, so that it has its name after a crash.

        Raises NoSpace, DeviceFailed.
        """
        async with draft.settled():
            draft.persisted_bytes = draft.size_bytes
            row, bucket = self._large_row(draft, attributes, SNAPSHOT), self._catalog.bucket(name.bucket)
            await self._journal.large.persist(draft, bucket, name, row)

    def _large_row(self, draft: LargeDraft, attributes: Attributes, flags: int) -> NameRow:
        """Make a row with a sequence of its own: another object may have got the name since this one got its id."""
        size_bytes = draft.persisted_bytes if flags & SNAPSHOT else draft.size_bytes
        row = new_row(draft.object_id, attributes, flags)
        return with_fields(row, size_bytes=size_bytes or 0, sequence=self._catalog.names.next_ids(1))

    def rename_large(self, draft: LargeDraft, name: Name, attributes: Attributes) -> None:
        """Rename what `persist_large` made durable, if it did."""
        if draft.persisted_bytes is not None:
            row = self._large_row(draft, attributes, SNAPSHOT)
            self._journal.large.rename(draft, self._catalog.bucket(name.bucket), name, row)

    def seal_large(
        self,
        draft: LargeDraft,
        name: Name,
        attributes: Attributes,
        *,
        replace: bool = True,
        expected_id: int | None = None,
    ) -> ObjectInfo:
        """Publish a draft under a name, as `Sealing.seal`. Raises WriterActive while some of it is not yet written
        (`LargeDraft.flush`)."""
        self._placement.make_entry_room()
        bucket, old = self._catalog.check_sealable(name, replace=replace, expected_id=expected_id)
        draft.check()
        if not draft.is_written:
            raise WriterActive(f"{name} is not written yet, or is being written")
        stored, digest = draft.stored, draft.stored.key.digest
        row = self._large_row(draft, attributes, 0)
        self._listeners.report_hits()
        kind = int(stored.key.kind)
        self._catalog.table.put(
            digest, kind, NO_SLOT, 0, row.size_bytes, tiers=TIER_NVME, location=stored.place
        )
        try:
            self._catalog.names.put(name.bucket, name.key, row)
        except BaseException:
            self._catalog.table.remove(digest)
            raise
        crashpoints.reach("store.after_index_put")
        self._catalog.name_of[digest] = name
        self._catalog.counts["seals"] += 1
        draft.sealed = True
        self._journal.large.sealed(draft, bucket, name, row, None if old is None else old.object_id)
        self._residency.detach_replaced(old)
        self._listeners.notify(Change(ChangeKind.SEALED, name, stored.key))
        return self._catalog.info(name, row, None, "nvme")

    def abort_large(self, draft: LargeDraft) -> None:
        """End a draft, and drop what was made durable of it; twice is harmless."""
        if not draft.sealed:
            self._journal.removed(draft.object_id)
        draft.close()
