"""Uploads to the cold tier, and deletions there.

Responsibility: take objects from the queue, verify and send them, and count them once they are whole; delete in
batches. `tiers.cold.tier` decides which objects.

Invariants:
- An object that changed, moved or went while it was sent is looked at again before it counts: what nobody wants any
  more is deleted.
- Room is made before anything is sent, and what is being deleted counts until it is.
- A failure costs no object: it waits, and the next try comes later after each failure (limits.COLD_BACKOFF_S).

Concurrency: limits.COLD_UPLOADS tasks that send, one that deletes; requests in the tier's threads.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass, field
from functools import partial

import trio

from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from kvfs._native.shared.table import TIER_COLD
from kvfs.errors import Corrupt, InvalidRequest, KvfsError, NoSpace, NotFound, Superseded, TierUnreachable
from kvfs.formats import RECORD_ALIGNMENT
from kvfs.index.rows import store_row
from kvfs.system import crashpoints
from kvfs.system.pauses import Pause
from tiers.cold.format import BUCKETS, HEADER_BYTES, ColdHeader, ColdName
from tiers.cold.index import ColdRow
from tiers.cold.tier import ColdTier
from tiers.model.objects import ObjectInfo
from tiers.model.tier import Kind

log = logging.getLogger("kvfs.cold")


class _NotYet(Exception):
    """Says that an object has no checksum so far, or is not verified after a start, and is sent later."""


@dataclass(slots=True, eq=False)
class Uploader:
    """Runs the tasks that send and delete, for one tier."""

    tier: ColdTier
    _work: trio.Event = field(default_factory=trio.Event)
    _room: trio.Event = field(default_factory=trio.Event)
    """Ends when something was deleted."""
    _sent_buckets: dict[bytes, bytes] = field(default_factory=dict)
    """Names of buckets and their rows as they are beside their blocks."""

    async def run(self) -> None:
        """Send and delete, until cancelled."""
        self.tier.on_work = self._wake
        async with trio.open_nursery() as nursery:
            for _ in range(limits.COLD_UPLOADS):
                nursery.start_soon(self._send_all)
            nursery.start_soon(self._delete_all)
            nursery.start_soon(self._requeue)

    def _wake(self) -> None:
        self._work.set()
        self._work = trio.Event()

    async def _requeue(self) -> None:
        """Queue what an earlier service had not sent yet, until the queue is full."""
        for count, (digest, entry) in enumerate(self.tier.table.items()):
            if count % 1000 == 0:
                await trio.lowlevel.checkpoint()
            wanted = not entry.tiers & TIER_COLD and (self.tier.admits_all or entry.hits > 0)
            if wanted and not self.tier.enqueue(digest):
                return

    async def _send_all(self) -> None:
        pause = Pause(limits.COLD_BACKOFF_S, limits.MAX_COLD_BACKOFF_S)
        while True:
            while not (self.tier.is_up and self.tier.queue):
                await self._work.wait()
            digest, _ = self.tier.queue.popitem(last=False)
            try:
                await self._send(digest)
                pause.succeeded()
            except (TierUnreachable, NoSpace) as error:
                self.tier.counts.errors += 1
                log.warning("cold tier: nothing is sent for a while: %s", error)
                self.tier.enqueue(digest)
                self.tier.on_failure()
                await trio.sleep(pause.failed(trio.current_time()))
            except InvalidRequest as error:
                self.tier.counts.refused += 1
                self.tier.pass_over(digest)
                log.warning("cold tier: %s", error)
            except _NotYet:
                self.tier.enqueue(digest)
                await trio.sleep(limits.WRITE_BEHIND_POLL_S)
            except (NotFound, Superseded):
                pass  # it went meanwhile
            except KvfsError as error:
                log.log(error.log_level, "cold tier: %s", error)

    async def _send(self, digest: bytes) -> None:
        """Send one object, if it is still there and not yet in the tier."""
        tier = self.tier
        found = self._wanted(digest)
        if found is None:
            return
        name, info = found
        size_bytes = info.size_bytes + HEADER_BYTES
        if str(name) in tier.writing or str(name) in tier.deleting:
            return
        tier.writing[str(name)] = size_bytes
        try:
            await self._make_room()
            payload, checksum = await self._payload(info)
            header = ColdHeader(name, info.size_bytes, checksum, info.mtime_ns, info.uid)
            if name.key.kind is Kind.BLOCK:
                await self._send_bucket(name.bucket)
            parts: list[bytes | memoryview] = [header.encode(tier.store_id), payload]
            await tier.in_thread(partial(tier.bucket.put, str(name), parts))
        finally:
            del tier.writing[str(name)]
        crashpoints.reach("cold.after_put")
        self._count(name, info)

    def _wanted(self, digest: bytes) -> tuple[ColdName, ObjectInfo] | None:
        """Return an object that is to be sent; None for one that is not, or not any more."""
        store = self.tier.store
        name = store.cold_name(digest)
        info = None if name is None else store.lookup_object(name.key)
        if name is None or info is None or digest in self.tier:
            return None
        bucket = store.bucket(name.bucket if info.name is None else info.name.bucket)
        unfit = bucket.durable or bucket.name.startswith(b".")  # durable, or a door's own
        if unfit or info.size_bytes > self.tier.largest_object_bytes or store.is_large(info):
            self.tier.pass_over(digest)
            return None
        return name, info

    async def _make_room(self) -> None:
        """Wait until what is on its way up fits, evicting for it. Raises NoSpace."""
        tier = self.tier
        while (over := tier.used_bytes - tier.capacity_bytes) > 0:
            if over > tier.deleting_bytes:
                tier.evict(over - tier.deleting_bytes)
            if not tier.deleting:
                raise NoSpace(f"{tier.capacity_bytes} bytes are full of what is being sent")
            await self._room.wait()

    async def _payload(self, info: ObjectInfo) -> tuple[memoryview, int]:
        """Read the object's bytes, verified, into memory that lasts as long as the view; return them and their XXH3-64.

        Raises _NotYet, Superseded, Corrupt, InvalidRequest (too large to be read from NVMe for this).
        """
        dram = self.tier.dram
        if not info.size_bytes:
            return memoryview(b""), xxh3_64(b"")
        if info.extent is not None:
            known = dram.checksum(info.extent)
            if known is None:
                raise _NotYet
            view = _mapped(dram.open_sealed(info.extent), info.size_bytes)
        elif info.tier == "dram":
            raise _NotYet
        elif info.size_bytes <= limits.COLD_BUFFER_BYTES:
            units = -(-info.size_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
            buffer, known = memoryview(mmap.mmap(-1, units)), None
            await self.tier.journal.read_into(info.object_id, buffer)
            view = buffer[: info.size_bytes]
        else:
            raise InvalidRequest(
                f"object {info.object_id} of {info.size_bytes} bytes has left DRAM: "
                f"up to {limits.COLD_BUFFER_BYTES} are sent from NVMe"
            )
        found = await self.tier.in_thread(partial(xxh3_64, view))
        if known is not None and found != known:
            raise Corrupt(f"object {info.object_id} does not match its checksum, and is not sent")
        return view, found

    async def _send_bucket(self, bucket: bytes) -> None:
        """Send the bucket's row beside its blocks: without the index nothing else would say whose they are."""
        row = self.tier.names.get_bucket(bucket)
        data = b"" if row is None else store_row(bucket, row.encode())
        if data and self._sent_buckets.get(bucket) != data:
            await self.tier.in_thread(partial(self.tier.bucket.put, BUCKETS + bucket.decode(), [data]))
            self._sent_buckets[bucket] = data

    def _count(self, name: ColdName, info: ObjectInfo) -> None:
        """Count an object that was sent, unless its key stands for another one by now."""
        tier = self.tier
        if tier.store.cold_name(name.key.digest) != name:
            tier.delete(str(name), info.size_bytes + HEADER_BYTES)
            return
        tier.add(name, ColdRow(info.size_bytes, info.uid, info.mtime_ns))
        crashpoints.reach("cold.after_row")
        tier.store.note_copy(name.key, TIER_COLD)
        tier.counts.uploads += 1
        tier.counts.uploaded_bytes += info.size_bytes

    async def _delete_all(self) -> None:
        tier = self.tier
        pause = Pause(limits.COLD_BACKOFF_S, limits.MAX_COLD_BACKOFF_S)
        while True:
            while not (tier.is_up and tier.deleting):
                await self._work.wait()
            names = list(tier.deleting)[: limits.MAX_DELETE_KEYS]
            try:
                left = set(await tier.in_thread(partial(tier.bucket.delete, names)))
            except KvfsError as error:
                tier.counts.errors += 1
                log.warning("cold tier: %d objects are not deleted yet: %s", len(tier.deleting), error)
                tier.on_failure()
                await trio.sleep(pause.failed(trio.current_time()))
                continue
            crashpoints.reach("cold.after_delete")
            for name in names:
                if name not in left:
                    tier.deleting_bytes -= tier.deleting.pop(name)
                    tier.counts.deleted += 1
            self._room.set()
            self._room = trio.Event()
            if left:
                log.warning("cold tier: %d objects could not be deleted, such as %s", len(left), min(left))
                await trio.sleep(pause.failed(trio.current_time()))
            else:
                pause.succeeded()


def _mapped(descriptor: int, size_bytes: int) -> memoryview:
    """Map a sealed slot's bytes; the mapping is the lease. Closes `descriptor`."""
    try:
        return memoryview(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


async def upload(tier: ColdTier) -> None:
    """Send and delete, until cancelled."""
    await Uploader(tier).run()
