"""Who has which block: the cluster's directory, as one machine writes and reads it.

Responsibility: beats and lookups; `tiers.cluster.locations` writes what this machine has. What it knows is soft: the
holder decides what it has, and the checksum whether bytes are right.

Invariants:
- No read of a block that is here asks the directory.
- A lease that is new is followed by a manifest.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import trio

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError, KvfsError, TierUnreachable
from tiers.cluster.location_format import decode_holders, encode_places
from tiers.cluster.locations import Locations
from tiers.cluster.membership import Membership
from tiers.cluster.redis_server import RedisServer
from tiers.cluster.scripts import BEAT, LOOKUP, MEMBERS, RELEASE
from tiers.store.store import Store


class Directory:
    """Says what one store holds, and finds who holds what it lacks. Implement `Lease`, which its beats extend."""

    def __init__(self, settings: ClusterSettings, store: Store) -> None:
        """Raises ConfigError."""
        assert settings.directory is not None
        self._store, self._wait_s = store, settings.match_wait_s
        try:
            self._server = RedisServer(settings.directory.get_secret_value())
        except ValueError as error:
            raise ConfigError(f"[cluster] directory: {error}") from None
        self._membership = Membership(store.store_id, settings.advertised, time.time_ns() // 1000)
        self._locations = Locations(store, self)
        self._beat_wanted = trio.Event()
        self._beaten_connection = 0
        self._lookups = trio.CapacityLimiter(limits.MAX_DIRECTORY_LOOKUPS)
        self._counts: Counter[str] = Counter()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be a member and write, until cancelled; the first beat need not have been answered when it has started."""
        connected = trio.CancelScope(shield=True)
        async with trio.open_nursery() as server:
            server.start_soon(self._keep_connected, connected)
            self._store.block_listeners.append(self._locations.note)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat)
                    if self._membership.address is not None:
                        nursery.start_soon(self._locations.run)
                    task_status.started()
            finally:
                self._store.block_listeners.remove(self._locations.note)
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
            "pending": self._locations.waiting,
            "lag_s": self._locations.lag_s,
            "dropped": self._locations.dropped,
            **{name: self._counts[name] for name in ("lookups", "failed_lookups", "refused_lookups")},
            **{name: self._locations.counts[name] for name in ("written", "manifests")},
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
            self._locations.want_manifest()

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
        lag_s = self._locations.lag_s
        trouble = "writes too slowly" if lag_s > limits.DIRECTORY_BEAT_S else ""
        return {
            "blocks": len(self._store.catalog.blocks),
            "lag_s": round(lag_s, 3),
            "trouble": trouble,
        }

    # --- as the lease of what is written ------------------------------------------------------------------
    @property
    def is_held(self) -> bool:
        return self._membership.is_joined

    async def write(self, script: str, *arguments: bytes) -> int:
        membership = self._membership
        answer = await self._server.call(script, membership.store_id, b"%d" % membership.epoch, *arguments)
        if not isinstance(answer, int) or answer < 0:
            membership.lapse()
            self._beat_wanted.set()
            raise TierUnreachable("this machine's lease has ended")
        return answer
