"""The cold tier: copies of cached objects in an S3 bucket elsewhere, which the store's own tiers may lose.

Responsibility: which objects are there, what goes up and what leaves, and reading one back. The requests are
`tiers.cold_bucket`'s, going up and leaving `tiers.cold_traffic`'s, whether the endpoint can be used
`tiers.cold_health`'s, and agreement with what the bucket lists `tiers.cold_compare`'s. `Cold` is a store without the
tier: nothing to do.

Invariants:
- An object has the tier's bit in the shared table exactly while its row is in the index (`tiers.cold_index`), and then
  the remote object is whole. The row goes first when an object is removed.
- Only what DRAM or NVMe has, sealed and with a checksum, goes up. Durable objects do not: NVMe never evicts them.
- `used_bytes` counts what is there, on its way there, and not yet deleted there; it never passes the capacity.
- While the endpoint cannot be used (`is_up`), what only this tier has is a miss: blocks match nothing, and other
  objects are not found when they are read. Nothing of it is forgotten.

Concurrency: the service's trio thread. The hooks (`sealed`, `touched`, `removed`) return at once; requests run in
worker threads of the tier's own number, which own the memory that they work on, so that none is waited for that hangs.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from kvfs import limits
from kvfs._native.table import TIER_COLD
from kvfs.errors import Corrupt, FormatMismatch, NoSpace, NotFound, TierUnreachable
from tiers.base import StoreKey
from tiers.cold_bucket import ColdBucket, ColdOptions
from tiers.cold_format import HEADER_BYTES, ColdName, check_payload, decode_header
from tiers.cold_health import keep_up
from tiers.cold_index import ColdIndex, ColdRow
from tiers.cold_traffic import Carrier
from tiers.eviction import policy_named
from tiers.model import Bucket, ObjectInfo

if TYPE_CHECKING:
    from tiers.store import TieredStore

log = logging.getLogger("kvfs.cold")

T = TypeVar("T")


class Cold:
    """A store without a cold tier."""

    def usage(self) -> list[dict[str, Any]]:
        return []

    def sealed(self, key: StoreKey, bucket: Bucket) -> None:
        """An object was sealed."""

    def touched(self, key: StoreKey) -> None:
        """An object was read."""

    def removed(self, name: ColdName) -> None:
        """The copy of an object is to go; twice is harmless."""

    def block_removed(self, digest: bytes) -> None:
        """Somebody asked for a block to be removed."""

    def expendable(self) -> Iterable[StoreKey]:
        """Objects that the tier has, the first to leave first."""
        return ()

    async def fetch(self, info: ObjectInfo, descriptor: int) -> int:
        """Fill a draft with an object's bytes; their XXH3-64. Raises NotFound, NoSpace."""
        raise NotFound(f"object {info.object_id} is gone")

    async def run(self) -> None:
        """Do the tier's work, until cancelled."""
        await trio.sleep_forever()


@dataclass(slots=True)
class ColdCounts:
    """What status and metrics show."""

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


class ColdTier(Cold):
    """See the module's header. Made by `tiers.cold_restore.ColdHeritage`."""

    def __init__(self, store: TieredStore, index: ColdIndex, options: ColdOptions) -> None:
        self.store = store
        self.index = index
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
        self.leaving: OrderedDict[str, int] = OrderedDict()
        """Names and bytes of what is to be deleted; never more than there was, since nothing goes up meanwhile."""
        self.leaving_bytes = 0
        self.changed_names: set[str] | None = None
        """Names that came or left while a listing is held against the index."""
        self.on_work: Callable[[], None] = lambda: None
        """Told when there is something to send up or to delete."""
        self.on_failure: Callable[[], None] = lambda: None
        """Told when the endpoint failed."""
        self._unfit: OrderedDict[bytes, None] = OrderedDict()
        self._is_complete = index.is_complete
        self._admits_all = options.admits_all
        self._order = policy_named("lru-leaf")
        self._fetches = trio.CapacityLimiter(limits.COLD_FETCHES)
        self._threads = trio.CapacityLimiter(limits.COLD_THREADS)
        store.table.hide(TIER_COLD)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to be found in the bucket (`ColdIndex.is_complete`)."""
        return self._is_complete

    @is_complete.setter
    def is_complete(self, value: bool) -> None:
        self.index.is_complete = self._is_complete = value

    # --- books --------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._order.total_bytes + sum(self.writing.values()) + self.leaving_bytes

    @property
    def largest_object_bytes(self) -> int:
        return min(self.capacity_bytes // limits.OBJECT_SHARE_OF_COLD, limits.MAX_COLD_OBJECT_BYTES)

    def usage(self) -> list[dict[str, Any]]:
        found = {
            "name": "cold",
            "backing": self.bucket.place,
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes,
            "objects": len(self._order),
            "queued": len(self.queue),
            "leaving": len(self.leaving),
            "is_up": self.is_up,
            "trouble": "" if self.is_up else self.trouble,
        }
        return [found | asdict(self.counts)]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._order

    def know(self, name: ColdName, size_bytes: int) -> None:
        """An object is there, as used now."""
        self._order.insert(
            name.key.digest,
            size_bytes=size_bytes + HEADER_BYTES,
            parent=name.parent_or_none,
            now=time.monotonic(),
        )

    def add(self, name: ColdName, row: ColdRow) -> None:
        """A remote object is whole: it counts from here on."""
        self.index.put(str(name), row)
        self.know(name, row.size_bytes)
        self.note_change(str(name))

    def note_change(self, name: str) -> None:
        if self.changed_names is not None:
            self.changed_names.add(name)

    def delete(self, name: str, size_bytes: int) -> None:
        """Have a remote object deleted; `size_bytes` with its header."""
        self.note_change(name)
        self.leaving_bytes += size_bytes - self.leaving.get(name, 0)
        self.leaving[name] = size_bytes
        self.on_work()

    # --- what the store tells -----------------------------------------------------------------------------

    def sealed(self, key: StoreKey, bucket: Bucket) -> None:
        if self._admits_all and not bucket.durable:
            self.enqueue(key.digest)

    def touched(self, key: StoreKey) -> None:
        if key.digest not in self._order and key.digest not in self._unfit:
            self.enqueue(key.digest)

    def pass_over(self, digest: bytes) -> None:
        """An object is none for this tier: its next reads need not ask again."""
        self._unfit[digest] = None
        if len(self._unfit) > limits.COLD_QUEUE:
            self._unfit.popitem(last=False)

    def enqueue(self, digest: bytes) -> bool:
        """Have an object go up when its turn comes; False where too many wait."""
        if digest not in self.queue:
            if len(self.queue) >= limits.COLD_QUEUE:
                return False
            self.queue[digest] = None
            self.on_work()
        return True

    def wants(self, hits: int) -> bool:
        """Whether an object with so many reads is to go up."""
        return self._admits_all or hits > 0

    def block_removed(self, digest: bytes) -> None:
        if not self.is_complete:
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
                entry = self.store.table.get(digest)
                if entry is not None:
                    yield self.store.key_of(digest)

    def evict(self, size_bytes: int) -> None:
        """Let the least recently used go, leaves first, until so many bytes are to be deleted."""
        for group in self._order.victims(size_bytes, time.monotonic()):
            for digest in group:
                self.counts.evicted += 1
                self.lose(digest)

    def lose(self, digest: bytes) -> None:
        """The tier has this object no more; where no other has it, it leaves the store with what needs it."""
        for object_id in self.store.lose_copy(self.store.key_of(digest), TIER_COLD):
            self.store.journal.removed(object_id)

    # --- reading ------------------------------------------------------------------------------------------

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
            self._lose_if(name)
            raise
        except (Corrupt, FormatMismatch) as error:
            self.counts.corrupt += 1
            log.error("object %d in the cold tier: %s", info.object_id, error)
            self._lose_if(name)
            raise NotFound(f"object {info.object_id} is gone: {error}") from error

    def _lose_if(self, name: ColdName) -> None:
        """Unless the key stands for another object by now."""
        if self.store.cold_name(name.key.digest) == name and name.key.digest in self._order:
            self.lose(name.key.digest)

    def failed(self, error: TierUnreachable) -> None:
        """The endpoint does not answer: what only it has is a miss until it does."""
        if self.is_up:
            self.is_up = False
            self.store.table.hide(TIER_COLD)
            log.warning(
                "cold tier %s cannot be used, what only it has is a miss: %s", self.bucket.place, error
            )
        self.trouble = str(error)
        self.on_failure()

    def recovered(self) -> None:
        """The endpoint answers, and the prefix is this store's."""
        if not self.is_up:
            self.is_up = True
            self.trouble = ""
            self.store.table.hide(0)
            log.info("cold tier %s: %d objects", self.bucket.place, len(self._order))
            self.on_work()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what may block, in a thread of the tier's. Cancelled, it is left to end by itself."""
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_up, self)
            nursery.start_soon(Carrier(self).run)


class OwnDescriptor:
    """A copy of a descriptor that lasts as long as somebody has it: a thread that nobody waits for any more still owns
    what it writes to, and one that never began leaves nothing open."""

    def __init__(self, descriptor: int) -> None:
        self.number = os.dup(descriptor)

    def __del__(self) -> None:
        os.close(self.number)


def receive(bucket: ColdBucket, name: ColdName, size_bytes: int, file: OwnDescriptor) -> int:
    """Read an object into a draft's file, verified; its checksum.

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
