"""The cold tier: copies of cached objects in an S3 bucket elsewhere, which the store's own tiers may evict.

Responsibility: which objects are there, which are sent or evicted, and reading one back. Requests are
`tiers.cold.bucket`'s, uploads and deletions `tiers.cold.uploader`'s, the endpoint's state `tiers.cold.health`'s, the
comparison with the bucket's listing `tiers.cold.reconcile`'s.

Invariants:
- An object has the tier's bit in the shared table exactly while its row is in the index (`tiers.cold.index`), and then
  the remote object is whole. The row goes first when an object is removed.
- Only what DRAM or NVMe has, sealed and with a checksum, goes up. Durable objects do not: NVMe never evicts them.
- `used_bytes` counts what is there, on its way there, and not yet deleted there; it never passes the capacity.
- While the endpoint cannot be used (`is_up`), what only this tier has is a miss: blocks match nothing, and other
  objects are not found when they are read. All of it stays in the index.

Concurrency: the service's trio thread. The hooks (`sealed`, `touched`, `removed`) return at once; requests run in
worker threads of the tier's own number, which own the memory that they work on, so that none is waited for that hangs.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import trio

from kvfs import limits
from kvfs._native.shared.table import TIER_COLD
from kvfs.errors import Corrupt, FormatMismatch, NoSpace, NotFound, TierUnreachable
from kvfs.index.names import NameIndex
from kvfs.index.rows import BucketRow
from tiers.cold.bucket import ColdBucket, ColdOptions
from tiers.cold.copies import ColdCopies, ColdStore
from tiers.cold.format import HEADER_BYTES, ColdName, check_payload, decode_header
from tiers.cold.index import ColdIndex, ColdRow
from tiers.dram.tier import DramTier
from tiers.eviction.policy import policy_named
from tiers.model.objects import Bucket, ObjectInfo
from tiers.model.tier import StoreKey
from tiers.nvme.journal import Journal

log = logging.getLogger("kvfs.cold")

T = TypeVar("T")


@dataclass(slots=True)
class ColdCounts:
    """Counts what status and metrics show."""

    uploads: int = 0
    uploaded_bytes: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    missed: int = 0
    """Reads that the endpoint did not answer, or not in time."""
    evicted: int = 0
    deleted: int = 0
    adopted: int = 0
    lost: int = 0
    """Objects that were no longer in the bucket."""
    corrupt: int = 0
    refused: int = 0
    """Objects that the bucket did not take."""
    errors: int = 0
    """Requests that failed, besides reads."""


class ColdTier(ColdCopies):
    """See the module's header. Made by `tiers.recovery.cold_copies.ColdRecovery`."""

    def __init__(
        self,
        index: ColdIndex,
        options: ColdOptions,
        names: NameIndex,
        dram: DramTier,
        journal: Journal,
        store_id: bytes,
        tasks: Sequence[Callable[[ColdTier], Awaitable[None]]],
    ) -> None:
        """Make the tier, still empty. `tasks`: what `run` runs, side by side."""
        self.names, self.dram, self.journal, self.store_id = names, dram, journal, store_id
        self.table = dram.table
        self.index = index
        self._tasks = tasks
        self.store: ColdStore
        self.adopt_bucket: Callable[[BucketRow], None]
        self.bucket: ColdBucket = options.bucket
        self.capacity_bytes = options.capacity_bytes
        self.take_over = options.take_over
        self.counts = ColdCounts()
        self.is_up = False
        """Whether the endpoint answers and the prefix is this store's."""
        self.trouble = "not looked at yet"
        """Why it is not."""
        self.queue: OrderedDict[bytes, None] = OrderedDict()
        """Keys of objects that are to go up."""
        self.writing: dict[str, int] = {}
        """Names and bytes of what is on its way up."""
        self.deleting: OrderedDict[str, int] = OrderedDict()
        """Names and bytes of what is to be deleted; never more than there was, since nothing goes up meanwhile."""
        self.deleting_bytes = 0
        self.changed_names: set[str] | None = None
        """Names that came or went while a listing is compared with the index."""
        self.on_work: Callable[[], None] = lambda: None
        """Called when there is something to send up or to delete."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the endpoint failed."""
        self._unfit: OrderedDict[bytes, None] = OrderedDict()
        self.admits_all = options.admits_all
        self._order = policy_named("lru-leaf")
        self._fetches = trio.CapacityLimiter(limits.COLD_FETCHES)
        self._threads = trio.CapacityLimiter(limits.COLD_THREADS)
        self.table.hide(TIER_COLD)

    def attach(self, store: ColdStore, adopt_bucket: Callable[[BucketRow], None]) -> None:
        self.store, self.adopt_bucket = store, adopt_bucket

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the bucket's objects, of those on their way there, and of those still to be deleted."""
        return self._order.total_bytes + sum(self.writing.values()) + self.deleting_bytes

    @property
    def largest_object_bytes(self) -> int:
        """Return the size above which an object is not copied: a share of the capacity, and a fixed limit."""
        return min(self.capacity_bytes // limits.OBJECT_SHARE_OF_COLD, limits.MAX_COLD_OBJECT_BYTES)

    def usage(self) -> list[dict[str, Any]]:
        found = {
            "name": "cold",
            "backing": self.bucket.place,
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes,
            "objects": len(self._order),
            "queued": len(self.queue),
            "leaving": len(self.deleting),
            "is_up": self.is_up,
            "trouble": "" if self.is_up else self.trouble,
        }
        return [found | asdict(self.counts)]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._order

    def enter(self, name: ColdName, size_bytes: int) -> None:
        """Count an object that is there, as used now."""
        self._order.insert(
            name.key.digest,
            size_bytes=size_bytes + HEADER_BYTES,
            parent=name.parent_or_none,
            now=time.monotonic(),
        )

    def add(self, name: ColdName, row: ColdRow) -> None:
        """Count a remote object that is whole."""
        self.index.put(str(name), row)
        self.enter(name, row.size_bytes)
        self.note_change(str(name))

    def note_change(self, name: str) -> None:
        """Note that a remote name came or went, for a comparison under way."""
        if self.changed_names is not None:
            self.changed_names.add(name)

    def delete(self, name: str, size_bytes: int) -> None:
        """Have a remote object deleted; `size_bytes` with its header."""
        self.note_change(name)
        self.deleting_bytes += size_bytes - self.deleting.get(name, 0)
        self.deleting[name] = size_bytes
        self.on_work()

    def sealed(self, key: StoreKey, bucket: Bucket) -> None:
        if self.admits_all and not bucket.durable:
            self.enqueue(key.digest)

    def touched(self, key: StoreKey) -> None:
        if key.digest not in self._order and key.digest not in self._unfit:
            self.enqueue(key.digest)

    def pass_over(self, digest: bytes) -> None:
        """Remember that this tier does not take an object: its next reads need not ask again."""
        self._unfit[digest] = None
        if len(self._unfit) > limits.COLD_QUEUE:
            self._unfit.popitem(last=False)

    def enqueue(self, digest: bytes) -> bool:
        """Queue an object to be sent up; return False where too many wait."""
        if digest not in self.queue:
            if len(self.queue) >= limits.COLD_QUEUE:
                return False
            self.queue[digest] = None
            self.on_work()
        return True

    def block_removed(self, digest: bytes) -> None:
        if not self.index.is_complete:
            self.index.forbid(digest)

    def removed(self, name: ColdName) -> None:
        digest = name.key.digest
        if digest not in self._order:
            return
        self.index.remove(str(name))
        before_bytes = self._order.total_bytes
        self._order.remove(digest)
        self.delete(str(name), before_bytes - self._order.total_bytes)

    def expendable(self) -> Iterable[StoreKey]:
        for group in self._order.victims(self._order.total_bytes, time.monotonic()):
            for digest in group:
                entry = self.table.get(digest)
                if entry is not None:
                    yield self.store.key_of(digest)

    def evict(self, size_bytes: int) -> None:
        """Evict the least recently used, blocks before their ancestors, until so many bytes are to be deleted."""
        for group in self._order.victims(size_bytes, time.monotonic()):
            for digest in group:
                self.counts.evicted += 1
                self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Drop the tier's copy; the store evicts an object that no other tier has, with what needs it."""
        for object_id in self.store.drop_copy(self.store.key_of(digest), TIER_COLD):
            self.journal.removed(object_id)

    async def fetch(self, info: ObjectInfo, descriptor: int) -> int:
        name = self.store.cold_name(info.key.digest)
        if name is None or info.key.digest not in self._order:
            raise NotFound(f"object {info.object_id} is gone")
        if not self.is_up:
            self.counts.missed += 1
            raise NotFound(
                f"object {info.object_id} is in the cold tier, which cannot be read: {self.trouble}"
            )
        with trio.move_on_after(limits.COLD_FETCH_S):
            checksum = await self._fetch(name, info, descriptor)
            self.counts.fetches += 1
            self.counts.fetched_bytes += info.size_bytes
            if info.key.digest in self._order:
                self._order.touch(info.key.digest, time.monotonic())
            return checksum
        self.counts.missed += 1
        raise NotFound(f"object {info.object_id}: the cold tier took longer than {limits.COLD_FETCH_S} s")

    async def _fetch(self, name: ColdName, info: ObjectInfo, descriptor: int) -> int:
        try:
            async with self._fetches:
                file = OwnDescriptor(descriptor)
                return await self.in_thread(partial(receive, self.bucket, name, info.size_bytes, file))
        except TierUnreachable as error:
            self.counts.missed += 1
            self.failed(error)
            raise NotFound(
                f"object {info.object_id} is in the cold tier, which does not answer: {error}"
            ) from error
        except NotFound:
            self.counts.lost += 1
            log.warning("object %d was deleted from the cold tier by somebody else", info.object_id)
            self._drop_if(name)
            raise
        except (Corrupt, FormatMismatch) as error:
            self.counts.corrupt += 1
            log.error("object %d in the cold tier: %s", info.object_id, error)
            self._drop_if(name)
            raise NotFound(f"object {info.object_id} is gone: {error}") from error

    def _drop_if(self, name: ColdName) -> None:
        """Drop a copy, unless the key stands for another object by now."""
        if self.store.cold_name(name.key.digest) == name and name.key.digest in self._order:
            self.drop(name.key.digest)

    def failed(self, error: TierUnreachable) -> None:
        """Note that the endpoint does not answer: what only it has is a miss until it does."""
        if self.is_up:
            self.is_up = False
            self.table.hide(TIER_COLD)
            log.warning(
                "cold tier %s cannot be used, what only it has is a miss: %s", self.bucket.place, error
            )
        self.trouble = str(error)
        self.on_failure()

    def recovered(self) -> None:
        """Note that the endpoint answers, and the prefix is this store's."""
        if not self.is_up:
            self.is_up = True
            self.trouble = ""
            self.table.hide(0)
            log.info("cold tier %s: %d objects", self.bucket.place, len(self._order))
            self.on_work()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what may block in a thread of the tier's; cancelled, the thread ends by itself."""
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for task in self._tasks:
                nursery.start_soon(task, self)


class OwnDescriptor:
    """Owns a copy of a descriptor and closes it with the last reference: a thread that nobody waits for any more still
    owns what it writes to, and of one that never began nothing stays open."""

    def __init__(self, descriptor: int) -> None:
        self.number = os.dup(descriptor)

    def __del__(self) -> None:
        os.close(self.number)


def receive(bucket: ColdBucket, name: ColdName, size_bytes: int, file: OwnDescriptor) -> int:
    """Read an object into a draft's file, verified; return its checksum.

    Raises NotFound, TierUnreachable, Corrupt, FormatMismatch, NoSpace.
    """
    if not size_bytes:
        return _receive_into(bucket, name, memoryview(bytearray()))
    try:
        os.posix_fallocate(file.number, 0, size_bytes)  # a hole in a full tmpfs would be a SIGBUS
    except OSError as error:
        raise NoSpace(f"{name}: {error.strerror}") from error
    mapping = mmap.mmap(file.number, size_bytes)
    try:
        with memoryview(mapping) as payload:
            return _receive_into(bucket, name, payload)
    finally:
        with suppress(BufferError):  # after an error its traceback has a part of it: the collector unmaps
            mapping.close()


def _receive_into(bucket: ColdBucket, name: ColdName, payload: memoryview) -> int:
    head = bytearray(HEADER_BYTES)
    found = bucket.get(str(name), head, payload)
    header = decode_header(bytes(head[:found]), name, len(payload))
    if found != HEADER_BYTES + len(payload):
        raise Corrupt(f"{name}: {found} bytes instead of {HEADER_BYTES + len(payload)}")
    check_payload(payload, header)
    return header.checksum
