"""Putting blocks fast: drafts granted ahead, seals answered by the service's sealing thread.

Responsibility: puts through drafts granted ahead (`kvfs.client.grants`), the slow way through the service's event loop,
and the thread that reserves more drafts while puts go on (`Refiller`).

Invariants:
- A put that the sealing thread takes costs the service's event loop nothing at that moment.
- What the fast way refuses goes the slow one (room needs eviction, the bucket is durable, the thread is overrun), so
  every error that a caller sees is the event loop's.

Concurrency: calls from any thread; `Grants.held` keeps those of one session apart.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvfs import limits
from kvfs._native.blocks.writer import Draft, Put, put_blocks, write_drafts
from kvfs.client.grants import Grants, Spare
from kvfs.client.session import Live
from kvfs.client.transport import Deadline, Transport, close_all
from kvfs.errors import KvfsError, SessionClosed, WriterActive, status_error
from kvfs.keys import key_at
from kvfs.protocol.messages import Abort, Reserve

_BUSY_PAUSE_S = 0.001
_BUSY_WAIT_S = 1.0
"""How long a seal waits for another writer: a child between fork and exec has this process's descriptors."""
_TO_EVENT_LOOP = frozenset((errno.EAGAIN, errno.ESTALE, errno.EBUSY))
"""Statuses of a draft that is written and that the sealing thread did not take."""


def put_some(live: Live, put: Put, blocks: list[int]) -> list[bool]:
    """Put these blocks (indexes, PUTS_AT_ONCE at most); return which are new. Raises the first failure."""
    live.grants.size_bytes = put.size_bytes
    channel = _channel(live, len(blocks))
    if channel is None:
        return _put_slowly(live, put, blocks)
    drafts = _take_drafts(live, len(blocks))
    given = False
    try:
        with live.grants.held(live.deadline):
            if not live.grants.has_channel:  # closed since: its number may be another file's
                raise SessionClosed("the session ended before the blocks were written")
            left_s, given = live.deadline.left_s, True
            statuses = put_blocks(channel, drafts, blocks, put.keys, put.parents, put.pieces, left_s)
    finally:
        if not given:
            close_all([draft[2] for draft in drafts])
    if statuses is None:
        live.transport.close()
        raise SessionClosed("the seal channel was closed, or its answer did not come in time")
    return seal_rest(live, put, blocks, drafts, statuses)


def _channel(live: Live, count: int) -> int | None:
    """Return the seal channel; None where the service offers none.

    The first drafts are reserved ahead of the channel: once the service answers for that, it has closed its own
    descriptors of them, for which the sealing thread would find a writer (EBUSY) in half of all sessions.
    """
    first = reserve_spares(live, count) if live.grants.is_new else []
    try:
        channel = live.grants.channel(live.open_sealer, live.deadline)
    except BaseException:
        close_all([spare[2] for spare in first])
        raise
    if channel is None:
        abort_spares(live, first)
    else:
        live.grants.add(first, live.deadline)
    return channel


def seal_rest(
    live: Live, put: Put, blocks: list[int], drafts: list[Spare], statuses: list[int]
) -> list[bool]:
    """Seal through the event loop what the sealing thread did not take; return which of all are new."""
    new = {block: status == 0 for block, status in zip(blocks, statuses, strict=True)}
    whole, failed = [], []
    for block, draft, status in zip(blocks, drafts, statuses, strict=True):
        if status in _TO_EVENT_LOOP:
            whole.append((block, draft))
        elif status not in (0, errno.EEXIST):
            failed.append((block, draft))
    if whole:
        closed = [_closed(put, block, draft, live.transport) for block, draft in whole]
        new.update(zip([block for block, _ in whole], seal_when_closed(live, closed), strict=True))
    if failed:  # no room without eviction, mostly
        live.exchange.results(Abort(tuple(draft[:2] for _, draft in failed)))
        again = [block for block, _ in failed]
        new.update(zip(again, _put_slowly(live, put, again), strict=True))
    return [new[block] for block in blocks]


def _closed(put: Put, block: int, draft: Spare, session: Transport) -> Draft:
    slot, generation = draft[:2]
    return Draft(key_at(put.keys, block), key_at(put.parents, block), 0, slot, generation, -1, session)


def _put_slowly(live: Live, put: Put, blocks: list[int]) -> list[bool]:
    """Put through the event loop, which is given the sizes first, so that it makes room."""
    chosen = put.pieces.choose(blocks)
    keys, parents = ([key_at(each, i) for i in blocks] for each in (put.keys, put.parents))
    drafts = live.reserve(keys, chosen.sizes(), parents)
    try:
        write_drafts(drafts, chosen)
        return seal_when_closed(live, drafts)
    except BaseException:
        live.abort(drafts)
        raise


def seal_when_closed(live: Live, drafts: Sequence[Draft]) -> list[bool]:
    """Seal closed drafts; try again for _BUSY_WAIT_S while another process has one open for writing."""
    end_s = min(time.monotonic() + _BUSY_WAIT_S, live.deadline.end_s)
    while True:
        try:
            return live.seal(drafts)
        except WriterActive:
            if time.monotonic() > end_s:
                raise
            time.sleep(_BUSY_PAUSE_S)


def _take_drafts(live: Live, count: int) -> list[Spare]:
    """Take spare drafts, and reserve what is missing. Raises NoSpace where the service does not grant all."""
    taken = live.grants.take(count, live.deadline)
    if len(taken) == count:
        return taken
    try:
        taken += reserve_spares(live, count - len(taken))
    except BaseException:
        close_all([spare[2] for spare in taken])
        raise
    if len(taken) < count:
        abort_spares(live, taken)
        raise status_error(errno.ENOSPC, f"reserving {count} drafts")
    return taken


def reserve_spares(live: Live, count: int) -> list[Spare]:
    """Reserve drafts for which no room is reserved yet, as many of `count` as the service grants now."""
    opened = live.exchange.open(Reserve((live.grants.size_bytes,) * count, kept=True))
    return [(entry.slot, entry.generation, fd, entry.size_bytes) for entry, fd in opened if fd is not None]


def abort_spares(live: Live, spares: Sequence[Spare]) -> None:
    """Close spare drafts, and have the service abort them while the session is open."""
    close_all([spare[2] for spare in spares])
    if spares and live.transport.is_open:
        live.exchange.results(Abort(tuple(spare[:2] for spare in spares)))


class Refiller:
    """Keep spare drafts by a thread that runs while puts go on."""

    def __init__(self, run: Callable[[Callable[[Live], None], Deadline], None]) -> None:
        """Take `run`, which calls a function with the present session."""
        self._run = run
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._running = False
        self._closed = threading.Event()

    def ask(self, grants: Grants) -> None:
        """Have more drafts reserved when less than half are left."""
        if len(grants.spares) * 2 > grants.wanted or not grants.wanted or not grants.has_channel:
            return
        self._asked.set()
        with self._lock:  # a thread that ends looks a last time whether somebody asks
            if not (self._running or self._closed.is_set()):
                self._running = True
                threading.Thread(target=self._refill, daemon=True, name="kvfs-drafts").start()

    def close(self) -> None:
        """Have the thread end; does not wait for it."""
        self._closed.set()
        self._asked.set()

    def _refill(self) -> None:
        while True:
            asked = self._asked.wait(limits.CLIENT_SPARE_IDLE_S)
            if self._closed.is_set():
                return
            if asked:  # who asks from here on is seen below
                self._asked.clear()
            with suppress(KvfsError, OSError):  # the next put raises it
                self._run(_fill if asked else _empty, Deadline.after(limits.CLIENT_SPARE_IDLE_S))
            if not asked:
                with self._lock:
                    if not self._asked.is_set():
                        self._running = False
                        return


def _fill(live: Live) -> None:
    missing = live.grants.wanted - len(live.grants.spares)
    if missing > 0:
        live.grants.add(reserve_spares(live, missing), live.deadline)


def _empty(live: Live) -> None:
    abort_spares(live, live.grants.take(live.grants.wanted, live.deadline))
