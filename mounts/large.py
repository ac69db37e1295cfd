"""Files that are written extent by extent to NVMe, since they may be larger than DRAM takes (tiers.large).

Responsibility: what differs for them in a draft's life on the mount: there is no slot behind them, so that every
read and write comes here; sizes and times are the draft's own; they are published once all extents are written.

Concurrency: the service's trio thread. Bytes wait for the device; the draft keeps them in order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import trio

from kvfs import limits
from mounts.nodes import OpenDraft
from tiers.large import LargeDraft
from tiers.model import ObjectInfo
from tiers.store import TieredStore

COPY_BYTES = 1 * limits.MIB
"""Of an object in DRAM that is opened for writing, at once: 0.3 ms."""


@dataclass(frozen=True, slots=True)
class LargeStatus:
    """Size and times as `stat` shows them."""

    st_size: int
    st_blocks: int
    st_atime_ns: int
    st_mtime_ns: int
    st_ctime_ns: int


def status_of(draft: LargeDraft) -> LargeStatus:
    size, times = draft.size_bytes, draft.times
    return LargeStatus(size, -(-size // 512), times.atime_ns, times.mtime_ns, times.ctime_ns)


def large_of(opened: OpenDraft | None) -> LargeDraft | None:
    """The draft, if it is one of these."""
    return opened.draft if opened is not None and isinstance(opened.draft, LargeDraft) else None


async def begin_copy(store: TieredStore, bucket: bytes, info: ObjectInfo, *, uid: int) -> LargeDraft:
    """A draft with a sealed object's bytes, which are copied only where DRAM alone has them. Raises what `begin_large`
    does, NoSpace."""
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
