"""This machine among others: the door for them, and the peers that it asks.

Responsibility: the parts of `[cluster]`, their life, and what sessions and status see of them; which machines a fetch
asks. `tiers.cluster.door` loads it only where that is configured. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import trio

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.config.url_settings import host_and_port
from kvfs.errors import InvalidRequest, Unsupported
from tiers.model.objects import Bucket
from tiers.remote.connections.fabric import load_fabric
from tiers.remote.connections.identity import read_identity
from tiers.remote.fetch import Fetcher
from tiers.remote.holders import BlockDirectory, Holders, NoDirectory, leading, runs
from tiers.remote.order_poller import OrderPoller
from tiers.remote.peer import COUNTS, Opener, Peer, UcxOpener, open_tcp
from tiers.remote.pull_link import PullLink
from tiers.remote.pulls import Pulls
from tiers.remote.serving import Serving, listen
from tiers.store.store import Store
from tiers.transfers.copying import Copy
from tiers.transfers.draining import Drain
from tiers.transfers.moving import Move
from tiers.transfers.progress import Progress
from tiers.transfers.tasks import Tasks

_IDLE_LOOKS = 4
"""Looks for idle links within the time after which they are closed: none stays for more than a quarter longer."""


class Cluster:
    """Runs the parts of one machine."""

    def __init__(
        self,
        settings: ClusterSettings,
        store: Store,
        opener: Opener = open_tcp,
        directory: BlockDirectory | None = None,
        numa_nodes: Collection[int] = (),
    ) -> None:
        """Prepare the parts. `numa_nodes`: where DRAM is, if that is known. Raises ConfigError."""
        self._own = own = read_identity(settings, store.store_id)
        fabric = load_fabric(numa_nodes) if settings.transport == "ucx" else None
        self._match_opener = self._opener = self._more_opener = opener
        if fabric is not None:
            self._opener = ucx = UcxOpener(fabric)
            self._more_opener = ucx.beside
        self._short: set[Peer] = set()
        """Peers with fewer links than they are to have."""
        self._has_short = trio.Event()
        self._listen, self._store = settings.listen, store
        self._advertised = settings.advertised
        self._directory = directory or NoDirectory()
        self.peers = [self._peer(address) for address in settings.peers]
        self._members: dict[str, Peer] = {}
        """Machines that the directory named and the settings do not, by address: linked when they are asked."""
        self._fetcher = Fetcher(store, self.peers, settings.match_wait_s)
        self._orders, self._has_conductor = OrderPoller(settings, store, self), bool(settings.conductor)
        pulls = Pulls(store, self._fetcher, self._peer_at, lambda: self.refusal)
        self._serving = None if settings.listen is None else Serving(store, own, pulls, fabric)
        self._tasks = Tasks()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and keep links until cancelled; started once connections are accepted. Raises ConfigError."""
        try:
            async with trio.open_nursery() as nursery:
                if self._serving is not None and self._listen is not None:
                    nursery.start_soon(self._serving.run, await listen(*host_and_port(self._listen)))
                for peer in self.peers:
                    nursery.start_soon(peer.run)
                nursery.start_soon(self._close_idle_links)
                nursery.start_soon(self._open_more_links)
                await nursery.start(self._directory.run)
                await nursery.start(self._tasks.run)
                if self._has_conductor:
                    nursery.start_soon(self._orders.run)
                task_status.started()
        finally:
            for peer in (*self.peers, *self._members.values()):
                peer.close()

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int:
        """Fetch blocks that are not here, unless this machine drains; return how many are here then. Raises
        InvalidRequest of an unknown hint."""
        if self.is_draining:
            return self._fetcher.count_here(bucket, digests)
        peers = () if hint is None else (self._hinted(hint),)
        if hint is None:
            missing = self._fetcher.missing(bucket, digests)
            holders = await self._directory.holders(missing) if missing else None
            if holders is not None:
                await self._fetch_located(bucket, missing, holders, uid=uid, urgent=urgent)
                return self._fetcher.count_here(bucket, digests)
        return await self._fetcher.fetch(bucket, digests, uid=uid, hints=peers, urgent=urgent)

    async def match(self, bucket: Bucket, digests: Sequence[bytes]) -> dict[str, int]:
        """Return how many blocks each machine has, from the first on; those that have none are left out."""
        holders = await self._directory.holders(digests)
        if holders is not None:
            return leading(holders)
        assert bucket.namespace is not None
        return {
            holder.peer.address: len(holder.sizes)
            for holder in await self._fetcher.match(bucket.namespace, digests)
        }

    async def copy(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin to copy the blocks of these buckets to another machine; describe the task. Raises InvalidRequest, Busy,
        Unsupported of a machine that nobody can read from."""
        progress = Progress("copy", to)
        return self._tasks.begin(progress, Copy(self._store, self._target(to), buckets, progress).run)

    async def move(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin to move the blocks of those of these buckets that are caches to another machine; describe the task.
        Raises as `copy`, and InvalidRequest where none is."""
        caches = [each for each in buckets if not each.durable]
        if not caches:
            raise InvalidRequest("such buckets here are durable, and their blocks never move")
        progress = Progress("move", to)
        return self._tasks.begin(progress, Move(self._store, self._target(to), caches, progress).run)

    def _target(self, to: str) -> PullLink:
        """Return a connection, still to be opened, to the machine that a task names. Raises as `copy`."""
        peer = self._hinted(to, "to")
        if peer.is_self:
            raise InvalidRequest(f"to {to!r} is this machine")
        return PullLink(peer, self._need_address())

    async def drain(self) -> dict[str, Any]:
        """Begin to bring what this machine alone has to others; describe the task. Raises Busy, Unsupported."""
        self._need_address()
        progress = Progress("drain")
        return self._tasks.begin(progress, Drain(self._store, self, progress).run)

    @property
    def is_draining(self) -> bool:
        """Return whether nothing is to be brought here."""
        return self._tasks.is_running("drain")

    @property
    def refusal(self) -> str:
        """Return why this machine fetches nothing that others name; empty where it does."""
        if self.is_draining:
            return "it drains itself, and takes no blocks"
        return "it moves blocks to another machine, and takes none" if self._tasks.is_running("move") else ""

    @property
    def has_directory(self) -> bool:
        """Return whether a directory says who has which block."""
        return not isinstance(self._directory, NoDirectory)

    def addresses(self) -> list[str]:
        """Return where the machines are that are asked now."""
        members = [self._member(address) for address in self._directory.addresses()]
        return list(dict.fromkeys(peer.address for peer in (*members, *self.peers) if peer.is_up))

    async def holders(self, digests: Sequence[bytes]) -> Holders | None:
        """Return who has each block, as the directory says; None where it does not answer."""
        return await self._directory.holders(digests)

    def link(self, address: str) -> PullLink:
        """Return a connection for pulls, still to be opened, to one of the machines."""
        return PullLink(self._member(address), self._need_address())

    async def cancel(self, kind: str) -> dict[str, Any]:
        """Cancel the task of a kind; describe it. Raises NotFound where none is under way."""
        return self._tasks.cancel(kind)

    def renew_certificates(self) -> None:
        """Read the files of certificates again, for connections made from then on; log what cannot be used."""
        if self._own.certificates is not None:
            self._own.certificates.renew()

    def status(self) -> dict[str, Any]:
        """Describe peers and what was served, as JSON values."""
        peers = [peer.status() for peer in (*self.peers, *self._members.values())]
        directory = self._directory.status()
        others = [peer for peer in peers if not peer["is_self"]]
        certificates = self._own.certificates
        return {
            "listen": self._listen,
            "address": self._advertised,
            "certificate_ends_s": 0 if certificates is None else certificates.context.ends_s,
            "peers": peers,
            "peers_configured": len(others),
            "peers_up": sum(peer["is_up"] for peer in others),
            **{
                f"fetched_{name}" if name in ("blocks", "bytes") else name: _total(peers, name)
                for name in COUNTS
            },
            **self._orders.status(),
            **self._tasks.status(),
            **({} if self._serving is None else self._serving.status()),
            **({"directory": directory} if directory else {}),
        }

    async def _close_idle_links(self) -> None:
        while True:
            await trio.sleep(limits.REMOTE_IDLE_S / _IDLE_LOOKS)
            for peer in (*self.peers, *self._members.values()):
                peer.close_idle()

    async def _open_more_links(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await self._has_short.wait()
                self._has_short = trio.Event()
                while self._short:
                    nursery.start_soon(self._short.pop().open_more)

    async def _fetch_located(
        self, bucket: Bucket, digests: Sequence[bytes], holders: Holders, *, uid: int, urgent: bool
    ) -> None:
        """Fetch runs of blocks, each from the machines that hold all of it."""
        async with trio.open_nursery() as nursery:
            for run, addresses in runs(holders):
                some = digests[run.start : run.stop]
                peers = [self._member(each) for each in addresses]
                nursery.start_soon(
                    partial(self._fetcher.fetch, bucket, some, uid=uid, hints=peers, urgent=urgent)
                )

    def _hinted(self, hint: str, what: str = "hint") -> Peer:
        if hint in self._directory.addresses():
            return self._member(hint)
        found = next((peer for peer in self.peers if peer.address == hint), None)
        if found is None:
            raise InvalidRequest(
                f"{what} {hint!r} is neither of [cluster] peers nor a member of the directory"
            )
        return found

    def _peer_at(self, address: str, store_id: bytes) -> Peer:
        """Return the machine that asks for a pull: at the address that it names, else known by its store's id."""
        known = [*self.peers, *self._members.values()]
        found = next((peer for peer in known if peer.store_id == store_id), None)
        return found or self._hinted(address, "the machine that asks,")

    def _need_address(self) -> str:
        if self._advertised is None:
            raise Unsupported("this service has no [cluster] listen, so that no machine can fetch from it")
        return self._advertised

    def _member(self, address: str) -> Peer:
        """Return the peer at an address that the directory named; those that it names no more make room."""
        found = next((peer for peer in self.peers if peer.address == address), self._members.get(address))
        if found is None:
            if len(self._members) >= limits.MAX_CLUSTER_NODES:
                for gone in self._members.keys() - set(self._directory.addresses()):
                    self._members.pop(gone).close()
            self._members[address] = found = self._peer(address)
        return found

    def _peer(self, address: str) -> Peer:
        return Peer(
            address,
            *host_and_port(address),
            self._own,
            self._opener,
            self._match_opener,
            more_opener=self._more_opener,
            want_more=self._note_short,
        )

    def _note_short(self, peer: Peer) -> None:
        self._short.add(peer)
        self._has_short.set()


def _total(peers: Sequence[dict[str, Any]], name: str) -> int:
    return sum(int(peer[name]) for peer in peers)
