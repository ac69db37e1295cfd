"""Fetches: blocks that this store lacks, or only its cold tier has, read from peers into drafts and sealed as its own.

Responsibility: who has what (MATCH, all peers at once), which peer is asked for which blocks, another one where that
fails or, for a small share of bytes, is slow, and the drafts and seals of this store.

Invariants:
- A block is visible once its bytes matched the checksum that came along; a mismatch is a miss.
- Every draft of a fetch is sealed or aborted when it returns or raises. Drafts are reserved only for a read that its
  peer's queue has let in.
- A block is fetched once, however many ask for it at the same time; each goes on with the block's own seal, and who is
  urgent makes the read urgent that brings it. No fetch takes longer than limits.REMOTE_FETCH_S.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import trio

from kvfs import limits
from kvfs._native.remote.server import LONGEST_WAIT_S
from kvfs._native.remote.stream import ABSENT, BUSY, FOUND, MISMATCH, TOO_LARGE
from kvfs._native.shared.table import TIER_COLD
from kvfs.errors import KvfsError
from tiers.model.objects import Bucket, Draft
from tiers.remote.hedging import Allowance, race
from tiers.remote.link import PeerLink, Read, Want
from tiers.remote.peer import Peer
from tiers.remote.read_queue import Urgency
from tiers.store.store import Store

log = logging.getLogger("kvfs.remote")

_ANSWERED = (ABSENT, TOO_LARGE, BUSY)


@dataclass(frozen=True, slots=True)
class Holder:
    """Names a peer and the sizes of the blocks that it has, from the first on."""

    peer: Peer
    sizes: list[int]

    def bytes_of(self, some: Sequence[int]) -> int:
        """Return the bytes of some of the blocks."""
        return sum(self.sizes[i] for i in some)


@dataclass(slots=True)
class UnderWay:
    """Describes a block that a fetch brings: the urgency of the read that it is in, and the end."""

    urgency: Urgency
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Describes one fetch: whose, and the blocks that it reads itself."""

    bucket: Bucket
    namespace: bytes
    uid: int
    digests: list[bytes]
    under_way: dict[bytes, UnderWay]
    failures: list[Exception]
    """Why reads did not begin or end, for who asks."""

    def shared_urgency(self, digests: Sequence[bytes]) -> Urgency:
        """Give the blocks of one read one urgency: it is as urgent as the most urgent of them."""
        urgency = Urgency(self.is_urgent(digests))
        for digest in digests:
            self.under_way[digest].urgency = urgency
        return urgency

    def is_urgent(self, digests: Sequence[bytes]) -> bool:
        """Return whether somebody waits for one of the blocks."""
        return any(self.under_way[digest].urgency.is_urgent for digest in digests)


class Fetcher:
    """Fetches blocks from peers into one store."""

    def __init__(self, store: Store, peers: Sequence[Peer], match_wait_s: float) -> None:
        self._store, self._peers, self._match_wait_s = store, peers, match_wait_s
        self._allowance = Allowance()
        self._under_way: dict[bytes, UnderWay] = {}
        self._sizes: dict[int, int] = {}
        """By bucket, the size of the block that came last: blocks of one namespace have one size, or nearly."""

    async def match(
        self, namespace: bytes, digests: Sequence[bytes], peers: Sequence[Peer] | None = None
    ) -> list[Holder]:
        """Ask all peers at once, or some, what they have; return those that say so in time."""
        found: list[Holder] = []
        joined = b"".join(digests)

        async def ask(peer: Peer) -> None:
            with suppress(KvfsError):
                if sizes := await peer.match(namespace, joined, self._match_wait_s):
                    found.append(Holder(peer, sizes))

        async with trio.open_nursery() as nursery:
            for peer in self._peers if peers is None else peers:
                if peer.is_up:
                    nursery.start_soon(ask, peer)
        return sorted(found, key=lambda holder: -len(holder.sizes))

    async def fetch(
        self,
        bucket: Bucket,
        digests: Sequence[bytes],
        *,
        uid: int,
        hints: Sequence[Peer] = (),
        urgent: bool = True,
        failures: list[Exception] | None = None,
    ) -> int:
        """Fetch the blocks of a bucket's namespace that are not here, from the hinted peers alone where there are any;
        return how many can be read here then. Into `failures` goes why reads did not begin or end."""
        assert bucket.namespace is not None
        missing = self.missing(bucket, dict.fromkeys(digests))
        others = [self._under_way[digest] for digest in missing if digest in self._under_way]
        own = [digest for digest in missing if digest not in self._under_way]
        for each in others if urgent else ():
            each.urgency.raise_()
        with trio.move_on_after(limits.REMOTE_FETCH_S):
            if own:
                under_way = {digest: UnderWay(Urgency(urgent)) for digest in own}
                reasons = [] if failures is None else failures
                await self._fetch_own(Fetch(bucket, bucket.namespace, uid, own, under_way, reasons), hints)
            for each in others:
                await each.ended.wait()
        return self.count_here(bucket, digests)

    def missing(self, bucket: Bucket, digests: Iterable[bytes]) -> list[bytes]:
        """Return the blocks that peers are to be asked for."""
        return [digest for digest in digests if self._lacks(bucket, digest)]

    def count_here(self, bucket: Bucket, digests: Iterable[bytes]) -> int:
        """Return how many blocks can be read in this store, its cold tier included."""
        block_bucket, match = self._store.block_bucket, self._store.match
        return sum(block_bucket(digest) == bucket.name and match(digest) == 1 for digest in digests)

    def _lacks(self, bucket: Bucket, digest: bytes) -> bool:
        """Return whether no tier but the cold one has a block: that is slower than a peer, and may be away."""
        name = self._store.block_bucket(digest)
        return name is None or (name == bucket.name and self._store.catalog.tiers_of(digest) == TIER_COLD)

    async def _fetch_own(self, fetch: Fetch, hints: Sequence[Peer]) -> None:
        self._under_way.update(fetch.under_way)
        try:
            if hints and (size_bytes := self._sizes.get(fetch.bucket.bucket_id)) is not None:
                await self._read_all(
                    fetch, [Holder(each, [size_bytes] * len(fetch.digests)) for each in hints]
                )
                if not self.missing(fetch.bucket, fetch.digests):
                    return
            await self._read_all(fetch, await self.match(fetch.namespace, fetch.digests, hints or None))
        finally:
            for digest in fetch.digests:
                self._end(fetch, digest)

    def _end(self, fetch: Fetch, digest: bytes) -> None:
        """Note that a block has come, or will not. Ending it twice is harmless: another fetch may have it by then."""
        own = fetch.under_way[digest]
        own.ended.set()
        if self._under_way.get(digest) is own:
            del self._under_way[digest]

    async def _read_all(self, fetch: Fetch, holders: list[Holder]) -> None:
        some = batches(holders)
        if len(some) == 1:
            await self._read_batch(fetch, holders, some[0])
            return
        async with trio.open_nursery() as nursery:
            for number, batch in enumerate(some):
                first = number % len(holders)
                order = holders[first:] + holders[:first]
                nursery.start_soon(self._read_batch, fetch, order, batch)

    async def _read_batch(self, fetch: Fetch, order: list[Holder], batch: range) -> None:
        """Read blocks from one holder after the other, until all are here or everybody was asked."""
        left = self._left(fetch, batch)
        for at, holder in enumerate(order, 1):
            some = [i for i in left if i < len(holder.sizes)]
            if not some or not holder.peer.is_up:
                continue
            await self._read_hedged(fetch, holder, order[at:], some)
            left = self._left(fetch, left)
            if not left:
                return

    def _left(self, fetch: Fetch, some: Iterable[int]) -> list[int]:
        return [i for i in some if self._lacks(fetch.bucket, fetch.digests[i])]

    async def _read_hedged(
        self, fetch: Fetch, holder: Holder, others: Sequence[Holder], some: list[int]
    ) -> None:
        """Read blocks from one peer, and from another one as well where that takes longer than nearly always."""
        size_bytes = holder.bytes_of(some)
        self._allowance.earn(size_bytes)
        other = next((each for each in others if each.peer.is_up and some[-1] < len(each.sizes)), None)
        after_s = None if other is None else holder.peer.latencies.hedge_after_s(size_bytes)
        if other is None or after_s is None:
            await self._try_read(fetch, holder, some, trio.Event())
            return

        async def hedge() -> None:
            left = self._left(fetch, some)
            is_wanted = fetch.is_urgent([fetch.digests[i] for i in left]) and other.peer.is_up
            if is_wanted and self._allowance.take(again_bytes := other.bytes_of(left)):
                holder.peer.note_hedge(again_bytes)
                await self._try_read(fetch, other, left, trio.Event())

        given_s = await race(
            partial(self._try_read, fetch, holder, some), hedge, after_s, lambda: not self._left(fetch, some)
        )
        if given_s is not None:
            holder.peer.note_given_up(size_bytes, given_s)

    async def _try_read(self, fetch: Fetch, holder: Holder, some: list[int], began: trio.Event) -> None:
        try:
            await self._read_from(fetch, holder, some, began)
        except (KvfsError, OSError) as error:
            log.debug("%s: %s", holder.peer.address, error)
            fetch.failures.append(error)

    async def _read_from(self, fetch: Fetch, holder: Holder, some: list[int], began: trio.Event) -> None:
        """Read blocks from one peer and seal those that came; `began` is set once the peer is asked.

        Raises KvfsError where none could be asked for.
        """
        sizes, digests = [holder.sizes[i] for i in some], [fetch.digests[i] for i in some]
        urgency = fetch.shared_urgency(digests)
        async with holder.peer.link(sum(sizes), urgency) as link:
            drafts: list[Draft] = []
            try:
                for size_bytes in sizes:
                    drafts.append(self._store.reserve(size_bytes, uid=fetch.uid, kept_bytes=size_bytes))
                began.set()
                reads = await self._read(fetch, holder.peer, link, digests, drafts, urgent=urgency.is_urgent)
                for draft, digest, read in zip(drafts, digests, reads, strict=True):
                    self._take_in(fetch, holder.peer, digest, draft, read)
            finally:
                for draft in drafts:
                    self._store.abort(draft)

    async def _read(
        self,
        fetch: Fetch,
        peer: Peer,
        link: PeerLink,
        digests: list[bytes],
        drafts: list[Draft],
        *,
        urgent: bool,
    ) -> list[Read]:
        wants = [
            Want(digest, draft.size_hint_bytes, partial(self._store.open_draft, draft))
            for digest, draft in zip(digests, drafts, strict=True)
        ]
        wait_s = min(
            trio.current_effective_deadline() - trio.current_time(), limits.REMOTE_READ_S, LONGEST_WAIT_S
        )
        return await peer.read(link, fetch.namespace, wants, max(wait_s, 0.001), urgent=urgent)

    def _take_in(self, fetch: Fetch, peer: Peer, digest: bytes, draft: Draft, read: Read) -> None:
        """Seal a block that has come whole."""
        if read.status == FOUND and read.size_bytes == draft.size_hint_bytes:
            parent = read.parent if any(read.parent) else None
            self._store.seal_block(
                draft, fetch.bucket.name, digest, parent=parent, uid=fetch.uid, checksum=read.checksum
            )
            self._end(fetch, digest)
            if len(self._sizes) >= limits.MAX_BUCKETS:
                self._sizes.clear()
            self._sizes[fetch.bucket.bucket_id] = read.size_bytes
            peer.counts["blocks"] += 1
            peer.counts["bytes"] += read.size_bytes
        elif read.status == MISMATCH:
            peer.note_mismatch(digest)
        elif read.status in _ANSWERED or read.status == FOUND:  # another size than it said is another block
            peer.counts["misses"] += 1


def batches(holders: list[Holder]) -> list[range]:
    """Cut what the holders have into reads that keep every stream busy: of limits.REMOTE_READ_BLOCKS at most, and of so
    few bytes that one for each stream may be under way where somebody waits, but for what limits.MAX_REMOTE_READS says.
    Of others half of the streams are free then, for who waits."""
    sizes = holders[0].sizes if holders else []
    if not sizes:
        return []
    streams = [holder.peer.streams for holder in holders]
    most = min(limits.REMOTE_READ_BLOCKS, -(-len(sizes) // sum(streams)))
    least = min(limits.REMOTE_READ_BLOCKS, -(-len(sizes) // limits.MAX_REMOTE_READS))
    most_bytes = limits.MAX_REMOTE_BYTES // max(limits.REMOTE_STREAMS, *streams)
    cut: list[range] = []
    first = size_bytes = 0
    for at, block_bytes in enumerate(sizes):
        is_full = at - first >= most or size_bytes + block_bytes > most_bytes
        if is_full and at - first >= least:
            cut.append(range(first, at))
            first, size_bytes = at, 0
        size_bytes += block_bytes
    return [*cut, range(first, len(sizes))]
