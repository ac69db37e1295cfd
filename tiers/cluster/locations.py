"""Which blocks this machine has, as it writes them to the directory behind the store's events.

Responsibility: the changes of blocks, and manifests where something may be missing.

Invariants:
- Reporting a change never waits.
- One task writes, so that a block's changes arrive in their order. A write that failed is followed by a manifest.
- Nothing is written without the lease of this epoch.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Protocol

import trio
import trio.lowlevel

from kvfs import limits
from kvfs._native.shared.table import TIER_DRAM, TIER_NVME
from kvfs.errors import KvfsError
from tiers.cluster.changes import Manifest, PendingChanges
from tiers.cluster.location_format import encode_changes, encode_places
from tiers.cluster.scripts import CHANGE, MANIFEST
from tiers.model.objects import BlockPlaced
from tiers.store.store import Store

_SERVED = TIER_DRAM | TIER_NVME
"""Tiers whose blocks other machines are given."""


class Lease(Protocol):
    """Lets this machine write to the directory, or not."""

    @property
    def is_held(self) -> bool:
        """Return whether the machine is a member that serves blocks, as far as is known."""

    async def write(self, script: str, *arguments: bytes) -> int:
        """Run a script that proves the lease in the same step. Raises KvfsError, also where another has it."""


class Locations:
    """Writes which blocks one store holds, of those whose places begin with some bytes."""

    def __init__(self, store: Store, lease: Lease, first_bytes: range) -> None:
        self._store, self._lease, self._first_bytes = store, lease, first_bytes
        self._pending = PendingChanges()
        self._manifest: Manifest | None = None
        self._manifest_wanted = False
        self._changed = trio.Event()
        self.counts: Counter[str] = Counter()
        """`written` changes, whole `manifests`."""

    @property
    def waiting(self) -> int:
        """Return how many changes wait to be written."""
        return len(self._pending)

    @property
    def is_behind(self) -> bool:
        """Return whether a manifest is still to be written."""
        return self._manifest_wanted

    @property
    def dropped(self) -> int:
        """Return how many changes had no room, which manifests made good."""
        return self._pending.dropped

    @property
    def lag_s(self) -> float:
        """Return how long the oldest change has waited."""
        return self._pending.lag_s(trio.current_time())

    async def run(self) -> None:
        """Write, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            nursery.start_soon(self._ask_for_manifests)

    def note(self, placed: BlockPlaced) -> None:
        """Take up that a block came to a tier, or left one."""
        held = bool(placed.after & _SERVED)
        if held == bool(placed.before & _SERVED) or not self._lease.is_held:
            return
        if held and self._manifest is not None:
            self._manifest.note((placed.digest,))
        if not self._pending.note(placed.digest, held, trio.current_time()):
            self.want_manifest()
        self._changed.set()

    def want_manifest(self) -> None:
        """Have all that this machine holds written again."""
        self._manifest_wanted = True
        self._changed.set()

    def _holds(self, digest: bytes) -> bool:
        entry = self._store.table.get(digest)
        return entry is not None and bool(entry.tiers & _SERVED)

    async def _ask_for_manifests(self) -> None:
        while True:
            await trio.sleep(limits.DIRECTORY_MANIFEST_S)
            self.want_manifest()

    async def _write(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await trio.sleep(limits.DIRECTORY_LINGER_S)
            try:
                while self._lease.is_held and (self._manifest_wanted or self._pending):
                    if self._manifest_wanted:
                        await self._write_manifest()
                    await self._write_changes()
            except (
                KvfsError
            ):  # a manifest says what the write would have said, once there is a connection again
                self._pending.clear()
                self._manifest_wanted = True

    async def _write_changes(self) -> None:
        if changes := self._pending.take():
            await self._lease.write(CHANGE, encode_changes(changes))
            self.counts["written"] += len(changes)

    async def _write_manifest(self) -> None:
        """Write all parts of a manifest, and what changes meanwhile. Raises KvfsError."""
        self._manifest_wanted = False
        self._manifest = manifest = Manifest(self._first_bytes)
        try:
            placed = self._store.placed_blocks()
            while some := [each.digest for each in islice(placed, limits.DIRECTORY_BATCH)]:
                manifest.note(some)
                await trio.lowlevel.checkpoint()
            while not manifest.is_sent:
                part = manifest.take(self._holds)
                places = encode_places(part.digests)
                written = self._lease.write(MANIFEST, b"%d" % part.first, b"%d" % part.count, places)
                manifest.sent(part, await written)
                await self._write_changes()
        finally:
            self._manifest = None
        self.counts["manifests"] += 1
