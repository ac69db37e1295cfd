"""Another machine that blocks are read from: its links, its health and what it did.

Responsibility: links opened when they are needed, kept, and closed when nothing came over them for a while; a peer that
fails is not asked for a while, longer with each failure. Whatever goes wrong with a peer is a count and a line in the
log that names it, and an exception of one call.

Invariants:
- As many links for bytes as bring most, and one for MATCH, which waits behind no bytes and is kept. A link is idle or
  one call's. A peer that is this store is never asked.
- Links beyond limits.REMOTE_STREAMS are opened beside reads, none of which waits for one. Where one cannot be had the
  peer has not failed: bytes come over those that there are.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import trio

from kvfs import limits
from kvfs._native.remote.stream import FOUND
from kvfs.errors import DeadlinePassed, KvfsError, NotPermitted, ProtocolError, TierUnreachable, Unsupported
from kvfs.system.pauses import Pause
from tiers.remote.connections.connection import Connection
from tiers.remote.connections.fabric import Fabric, FabricWorker
from tiers.remote.connections.identity import Identity
from tiers.remote.connections.stream_count import StreamCount
from tiers.remote.greeting import connect
from tiers.remote.hedging import Latencies
from tiers.remote.link import PeerLink, Read, TcpLink, Want
from tiers.remote.read_queue import ReadQueue, Urgency
from tiers.remote.wire import FABRIC, PULLS

log = logging.getLogger("kvfs.remote")

_ROUNDING = 0.001

COUNTS: Final = (
    *("matches", "blocks", "bytes", "misses", "mismatches", "deadlines", "failures"),
    *("hedges", "hedges_won", "hedged_bytes"),
)
"""What is counted of each peer; of hedges, at the one that was slow."""

Opener = Callable[[str, int, Identity], Coroutine[Any, Any, tuple[PeerLink, bytes]]]
"""Opens a verified link; returns it with the id of the peer's store."""


async def open_tcp(host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
    """Open a link over TCP. Raises OSError, KvfsError."""
    connection, store_id = await connect(host, port, own)
    with connection.closed_on_error():
        return TcpLink(connection), store_id


class UcxOpener:
    """Opens links whose bytes come by UCX, and such over TCP to a machine where that cannot be."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._without: dict[tuple[str, int], tuple[str, float]] = {}
        """Machines that have no UCX, why, and until when they are not asked for it."""

    async def __call__(self, host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        """Open a link. Raises OSError, KvfsError."""
        if self._without.get((host, port), ("", 0.0))[1] > trio.current_time():
            return await open_tcp(host, port, own)
        try:
            connection, store_id = await connect(host, port, own, FABRIC)
        except Unsupported as error:
            self._note(host, port, str(error), limits.REMOTE_WITHOUT_FABRIC_S)
            return await open_tcp(host, port, own)
        with connection.closed_on_error():
            return TcpLink(connection, await self._reach(connection, host, port)), store_id

    async def beside(self, host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        """Open a further link to a machine. Raises OSError, KvfsError: that there is no room for one, here or there,
        says nothing of UCX."""
        if (host, port) in self._without:
            return await open_tcp(host, port, own)
        connection, store_id = await connect(host, port, own, FABRIC)
        with connection.closed_on_error():
            return TcpLink(connection, await self._fabric.reach(connection)), store_id

    async def _reach(self, connection: Connection, host: str, port: int) -> FabricWorker | None:
        try:
            worker = await self._fabric.reach(connection)
        except (Unsupported, TierUnreachable) as error:
            is_slow = isinstance(error, TierUnreachable)
            self._note(host, port, str(error), limits.REMOTE_WITHOUT_FABRIC_S if is_slow else 0.0)
            return None
        self._without.pop((host, port), None)
        return worker

    def _note(self, host: str, port: int, why: str, pause_s: float) -> None:
        before, _ = self._without.get((host, port), ("", 0.0))
        if len(self._without) >= 2 * limits.MAX_CLUSTER_NODES:
            self._without.clear()
        self._without[host, port] = why, trio.current_time() + pause_s
        if why != before:
            log.warning("%s:%d: bytes come over TCP: %s", host, port, why, extra={"cause": host})


def _have_no_more(peer: Peer) -> None:
    """Have a peer read over the links that its reads open."""


class Peer:
    """Reads blocks of one machine."""

    def __init__(
        self,
        address: str,
        host: str,
        port: int,
        own: Identity,
        opener: Opener = open_tcp,
        match_opener: Opener | None = None,
        *,
        more_opener: Opener | None = None,
        want_more: Callable[[Peer], None] = _have_no_more,
    ) -> None:
        """Open links for bytes by `opener`; that for MATCH, and those beyond limits.REMOTE_STREAMS, by others if there
        are any. `want_more`: calls `open_more`, beside what it is called from."""
        self.address = address
        self.counts: Counter[str] = Counter()
        """See COUNTS."""
        self.latencies = Latencies()
        self.store_id: bytes | None = None
        self.trouble = ""
        self.transport = ""
        """That of the last link for bytes."""
        self._host, self._port, self._own, self._opener = host, port, own, opener
        self._match_opener, self._more_opener = match_opener or opener, more_opener or opener
        self._streams = StreamCount()
        self._queue = ReadQueue(self.streams)
        self._want_more, self._is_opening_more, self._no_more_until_s = want_more, False, 0.0
        self._idle: deque[tuple[PeerLink, float]] = deque()
        """Links for bytes and since when nothing comes over them, the latest last: it is used next."""
        self._links: set[PeerLink] = set()
        self._match_link: PeerLink | None = None
        self._matching = trio.Lock()
        self._unanswered_s = 0.0
        """How long the peer was given since its last answer, in questions whose time ran out."""
        self._pause = Pause(limits.REMOTE_BACKOFF_S, limits.MAX_REMOTE_BACKOFF_S, spread=0.5)
        self._failed = trio.Event()

    @property
    def is_self(self) -> bool:
        """Return whether the address turned out to be this service's own."""
        return self.store_id == self._own.store_id

    @property
    def is_up(self) -> bool:
        """Return whether to ask this peer now: not while it is paused after a failure."""
        return not self.is_self and self._pause.is_over(trio.current_time())

    @property
    def streams(self) -> int:
        """Return how many links bytes are to come over."""
        return self._streams.count

    def _is_short(self) -> bool:
        """Return whether there are to be more links than reads open for themselves."""
        return limits.REMOTE_STREAMS <= len(self._links) < self.streams

    async def run(self) -> None:
        """Open the link for MATCH ahead of its use, and again when a pause after a failure is over, until cancelled."""
        while not self.is_self:
            await trio.sleep_until(self._pause.until_s)
            self._failed = trio.Event()
            with suppress(KvfsError):
                async with self._matching:
                    await self._open_match_link()
            await self._failed.wait()

    async def match(self, namespace: bytes, digests: bytes, wait_s: float) -> list[int]:
        """Return the sizes of the blocks that the peer has, without a gap from the first on. Raises KvfsError."""
        self._check_up()
        began_s, waits = trio.current_time(), self._matching.locked()
        deadline = began_s + wait_s
        asked_s = deadline if waits else began_s
        with trio.move_on_at(deadline):
            async with self._matching:
                self._check_up()  # who was asked before may have found out
                asked_s = trio.current_time() if waits else began_s
                link = await self._open_match_link()
                with self._reporting(), suppress(DeadlinePassed):
                    sizes = await link.match(namespace, digests, max(deadline - trio.current_time(), 0.001))
                    self._answered()
                    self.counts["matches"] += 1
                    return sizes
        late = DeadlinePassed(f"no answer within {wait_s:g} s")
        self._ran_late(late, deadline - asked_s, wait_s)
        raise late

    @asynccontextmanager
    async def link(self, size_bytes: int, urgency: Urgency) -> AsyncIterator[PeerLink]:
        """Wait for a link for so many bytes. Raises KvfsError where there is none, Busy where too many wait."""
        if len(self._links) > limits.REMOTE_STREAMS:
            self._drop_ended()
        async with self._queue.entered(size_bytes, urgency):
            self._check_up()
            with self._reporting():
                link = await self._take()
            self._streams.began(trio.current_time())
            try:
                self._ask_for_more()
                yield link
            finally:
                self._streams.ended(trio.current_time())
                self._put_back(link)
                self._fit()

    async def read(
        self, link: PeerLink, namespace: bytes, wants: Sequence[Want], wait_s: float, *, urgent: bool
    ) -> list[Read]:
        """Read blocks over a link of this peer into their drafts; return what became of each."""
        began_s = trio.current_time()
        reads, error = await link.read(namespace, wants, wait_s, urgent=urgent)
        if isinstance(error, DeadlinePassed):
            self._ran_late(error, wait_s, limits.REMOTE_READ_S)
        elif error is not None:
            self._fail(error)
        else:
            self._answered()
            self._pause.succeeded()
            self._streams.brought(sum(read.size_bytes for read in reads if read.status == FOUND))
            if all(read.status == FOUND for read in reads):
                self.latencies.note(sum(want.room_bytes for want in wants), trio.current_time() - began_s)
        return reads

    def note_hedge(self, size_bytes: int) -> None:
        """Count a read that takes long, and bytes of it that another holder is asked for as well."""
        self.counts["hedges"] += 1
        self.counts["hedged_bytes"] += size_bytes

    def note_given_up(self, size_bytes: int, given_s: float) -> None:
        """Count a read that was ended after `given_s` since another holder was faster: one that gives no answer any
        more is found out so as well."""
        self.counts["hedges_won"] += 1
        self.latencies.note(size_bytes, given_s)
        late = DeadlinePassed("no answer, again and again, while another holder gave it")
        self._ran_late(late, given_s, limits.REMOTE_READ_S)

    async def connect_for_pulls(self) -> Connection:
        """Open a connection over which the machine is asked to fetch; it is the caller's, and no failure of it counts
        here. Raises KvfsError."""
        try:
            connection, store_id = await connect(self._host, self._port, self._own, PULLS)
        except (OSError, ValueError) as error:
            raise TierUnreachable(f"cannot be reached: {error}") from None
        if store_id == self._own.store_id:
            connection.close()
            raise TierUnreachable("it is this machine")
        return connection

    def note_mismatch(self, digest: bytes) -> None:
        """Count a block whose bytes are not what its checksum says."""
        self.counts["mismatches"] += 1
        log.error(
            "%s: block %s does not match its checksum",
            self.address,
            digest.hex(),
            extra={"cause": self.address},
        )

    def close_idle(self) -> None:
        """Close the links for bytes that nothing came over for limits.REMOTE_IDLE_S: the next read opens its own."""
        before_s = trio.current_time() - limits.REMOTE_IDLE_S
        while self._idle and self._idle[0][1] <= before_s:
            self._drop(self._idle.popleft()[0])
        self._fit()

    async def open_more(self) -> None:
        """Open the links that are missing beyond limits.REMOTE_STREAMS, as long as they can be had."""
        try:
            while self._is_short() and self.is_up:
                link = await self._open(self._more_opener)
                if link.transport != self.transport:
                    link.close()
                    raise TierUnreachable(f"bytes would come by {link.transport}, not {self.transport}")
                if not (self._is_short() and self.is_up):
                    link.close()
                    return
                self._links.add(link)
                self._idle.append((link, trio.current_time()))
                self._fit()
        except KvfsError as error:
            log.debug("%s: no link beside %d others: %s", self.address, len(self._links), error)
            self._no_more_until_s = trio.current_time() + limits.REMOTE_STREAMS_PAUSE_S
            self._streams.give_up()
            self._fit()
        finally:
            self._is_opening_more = False

    def close(self) -> None:
        """Close every link."""
        for link in [*self._links, *([self._match_link] if self._match_link else [])]:
            link.close()
        self._links.clear()
        self._idle.clear()
        self._match_link = None
        self._fit()

    def status(self) -> dict[str, Any]:
        """Describe the peer, as JSON values."""
        return {
            "address": self.address,
            "store_id": None if self.store_id is None else self.store_id.hex(),
            "is_self": self.is_self,
            "is_up": self.is_up,
            "trouble": self.trouble,
            "transport": self.transport,
            "streams": self.streams,
            "links": len(self._links) + (self._match_link is not None),
            "waiting": len(self._queue),
            **{key: self.counts[key] for key in COUNTS},
        }

    async def _open_match_link(self) -> PeerLink:
        link = self._match_link
        if link is None or not link.is_usable:
            if link is not None:
                link.close()
            self._match_link = None
            with self._reporting():
                self._match_link = link = await self._open(self._match_opener)
        return link

    async def _take(self) -> PeerLink:
        while self._idle:
            link, _ = self._idle.pop()
            if link.is_usable:
                return link
            self._drop(link)
        link = await self._open(self._opener)
        self.transport = link.transport
        self._links.add(link)
        return link

    def _ask_for_more(self) -> None:
        """Have links opened that are missing while all of the others are in use."""
        may_ask = not self._is_opening_more and trio.current_time() >= self._no_more_until_s
        if self._is_short() and not self._idle and may_ask:
            self._is_opening_more = True
            self._want_more(self)

    def _fit(self) -> None:
        """Let in a read for each of the links that there are to be, as far as reads open them or they are there. Those
        that are too many are used no more, and closed in time."""
        at_once = min(self.streams, max(limits.REMOTE_STREAMS, len(self._links)))
        self._streams.note_there(at_once)
        self._queue.resize(at_once)

    def _drop_ended(self) -> None:
        """Drop idle links that the peer has ended: reads are not let in for them, and open none."""
        for entry in [entry for entry in self._idle if not entry[0].is_usable]:
            self._idle.remove(entry)
            self._drop(entry[0])
        self._fit()

    def _put_back(self, link: PeerLink) -> None:
        if link.is_usable and self.is_up and link in self._links:
            self._idle.append((link, trio.current_time()))
        else:
            self._drop(link)

    def _drop(self, link: PeerLink) -> None:
        link.close()
        self._links.discard(link)

    async def _open(self, opener: Opener) -> PeerLink:
        try:
            link, self.store_id = await opener(self._host, self._port, self._own)
        except (OSError, ValueError) as error:  # a name that no resolver takes is a ValueError
            raise TierUnreachable(f"cannot be reached: {error}") from None
        if self.is_self:
            link.close()
            raise TierUnreachable("it is this machine")
        return link

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Count a KvfsError as a failure on its way out."""
        try:
            yield
        except KvfsError as error:
            self._fail(error)
            raise

    def _check_up(self) -> None:
        if not self.is_up:
            raise TierUnreachable(f"{self.address} is not asked now: {self.trouble or 'it is this machine'}")

    def _answered(self) -> None:
        self._unanswered_s = 0.0

    def _ran_late(self, error: DeadlinePassed, given_s: float, whole_s: float) -> None:
        """Count a failure once the peer was given `whole_s` without an answer, in one question or in several: the time
        that a question waits here for its turn is none of the peer's."""
        self._unanswered_s += given_s
        if self._unanswered_s >= whole_s * (1 - _ROUNDING):
            self._fail(error)

    def _fail(self, error: KvfsError) -> None:
        """Count a failure, and pause. Idle links go with it: what ended one has most likely ended all."""
        if self.is_self:
            return
        self.counts["deadlines" if isinstance(error, DeadlinePassed) else "failures"] += 1
        self._unanswered_s = 0.0
        self._streams.end_trial()
        pause_s = self._pause.failed(trio.current_time())
        self.trouble = str(error)
        self._failed.set()
        while self._idle:
            self._drop(self._idle.pop()[0])
        self._fit()
        is_wrong = isinstance(error, ProtocolError | NotPermitted)
        log.log(
            logging.WARNING if is_wrong else logging.INFO,
            "%s: %s; not asked for %.1f s",
            self.address,
            error,
            pause_s,
            extra={"cause": self.address},
        )
