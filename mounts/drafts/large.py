"""Files that are written extent by extent to NVMe, since they may be larger than DRAM takes (tiers.nvme.large_objects).

Responsibility: what differs in the life of such a draft: it has no slot, so that every read and write comes here; its
size and times are its own; it is published once all extents are written.

Concurrency: the service's trio thread. Bytes wait for the device; the draft keeps them in order.
"""

from __future__ import annotations

import os

import trio

from kvfs import limits
from mounts.kernel.attributes import LargeStatus
from tiers.model.objects import ObjectInfo
from tiers.nvme.large_draft import LargeDraft
from tiers.store.store import Store

COPY_BYTES = 1 * limits.MIB
"""Bytes copied in one step of an object in DRAM that is opened for writing: 0.3 ms."""


def status_of(draft: LargeDraft) -> LargeStatus:
    """Return size and times as `stat` shows them."""
    size, times = draft.size_bytes, draft.times
    return LargeStatus(size, -(-size // 512), times.atime_ns, times.mtime_ns, times.ctime_ns)


async def begin_copy(store: Store, bucket: bytes, info: ObjectInfo, *, uid: int) -> LargeDraft:
    """Begin a draft with a sealed object's bytes, which are copied only where DRAM alone has them.

    Raises NoSpace, and what `Store.begin_large` raises.
    """
    if store.journal.holds(info.object_id):
        return store.begin_large(bucket, uid=uid, base=info)
    descriptor = store.open_read(info, uid=uid)
    try:
        draft = store.begin_large(bucket, uid=uid)
        try:
            for offset in range(0, info.size_bytes, COPY_BYTES):
                await draft.write(offset, os.pread(descriptor, COPY_BYTES, offset))
                await trio.lowlevel.checkpoint()
        except BaseException:
            draft.close()
            raise
        return draft
    finally:
        os.close(descriptor)
