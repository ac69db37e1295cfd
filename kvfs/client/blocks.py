"""Blocks of one namespace: what engines read and write, in batches, without a server on the path of a hit.

Responsibility: `Blocks`, the zero-copy door. Reads look blocks up in the shared table and open their slots
themselves; bytes are copied straight into the caller's memory, or mapped. Writes fill drafts that the service granted.
Blocks in a lower tier only are brought up first, within the call's timeout.

Invariants:
- A miss is a value (-1, None, False), never an exception; a wrong argument is InvalidRequest, at once.
- Bytes that are read are a sealed block's, whole, whatever happens to it meanwhile.
- Reads of DRAM need no running service. A call that needs one tries to reach it until the timeout; then it raises
  SessionClosed or, for a read, is a miss.
- Nothing that a call reserved outlives its failure, nor its process.

Concurrency: calls from any thread; copies and system calls drop the GIL. Futures run on a few threads of this
object's own, hits are reported by another. A forked child makes a client of its own.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from kvfs import limits
from kvfs._native.blocks.pieces import Memory, Pieces, Scatter, join_keys
from kvfs._native.blocks.reader import BELOW, MISS, NO_ROOM, View
from kvfs._native.blocks.writer import PUTS_AT_ONCE, Draft, Put
from kvfs._native.cuda.driver import Context, Driver
from kvfs._native.shared.table import TIER_DRAM
from kvfs.client.device_pool import DevicePool, Earlier, attach_pool, no_places
from kvfs.client.grants import Grants
from kvfs.client.layers import Loading
from kvfs.client.read_path import BlockReader, LocalReader, ServedReader
from kvfs.client.session import AT_ONCE, BlockSession, Live, batches, choose_keys, parents_of
from kvfs.client.transport import Deadline, Transport
from kvfs.client.workers import Workers
from kvfs.client.write_path import Refiller, put_some, seal_rest, seal_when_closed
from kvfs.errors import InvalidRequest, KvfsError, LimitExceeded, NotFound, SessionClosed
from kvfs.keys import block_name, key_at
from kvfs.protocol.messages import DIGEST_BYTES, Op, text

T = TypeVar("T")
Keys = Sequence[bytes] | bytes
"""Prefix hashes, 16 bytes each: a sequence of them, or all in one bytes object."""
Places = Sequence[Memory | Sequence[Memory]] | Scatter
"""Memory for each block: a buffer, or a list of buffers that it is spread over. Or one `Scatter` for all."""

_forkable: weakref.WeakSet[Blocks] = weakref.WeakSet()


class Blocks:
    """Read and write the blocks of one namespace; `Client.blocks` makes it. `timeout_s` is the client's by default."""

    def __init__(
        self, begin: Callable[[float], Transport], namespace: dict[str, Any], *, timeout_s: float
    ) -> None:
        """Connect by `begin`; `namespace` are the arguments of OPEN_NAMESPACE. Raises what connecting does."""
        self._timeout_s = timeout_s
        self._session = BlockSession(begin, namespace)
        self._aside = BlockSession(begin, namespace)
        """For requests that may take long, or that nobody waits for: they hold up no other call."""
        self._remote = BlockSession(begin, namespace)
        """For blocks of other machines, which no read waits for."""
        self._below = ServedReader(self._aside)
        self._begin, self._namespace, self._left_pools = begin, namespace, no_places()
        self.bucket = self._session.run(lambda live: live.bucket, Deadline.after(timeout_s))
        """The bucket that is bound to the namespace."""
        local = self._session.hello.may_open
        self._reader: BlockReader = (
            LocalReader(lambda: self._session.hello, ServedReader(self._session))
            if local
            else ServedReader(self._session)
        )
        self._workers = Workers()
        self._refiller = Refiller(self._session.run)
        self._drafts: weakref.WeakSet[Draft] = weakref.WeakSet()
        self._forked = False
        self._closed = threading.Event()
        if local:
            reporter = threading.Thread(
                target=_report_hits, args=[weakref.ref(self), self._closed], daemon=True, name="kvfs-hits"
            )
            reporter.start()
        _forkable.add(self)

    def close(self) -> None:
        """End the sessions, which aborts their drafts. Views stay valid. Closing twice is harmless."""
        if not self._closed.is_set() and not self._forked:
            with suppress(KvfsError, OSError):
                self.report_hits(timeout_s=limits.CLIENT_REPORT_S)
        self._closed.set()
        self._workers.close()
        self._refiller.close()
        self._session.close()
        self._aside.close()
        self._remote.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is there -----------------------------------------------------------------------------------
    def match(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Return how many blocks are there without a gap from the first on, in whatever tier; asks no service."""
        return self._reader.match(join_keys(keys), self._deadline(timeout_s))

    def exists(self, keys: Keys, *, timeout_s: float | None = None) -> list[bool]:
        """Return whether each block is there, in whatever tier; asks no service."""
        return [tiers != 0 for tiers in self._reader.find(join_keys(keys), self._deadline(timeout_s))]

    def below_dram(self, keys: Keys, *, timeout_s: float | None = None) -> list[bool]:
        """Return whether each block is in lower tiers only, so that the service has to bring it up; asks no service.

        To a user outside of the service's group every block that is there seems to be in DRAM.
        """
        found = self._reader.find(join_keys(keys), self._deadline(timeout_s))
        return [tiers != 0 and not tiers & TIER_DRAM for tiers in found]

    # --- reading -----------------------------------------------------------------------------------------
    def get(self, keys: Keys, *, timeout_s: float | None = None) -> list[View | None]:
        """Return a leased, read-only view of each block, None for a miss. Raises LimitExceeded (of mappings)."""
        deadline, joined = self._deadline(timeout_s), join_keys(keys)
        found = self._reader.map(joined, deadline)
        self._read_below(found, lambda below: self._below.map(choose_keys(joined, below), deadline), deadline)
        return [view if isinstance(view, View) else None for view in found]

    def get_into(self, keys: Keys, buffers: Places, *, timeout_s: float | None = None) -> list[int]:
        """Copy each block into its places; return the bytes of each, -1 for a miss.

        Raises InvalidRequest for a block that is longer than its places, LimitExceeded.
        """
        native = self._reader.native
        if native is not None and (found := native.read_into(keys, buffers)) is not None:
            return found
        deadline, joined = self._deadline(timeout_s), join_keys(keys)
        pieces = Pieces(buffers, len(joined) // DIGEST_BYTES, True)
        results = self._reader.read(joined, pieces, deadline)
        if min(results, default=0) < MISS:
            return self._get_rest(joined, pieces, results, deadline)
        return results

    def _get_rest(self, joined: bytes, pieces: Pieces, results: list[int], deadline: Deadline) -> list[int]:
        def read(below: list[int]) -> list[int]:
            return self._below.read(choose_keys(joined, below), pieces.choose(below), deadline)

        self._read_below(results, read, deadline)
        if NO_ROOM in results:
            i = results.index(NO_ROOM)
            raise InvalidRequest(
                f"block {key_at(joined, i).hex()} is longer than the {pieces.sizes()[i]} bytes of its places"
            )
        return [max(result, MISS) for result in results]

    def get_async(self, keys: Keys, *, timeout_s: float | None = None) -> Future[list[View | None]]:
        """Get views as `get` does, by one of the client's threads."""
        deadline = self._deadline(timeout_s)
        return self._workers.submit(lambda: self.get(keys, timeout_s=deadline.left_s))

    def get_into_async(
        self, keys: Keys, buffers: Places, *, timeout_s: float | None = None
    ) -> Future[list[int]]:
        """Read in a thread, by a deadline that counts from now; a load whose turn comes later finds what is in DRAM."""
        deadline = self._deadline(timeout_s)
        return self._workers.submit(lambda: self.get_into(keys, buffers, timeout_s=deadline.left_s))

    def load_layers(self, keys: Keys, layers: Sequence[Places], *, timeout_s: float | None = None) -> Loading:
        """Copy blocks layer by layer into `layers[i]`, in the background: see `Loading.wait_layer`.

        A block is cut into as many equal layers as `layers` has, along its outermost axis. It is leased until all are
        copied, so it is a hit in every layer or in none.
        """
        joined, deadline = join_keys(keys), self._deadline(timeout_s)
        loading = Loading([Pieces(places, len(joined) // DIGEST_BYTES, True) for places in layers])
        loading.done = self._workers.submit(lambda: loading.load(self.get(joined, timeout_s=deadline.left_s)))
        return loading

    def prefetch(self, keys: Keys, *, timeout_s: float | None = None) -> Future[int]:
        """Bring blocks up from lower tiers ahead of use; the result is how many of them are in DRAM then."""
        deadline, joined = self._deadline(timeout_s), join_keys(keys)
        return self._workers.submit(lambda: self._aside.count(Op.PREFETCH, joined, deadline))

    def match_cluster(self, keys: Keys, *, timeout_s: float | None = None) -> Future[dict[str, int]]:
        """Ask the directory, or the service's peers, how many blocks each machine has without a gap from the first on;
        those that have none, or do not answer at once, are left out. Raises Unsupported without a cluster."""
        deadline, joined = self._deadline(timeout_s), join_keys(keys)
        return self._workers.submit(
            lambda: self._remote.run(partial(Live.match_cluster, keys=joined), deadline)
        )

    def fetch(
        self, keys: Keys, *, hint: str | None = None, urgent: bool = True, timeout_s: float | None = None
    ) -> Future[int]:
        """Have the service fetch blocks that are not here from its peers, or from the peer `hint` alone; the result is
        how many are here then, in whatever tier. Those that are not urgent wait for those that are. Raises Unsupported
        without a cluster."""
        deadline, some = self._deadline(timeout_s), list(batches(join_keys(keys), limits.MAX_FETCH_BLOCKS))
        return self._workers.submit(
            lambda: sum(
                self._remote.run(partial(Live.fetch, keys=each, hint=hint, urgent=urgent), deadline)
                for each in some
            )
        )

    def _read_below(
        self, results: MutableSequence[T], read: Callable[[list[int]], Sequence[T]], deadline: Deadline
    ) -> None:
        """Replace BELOW in `results` by what `read` returns for these blocks, as far as there is time.

        The service leases each of them until its answer is sent, so none is evicted in between.
        """
        before: list[int] = []
        while (below := [i for i, result in enumerate(results) if result == BELOW]) and deadline.left_s > 0:
            if below == before:  # there is no room for any of them
                time.sleep(min(limits.READ_AGAIN_PAUSE_S, deadline.left_s))
            before = below
            try:
                for i, result in zip(below, read(below), strict=True):
                    results[i] = result
            except LimitExceeded:
                raise
            except KvfsError:  # out of time, no service, over a quota: misses
                return

    def device_pool(
        self,
        driver: Driver,
        context: Context,
        *,
        timeout_s: float | None = None,
        earlier: Earlier | None = None,
    ) -> DevicePool | None:
        """Attach to the pool of these blocks in the memory of the context's device, for the caller to close; None where
        the service shares none. `earlier`: a place whose session was lost; a restarted service takes over what it can
        of it, and it is closed once there is a session. Raises SessionClosed, DeadlinePassed, LimitExceeded (of
        processes)."""
        return attach_pool(
            self._begin,
            self._namespace,
            driver,
            context,
            self._left_pools,
            timeout_s=self._deadline(timeout_s).left_s,
            earlier=earlier,
        )

    # --- writing -----------------------------------------------------------------------------------------
    def put(
        self,
        keys: Keys,
        buffers: Places,
        parents: Sequence[bytes | None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Store blocks, parents first; True where a block is new, False where it was there, as its bucket promises.

        `parents` are the prefix hashes before them (None for a first block): no block is evicted before those
        that follow it. Raises SessionClosed, and the first error (NoSpace, ...) of a block; those before it may be
        stored. After a lost session, blocks that this call had stored count as there.
        """
        put, deadline = Put(keys, buffers, parents), self._deadline(timeout_s)
        grants, native = self._session.grants, self._reader.native
        if grants is not None:
            new = grants.put(put, native.table if native else None, deadline)
            if new is not None:
                self._refiller.ask(grants)
            if new:
                return [True] * put.count
            if new is False:
                return self._session.run(partial(self._finish_put, put=put, grants=grants), deadline)
        stored: list[bool] = []
        for at in range(0, put.count, PUTS_AT_ONCE):
            some = range(at, min(at + PUTS_AT_ONCE, put.count))
            stored += self._session.run(partial(self._put_some, put=put, some=some), deadline)
        return stored

    def _finish_put(self, live: Live, put: Put, grants: Grants) -> list[bool]:
        if put.statuses is None or live.grants is not grants:  # the session is lost, and the drafts with it
            return self._put_some(live, put, range(put.count))
        return seal_rest(live, put, list(range(put.count)), put.drafts, put.statuses)

    def _put_some(self, live: Live, put: Put, some: range) -> list[bool]:
        keys = put.keys[some.start * DIGEST_BYTES : some.stop * DIGEST_BYTES]
        there = self._find_put(live, keys)
        fresh = [i for i in some if not there[i - some.start]]
        if not fresh:
            return [False] * len(some)
        new = dict(zip(fresh, put_some(live, put, fresh), strict=True))
        self._refiller.ask(live.grants)
        return [new.get(i, False) for i in some]

    def _find_put(self, live: Live, keys: bytes) -> bytes:
        """Return a byte for each block: 0 where it is not there, as the bucket promises it, and is to be put."""
        return live.find_durable(keys) if live.durable else self._reader.find(keys, live.deadline)

    def put_async(
        self,
        keys: Keys,
        buffers: Places,
        parents: Sequence[bytes | None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Future[list[bool]]:
        """Put in a thread; the caller keeps the buffers unchanged until the future is done."""
        deadline = self._deadline(timeout_s)
        return self._workers.submit(lambda: self.put(keys, buffers, parents, timeout_s=deadline.left_s))

    def reserve(
        self,
        keys: Keys,
        sizes: Sequence[int],
        parents: Sequence[bytes | None] | None = None,
        *,
        layers: int = 0,
        timeout_s: float | None = None,
    ) -> list[Draft | None]:
        """Return a draft of the given size for each block, None for one that is there already.

        Fill it through the buffer protocol or by `write`; one that was reserved with `layers` (equal parts), layer by
        layer by `save_layer`; then `seal` it. Raises NoSpace, ObjectTooLarge, QuotaExceeded, SessionClosed.
        """
        deadline, joined = self._deadline(timeout_s), join_keys(keys)
        count = len(joined) // DIGEST_BYTES
        _check_sizes(sizes, count, layers)
        before = parents_of(parents, count)
        there = self._session.run(partial(self._find_put, keys=joined), deadline)
        drafts: list[Draft | None] = [None] * count
        fresh = [i for i in range(count) if not there[i]]
        try:
            for at in range(0, len(fresh), AT_ONCE):
                some = fresh[at : at + AT_ONCE]
                grant = partial(
                    Live.reserve,
                    keys=[key_at(joined, i) for i in some],
                    sizes=[sizes[i] for i in some],
                    parents=[before[i] for i in some],
                    layers=layers,
                )
                granted = self._session.run(grant, deadline)
                self._drafts.update(granted)
                for i, draft in zip(some, granted, strict=True):
                    drafts[i] = draft
        except BaseException:
            self.abort([draft for draft in drafts if draft is not None])
            raise
        return drafts

    def seal(self, drafts: Sequence[Draft | None], *, timeout_s: float | None = None) -> list[bool]:
        """Seal drafts: True where a block is new, False where it is there meanwhile (and for None).

        Raises InvalidRequest, and seals none, where one is not ready (layers are missing, its memory is in use).
        Raises SessionClosed where the session that granted one is gone, and the draft with it.
        """
        deadline = self._deadline(timeout_s)
        ready = [draft for draft in drafts if draft is not None]
        for draft in ready:
            draft.check_ready()
        for draft in ready:
            draft.finish()
        sealed: list[bool] = []
        for at in range(0, len(ready), limits.MAX_BATCH):
            some = ready[at : at + limits.MAX_BATCH]
            sealed += self._session.run(partial(seal_when_closed, drafts=some), deadline, again=False)
        new = iter(sealed)
        return [draft is not None and next(new) for draft in drafts]

    def abort(self, drafts: Sequence[Draft | None], *, timeout_s: float | None = None) -> None:
        """Abort drafts."""
        given = [draft for draft in drafts if draft is not None]
        for draft in given:
            draft.close()
        deadline = self._deadline(timeout_s)
        with suppress(SessionClosed):  # the service aborts the drafts of a lost session
            for at in range(0, len(given), limits.MAX_BATCH):
                self._session.run(partial(Live.abort, drafts=given[at : at + limits.MAX_BATCH]), deadline)

    # --- the rest ----------------------------------------------------------------------------------------
    def remove(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Remove blocks from all tiers; return how many were there."""
        deadline, some = self._deadline(timeout_s), batches(join_keys(keys), limits.MAX_BATCH)
        return sum(self._session.run(partial(Live.remove, keys=each), deadline) for each in some)

    def pin(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Keep blocks from being evicted; return how many were there. Raises NotPermitted unless the caller owns the
        bucket."""
        return self._set_pinned(join_keys(keys), True, self._deadline(timeout_s))

    def unpin(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Let blocks be evicted again; return how many were there."""
        return self._set_pinned(join_keys(keys), False, self._deadline(timeout_s))

    def _set_pinned(self, joined: bytes, pinned: bool, deadline: Deadline) -> int:
        count = 0
        for i in range(len(joined) // DIGEST_BYTES):
            name = [self.bucket, text(block_name(key_at(joined, i)))]
            with suppress(NotFound):
                self._session.run(partial(Live.pin, name=name, pinned=pinned), deadline)
                count += 1
        return count

    def report_hits(self, *, timeout_s: float | None = None) -> int:
        """Report hits to the service now, for eviction; a thread does it every CLIENT_REPORT_S."""
        deadline, found = self._deadline(timeout_s), 0
        while hits := self._reader.take_hits():
            found += self._aside.count(Op.TOUCH, hits, deadline)
        return found

    def _deadline(self, timeout_s: float | None) -> Deadline:
        if self._forked:
            raise SessionClosed("a forked child cannot use its parent's blocks: connect anew")
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)


def _check_sizes(sizes: Sequence[int], count: int, layers: int) -> None:
    if len(sizes) != count:
        raise InvalidRequest(f"{count} keys and {len(sizes)} sizes")
    for size in sizes:
        if size < 0 or (layers and size % layers):
            raise InvalidRequest(f"a block of {size} bytes has no {layers} equal layers")


def _report_hits(blocks: weakref.ref[Blocks], closed: threading.Event) -> None:
    while not closed.wait(limits.CLIENT_REPORT_S):
        live = blocks()
        if live is None or live._forked:
            return
        with suppress(KvfsError, OSError):  # hits are a hint: those not reported are not counted
            live.report_hits(timeout_s=limits.CLIENT_REPORT_S)
        del live


def _mark_forked() -> None:
    """Close every writable descriptor in a forked child: an open one would keep its draft from being sealed."""
    for blocks in list(_forkable):
        blocks._forked = True
        blocks._reader.native = None
        blocks._session.after_fork()
        blocks._aside.after_fork()
        blocks._remote.after_fork()
        for draft in list(blocks._drafts):
            draft.after_fork()


os.register_at_fork(after_in_child=_mark_forked)
