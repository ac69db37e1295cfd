"""Who has which block: the cluster's directory, as one machine writes and reads it.

Responsibility: beats and lookups, over all parts. What it knows is soft: the holder decides what it has, and the
checksum whether bytes are right.

Invariants:
- No read of a block that is here asks the directory.
- A lease that is new is followed by manifests.
- Where some parts do not answer, blocks of the others are found.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import trio

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError, KvfsError
from tiers.cluster.membership import Membership
from tiers.cluster.part import DirectoryPart, reaches
from tiers.cluster.redis_cluster import RedisCluster
from tiers.cluster.redis_server import RedisServer
from tiers.cluster.scripts import BEAT, MEMBERS
from tiers.model.objects import BlockPlaced
from tiers.store.store import Store


class Directory:
    """Says what one store holds, and finds who holds what it lacks."""

    def __init__(self, settings: ClusterSettings, store: Store) -> None:
        """Raises ConfigError."""
        assert settings.directory is not None
        self._store, self._wait_s = store, settings.match_wait_s
        url = settings.directory.get_secret_value()
        is_cluster = url.partition("://")[0].endswith("+cluster")
        try:
            self._server = RedisCluster(url) if is_cluster else RedisServer(url)
        except ValueError as error:
            raise ConfigError(f"[cluster] directory: {error}") from None
        self._membership = Membership(store.store_id, settings.advertised, time.time_ns() // 1000)
        self._parts = [
            DirectoryPart(self._server, reach, self._membership, store, has_members=at == 0)
            for at, reach in enumerate(reaches(limits.DIRECTORY_PARTS if is_cluster else 1))
        ]
        self._beat_wanted = trio.Event()
        for part in self._parts:
            part.on_ended = lambda: self._beat_wanted.set()
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
                        for part in self._parts:
                            nursery.start_soon(part.locations.run)
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
            numbers = await self._look_up(digests)
        finally:
            self._lookups.release_on_behalf_of(token)
        if numbers is None:
            self._counts["failed_lookups"] += 1
            return None
        self._counts["lookups"] += 1
        addresses = {some: self._membership.addresses(some) for some in set(numbers)}
        if any(number not in self._membership.members for some in addresses for number in some):
            self._beat_wanted.set()
        return [addresses[some] for some in numbers]

    async def _look_up(self, digests: Sequence[bytes]) -> list[tuple[int, ...]] | None:
        """Return the numbers of each block's holders, none where its part does not answer; None where no part does."""
        if len(self._parts) == 1:
            return await self._ask(self._parts[0], digests)
        found: list[tuple[int, ...]] = [()] * len(digests)
        answers = []

        async def ask(part: DirectoryPart, at: list[int]) -> None:
            numbers = await self._ask(part, [digests[i] for i in at])
            for i, each in zip(at, numbers or (), strict=numbers is not None):
                found[i] = each
            answers.append(numbers)

        async with trio.open_nursery() as nursery:
            for part in self._parts:
                if at := [i for i, digest in enumerate(digests) if part.has(digest)]:
                    nursery.start_soon(ask, part, at)
        return None if answers and all(each is None for each in answers) else found

    async def _ask(self, part: DirectoryPart, digests: Sequence[bytes]) -> list[tuple[int, ...]] | None:
        try:
            return await part.holders(digests, self._wait_s)
        except KvfsError:
            return None

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
            "pending": sum(part.locations.waiting for part in self._parts),
            "lag_s": self._lag_s(),
            "dropped": sum(part.locations.dropped for part in self._parts),
            **{name: self._counts[name] for name in ("lookups", "failed_lookups", "refused_lookups")},
            "written": sum(part.locations.counts["written"] for part in self._parts),
            "manifests": min(part.locations.counts["manifests"] for part in self._parts),
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
        with suppress(KvfsError):
            await self._beat_at_members()
        if self._membership.is_joined and len(self._parts) > 1:
            async with trio.open_nursery() as nursery:
                for part in self._parts[1:]:
                    nursery.start_soon(part.lend)

    async def _beat_at_members(self) -> None:
        """Take or extend the lease where members are, and hear who they are. Raises KvfsError."""
        first, membership = self._parts[0], self._membership
        if membership.address is None or membership.is_overtaken:
            membership.take(await first.call(MEMBERS))
            return
        connection = first.connection
        is_new = membership.take(await first.call(BEAT, *membership.arguments(self._report())))
        if membership.is_joined:
            first.extended(connection, is_new=is_new)
        if is_new:  # the others know another lease, or another number
            for part in self._parts[1:]:
                part.ended()

    async def _release(self) -> None:
        if not self._membership.is_joined:
            return

        async def release(part: DirectoryPart) -> None:
            with suppress(KvfsError):
                await part.release()

        with trio.move_on_after(limits.DIRECTORY_RELEASE_S, shield=True):
            async with trio.open_nursery() as nursery:
                for part in self._parts:
                    nursery.start_soon(release, part)

    def _report(self) -> dict[str, Any]:
        lag_s = self._lag_s()
        trouble = "writes too slowly" if lag_s > limits.DIRECTORY_BEAT_S else ""
        return {
            "blocks": len(self._store.catalog.blocks),
            "lag_s": round(lag_s, 3),
            "trouble": trouble,
        }

    def _lag_s(self) -> float:
        return max(part.locations.lag_s for part in self._parts)

    def _on_placed(self, placed: BlockPlaced) -> None:
        next(part for part in self._parts if part.has(placed.digest)).locations.note(placed)
