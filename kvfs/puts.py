"""Putting blocks fast: drafts granted ahead, seals answered by the service's sealing thread.

Responsibility: what one session was granted ahead (`Grants`), whole puts through it, the way through the event
loop for what it does not take, and the thread that asks for more drafts while puts go on (`Refiller`).

Invariants:
- A put that meets the sealing thread costs the event loop nothing: it catches up later, and grants ahead.
- Whatever the fast way refuses goes the slow one (more room by eviction, a durable bucket, an overrun thread), so
  an error that a caller sees is the event loop's.
- A seal channel has one user at a time; when an answer on it is lost, the session is.
- No writable descriptor outlives its use by a fork: a child that lives on would keep a draft from being sealed.

Concurrency: whoever has `Grants.held` uses the channel and the spares. It is held for a put's copy and round trip, so
who waits for it does so until his own deadline.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvfs import limits
from kvfs._native.table import Table
from kvfs._native.writer import Draft, Put, put_blocks, write_drafts
from kvfs.errors import DeadlinePassed, KvfsError, SessionClosed, WriterActive
from kvfs.exchange import status_error
from kvfs.messages import DIGEST_BYTES, Abort, DigestBatch, Op, Reserve
from kvfs.transport import Deadline, Transport, close_all

if TYPE_CHECKING:
    from kvfs.block_session import Live

Spare = tuple[int, int, int]
"""Slot, generation, writable descriptor."""
_CHANNEL_TICK_S = 0.1
"""A wait on the channel looks at its deadline this often."""
_BUSY_PAUSE_S = 0.001
_BUSY_WAIT_S = 1.0
"""How long a seal waits for a writer to let go: a child between fork and exec has our descriptors for a moment."""
_TO_EVENT_LOOP = frozenset((errno.EAGAIN, errno.ESTALE, errno.EBUSY))
"""The draft is whole, and the sealing thread did not take it."""


class Grants:
    """What a session has ahead of use."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self.spares: deque[Spare] = deque()
        self.wanted = int(transport.hello.details["quota"]["spare_drafts"])
        """How many the service lets a client have."""
        self._channel: int | None = None
        self._refused = False

    @contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Use the channel and the spares, alone. Raises DeadlinePassed."""
        if not self._lock.acquire(timeout=max(deadline.left_s, 0.0)):
            raise DeadlinePassed(f"other threads put blocks for {deadline.limit_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @property
    def has_channel(self) -> bool:
        return self._channel is not None

    def channel(self, live: Live) -> int | None:
        """The seal channel, opened when it is first asked for; None where the service offers none."""
        if self._channel is None and not self._refused:
            with self.held(live.deadline):
                if self._channel is None:
                    self._channel = self._open(live)
                    self._refused = self._channel is None
        return self._channel

    @staticmethod
    def _open(live: Live) -> int | None:
        [(_, descriptor)] = live.exchange.open(DigestBatch(Op.OPEN_SEALER, live.handle, live.digest))
        if descriptor is not None:
            tick = struct.pack("ll", 0, int(_CHANNEL_TICK_S * 1e6))
            with socket.socket(fileno=os.dup(descriptor)) as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        return descriptor

    def put(self, put: Put, table: Table | None, deadline: Deadline) -> bool | None:
        """Put all of it now, if that takes nothing but what is there: whether all is new. None: nothing was done."""
        if self._channel is None or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._channel is None:
                return None
            new = put.at_once(self._channel, self.spares, table, max(deadline.left_s, 0.0))
        finally:
            self._lock.release()
        if new is False and put.statuses is None:
            self._transport.close()
        return new

    def close(self) -> None:
        """Close every descriptor, when nobody uses it. The service takes back what they were. REQUIRES one caller at a
        time: nobody else closes the channel."""
        if self._channel is not None:  # a put under way ends at once, whatever its deadline
            with socket.socket(fileno=os.dup(self._channel)) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self.after_fork()

    def after_fork(self) -> None:
        """In a child, where the lock may be a parent's thread's for ever."""
        self._refused = True
        if self._channel is not None:
            os.close(self._channel)
            self._channel = None
        while self.spares:
            os.close(self.spares.pop()[2])

    def add(self, drafts: Sequence[Spare], deadline: Deadline) -> None:
        """Have these ahead, unless the session has ended meanwhile. Raises DeadlinePassed, and then closes them."""
        kept = False
        try:
            with self.held(deadline):
                kept = self._channel is not None
                if kept:
                    self.spares.extendleft(drafts)
        finally:
            if not kept:
                close_all([descriptor for _, _, descriptor in drafts])

    def take(self, count: int, deadline: Deadline) -> list[Spare]:
        """Spare drafts, as many as there are. Raises DeadlinePassed."""
        with self.held(deadline):
            return [self.spares.pop() for _ in range(min(count, len(self.spares)))]


def put_some(live: Live, put: Put, blocks: list[int], deadline: Deadline) -> list[bool]:
    """Put these blocks (indexes; PUTS_AT_ONCE at most): which are new. Raises the first failure."""
    channel = live.grants.channel(live)
    if channel is None:
        return _put_slowly(live, put, blocks, deadline)
    drafts = _take_drafts(live, len(blocks))
    given = False
    try:
        with live.grants.held(deadline):
            left_s, given = max(deadline.left_s, 0.0), True
            statuses = put_blocks(channel, drafts, blocks, put.keys, put.parents, put.pieces, left_s)
    finally:
        if not given:
            close_all([draft[2] for draft in drafts])
    if statuses is None:
        live.transport.close()
        raise SessionClosed("the seal channel was closed, or its answer did not come in time")
    return settle(live, put, blocks, drafts, statuses, deadline)


def settle(
    live: Live,
    put: Put,
    blocks: list[int],
    drafts: list[Spare],
    statuses: list[int],
    deadline: Deadline,
) -> list[bool]:
    """What became of blocks that were written; those that the thread did not take go through the event loop."""
    new = {block: status == 0 for block, status in zip(blocks, statuses, strict=True)}
    whole, failed = [], []
    for block, draft, status in zip(blocks, drafts, statuses, strict=True):
        if status in _TO_EVENT_LOOP:
            whole.append((block, draft))
        elif status not in (0, errno.EEXIST):
            failed.append((block, draft))
    if whole:
        closed = [_closed(put, block, draft, live.transport) for block, draft in whole]
        new.update(zip([block for block, _ in whole], seal_patiently(live, closed, deadline), strict=True))
    if failed:  # no room without eviction, mostly
        live.exchange.results(Abort(tuple((slot, generation) for _, (slot, generation, _) in failed)))
        again = [block for block, _ in failed]
        new.update(zip(again, _put_slowly(live, put, again, deadline), strict=True))
    return [new[block] for block in blocks]


def _closed(put: Put, block: int, draft: Spare, session: Transport) -> Draft:
    slot, generation, _ = draft
    return Draft(_at(put.keys, block), _at(put.parents, block), 0, slot, generation, -1, session)


def _put_slowly(live: Live, put: Put, blocks: list[int], deadline: Deadline) -> list[bool]:
    """Through the event loop: sizes are said before, so that it makes room."""
    chosen = put.pieces.choose(blocks)
    keys, parents = [_at(put.keys, i) for i in blocks], [_at(put.parents, i) for i in blocks]
    drafts = live.reserve(keys, chosen.sizes(), parents)
    try:
        write_drafts(drafts, chosen)
        return seal_patiently(live, drafts, deadline)
    except BaseException:
        live.abort(drafts)
        raise


def seal_patiently(live: Live, drafts: Sequence[Draft], deadline: Deadline) -> list[bool]:
    """Seal closed drafts, again while somebody else has one open for writing, for a moment."""
    end_s = min(time.monotonic() + _BUSY_WAIT_S, deadline.end_s)
    while True:
        try:
            return live.seal(drafts)
        except WriterActive:
            if time.monotonic() > end_s:
                raise
            time.sleep(_BUSY_PAUSE_S)


def _take_drafts(live: Live, count: int) -> list[Spare]:
    """Spare drafts, and new ones where these do not suffice. Raises the error of one that is not granted."""
    taken = live.grants.take(count, live.deadline)
    if len(taken) == count:
        return taken
    try:
        taken += reserve_spares(live, count - len(taken))
    except BaseException:
        close_all([descriptor for _, _, descriptor in taken])
        raise
    if len(taken) < count:
        give_back(live, taken)
        raise status_error(errno.ENOSPC, f"reserving {count} drafts")
    return taken


def reserve_spares(live: Live, count: int) -> list[Spare]:
    """As many drafts of no promised size as the service grants now."""
    opened = live.exchange.open(Reserve((0,) * count))
    return [(entry.slot, entry.generation, fd) for entry, fd in opened if fd is not None]


def give_back(live: Live, spares: Sequence[Spare]) -> None:
    close_all([descriptor for _, _, descriptor in spares])
    if spares and live.transport.is_open:
        live.exchange.results(Abort(tuple((slot, generation) for slot, generation, _ in spares)))


class Refiller:
    """Keeps spare drafts while puts go on, by a thread that ends when they do not."""

    def __init__(self, run: Callable[[Callable[[Live], None], Deadline], None]) -> None:
        """`run` calls a function with the session that there is."""
        self._run = run
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._running = False
        self._closed = threading.Event()

    def ask(self, grants: Grants) -> None:
        """Puts go on: have more drafts when less than half are left."""
        if len(grants.spares) * 2 > grants.wanted or not grants.wanted or not grants.has_channel:
            return
        self._asked.set()
        if not self._running:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if not (self._running or self._closed.is_set()):
                self._running = True
                threading.Thread(target=self._refill, daemon=True, name="kvfs-drafts").start()

    def close(self) -> None:
        self._closed.set()
        self._asked.set()

    def _refill(self) -> None:
        while True:
            asked = self._asked.wait(limits.CLIENT_SPARE_IDLE_S)
            if self._closed.is_set():
                return
            self._asked.clear()
            with suppress(KvfsError, OSError):  # the next put finds out, and says so
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
    give_back(live, live.grants.take(live.grants.wanted, live.deadline))


def _at(joined: bytes, block: int) -> bytes:
    return joined[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
