"""Who has which block: the cluster's directory, as one machine writes and reads it.

Responsibility: beats, the writing of changes behind the store's events, manifests where something may be missing, and
lookups. What it knows is soft: the holder decides what it has, and the checksum whether bytes are right.

Invariants:
- Reporting a change never waits, and no read of a block that is here asks the directory.
- One task writes, so that a block's changes arrive in their order. A write that failed is followed by a manifest.
- Nothing is written without the lease of this epoch; a lease that is new is followed by a manifest.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import trio
import trio.lowlevel

from kvfs import limits
from kvfs._native.shared.table import TIER_DRAM, TIER_NVME
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError, KvfsError, TierUnreachable
from tiers.cluster.changes import Manifest, PendingChanges
from tiers.cluster.location_format import decode_holders, encode_changes, encode_places
from tiers.cluster.membership import Membership
from tiers.cluster.redis_server import RedisServer
from tiers.cluster.scripts import BEAT, CHANGE, LOOKUP, MANIFEST, MEMBERS, RELEASE
from tiers.model.objects import BlockPlaced
from tiers.store.store import Store

_SERVED = TIER_DRAM | TIER_NVME
"""Tiers whose blocks other machines are given."""


class Directory:
    """Writes what one store holds, and finds who holds what it lacks."""

    def __init__(self, settings: ClusterSettings, store: Store) -> None:
        """Raises ConfigError."""
        assert settings.directory is not None
        self._store, self._wait_s = store, settings.match_wait_s
        try:
            self._server = RedisServer(settings.directory.get_secret_value())
        except ValueError as error:
            raise ConfigError(f"[cluster] directory: {error}") from None
        self._membership = Membership(store.store_id, settings.advertised, time.time_ns() // 1000)
        self._pending = PendingChanges()
        self._manifest: Manifest | None = None
        self._manifest_wanted = False
        self._changed = trio.Event()
        self._beat_wanted = trio.Event()
        self._beaten_connection = 0
        self._lookups = trio.CapacityLimiter(limits.MAX_DIRECTORY_LOOKUPS)
        self._counts: Counter[str] = Counter()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be a member and write, until cancelled; the first beat need not have been answered when it has started."""
        connected = trio.CancelScope(shield=True)
        async with trio.open_nursery() as server:
            server.start_soon(self._keep_connected, connected)
            self._store.block_listeners.append(self._on_placed)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat)
                    if self._membership.address is not None:
                        nursery.start_soon(self._write)
                        nursery.start_soon(self._ask_for_manifests)
                    task_status.started()
            finally:
                self._store.block_listeners.remove(self._on_placed)
                await self._release()
                connected.cancel()

    async def holders(self, digests: Sequence[bytes]) -> list[tuple[str, ...]] | None:
        """Return the addresses of other members that hold each block; None where the directory does not answer."""
        if not self._membership.members:
            return None
        try:
            self._lookups.acquire_on_behalf_of_nowait(token := object())
        except trio.WouldBlock:
            self._counts["refused_lookups"] += 1
            return None
        try:
            answer = await self._server.look_up(LOOKUP, encode_places(digests), self._wait_s)
            numbers = decode_holders(answer, len(digests))
        except KvfsError:
            self._counts["failed_lookups"] += 1
            return None
        finally:
            self._lookups.release_on_behalf_of(token)
        self._counts["lookups"] += 1
        addresses = {some: self._membership.addresses(some) for some in set(numbers)}
        if any(number not in self._membership.members for some in addresses for number in some):
            self._beat_wanted.set()
        return [addresses[some] for some in numbers]

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all other members."""
        return self._membership.addresses(list(self._membership.members))

    def status(self) -> dict[str, Any]:
        """Describe membership, writes and lookups, as JSON values."""
        membership, own = self._membership, self._membership.store_id
        return {
            "server": self._server.shown,
            "is_up": self._server.is_up,
            "trouble": self._server.trouble or membership.trouble,
            "state": membership.state,
            "epoch": membership.epoch,
            "rivals": membership.rivals,
            "members": [
                {
                    "address": each.address,
                    "store_id": each.store_id.hex(),
                    "epoch": each.epoch,
                    "is_self": each.store_id == own and membership.is_joined,
                    **{name: each.report.get(name) for name in ("blocks", "lag_s", "trouble")},
                }
                for each in sorted(membership.members.values(), key=lambda each: each.number)
            ],
            "members_count": len(membership.members),
            "pending": len(self._pending),
            "lag_s": self._lag_s(),
            "dropped": self._pending.dropped,
            **{name: self._counts[name] for name in ("lookups", "failed_lookups", "refused_lookups")},
            **{name: self._counts[name] for name in ("written", "manifests")},
            **{name: self._server.counts[name] for name in ("connections", "failures", "deadlines")},
        }

    async def _keep_connected(self, scope: trio.CancelScope) -> None:
        """Connect until the scope is cancelled, which a stop does once the lease has ended."""
        with scope:
            await self._server.run()

    async def _beat(self) -> None:
        while True:
            self._beat_wanted = trio.Event()
            await self._beat_once()
            with trio.move_on_after(limits.DIRECTORY_BEAT_S):
                await trio.sleep(limits.DIRECTORY_BEAT_S / 10)
                await self._beat_wanted.wait()

    async def _beat_once(self) -> None:
        connection = self._server.counts["connections"]
        try:
            if self._membership.address is None or self._membership.is_overtaken:
                self._membership.take(await self._server.call(MEMBERS))
                return
            is_new = self._membership.take(
                await self._server.call(BEAT, *self._membership.arguments(self._report()))
            )
        except KvfsError:
            return
        if is_new or (self._membership.is_joined and connection != self._beaten_connection):
            # behind a new connection the server may be another one, or without the last second before its end
            self._beaten_connection = connection
            self._want_manifest()

    async def _release(self) -> None:
        if self._membership.is_joined and self._server.is_up:
            with trio.move_on_after(limits.DIRECTORY_RELEASE_S, shield=True):
                try:
                    await self._server.call(
                        RELEASE, self._membership.store_id, b"%d" % self._membership.epoch
                    )
                except KvfsError:
                    return

    def _report(self) -> dict[str, Any]:
        trouble = "writes too slowly" if self._lag_s() > limits.DIRECTORY_BEAT_S else ""
        return {
            "blocks": len(self._store.catalog.blocks),
            "lag_s": round(self._lag_s(), 3),
            "trouble": trouble,
        }

    def _lag_s(self) -> float:
        return self._pending.lag_s(trio.current_time())

    def _holds(self, digest: bytes) -> bool:
        entry = self._store.table.get(digest)
        return entry is not None and bool(entry.tiers & _SERVED)

    def _on_placed(self, placed: BlockPlaced) -> None:
        held = bool(placed.after & _SERVED)
        if held == bool(placed.before & _SERVED) or not self._membership.is_joined:
            return
        if held and self._manifest is not None:
            self._manifest.note((placed.digest,))
        if not self._pending.note(placed.digest, held, trio.current_time()):
            self._want_manifest()
        self._changed.set()

    def _want_manifest(self) -> None:
        self._manifest_wanted = True
        self._changed.set()

    async def _ask_for_manifests(self) -> None:
        while True:
            await trio.sleep(limits.DIRECTORY_MANIFEST_S)
            self._want_manifest()

    async def _write(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await trio.sleep(limits.DIRECTORY_LINGER_S)
            try:
                while self._membership.is_joined and (self._manifest_wanted or self._pending):
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
            await self._call(CHANGE, encode_changes(changes))
            self._counts["written"] += len(changes)

    async def _write_manifest(self) -> None:
        """Write all parts of a manifest, and what changes meanwhile. Raises KvfsError."""
        self._manifest_wanted = False
        self._manifest = manifest = Manifest()
        try:
            placed = self._store.placed_blocks()
            while some := [each.digest for each in islice(placed, limits.DIRECTORY_BATCH)]:
                manifest.note(some)
                await trio.lowlevel.checkpoint()
            while not manifest.is_sent:
                part = manifest.take(self._holds)
                places = encode_places(part.digests)
                manifest.sent(
                    part, await self._call(MANIFEST, b"%d" % part.first, b"%d" % part.count, places)
                )
                await self._write_changes()
        finally:
            self._manifest = None
        self._counts["manifests"] += 1

    async def _call(self, script: str, *arguments: bytes) -> int:
        membership = self._membership
        answer = await self._server.call(script, membership.store_id, b"%d" % membership.epoch, *arguments)
        if not isinstance(answer, int) or answer < 0:
            membership.lapse()
            self._beat_wanted.set()
            raise TierUnreachable("this machine's lease has ended")
        return answer
