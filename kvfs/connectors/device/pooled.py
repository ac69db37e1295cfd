"""Blocks in the device's own memory: loaded from the pool that processes share, and added to it.

Responsibility: load what the pool has, each block verified on the device; add blocks that were loaded from below; go on
without the pool where that fails; have a restarted service take over what an earlier one's pool had.

Invariants:
- A block counts as loaded once its slot has the checksum that it was sealed with, computed behind the copy while the
  slot is leased. One that has not is dropped at the service, and loaded from below.
- A lease ends, a draft is sealed, and a place in the pool is left, after the copies that use them.
- No failure of a pool is one of a load. A place that failed is left by the last thread that uses it; another one is
  taken CONNECTOR_RETRY_S later. One whose session is lost stays mapped until then, HBM_KEEP_S at most while there are
  loads, to be taken over.

Concurrency: any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvfs._native.cuda.copies import DevicePlaces
from kvfs._native.cuda.driver import Context, Event, Stream
from kvfs.client.device_pool import DevicePool, Earlier, PoolBlock, PoolDraft
from kvfs.client.transport import Deadline
from kvfs.connectors.device.slot_copies import LEAST_BYTES, SlotCopies
from kvfs.errors import AccessDenied, DeadlinePassed, KvfsError
from kvfs.limits import CONNECTOR_POOL_S, CONNECTOR_RETRY_S, CONNECTOR_SLOTS, HBM_KEEP_S, MAX_COPY_PIECES

Attach = Callable[[Context, float, Earlier | None], DevicePool | None]
"""Takes a place in the pool of a namespace's blocks on the context's device within so many seconds, after an earlier
one, as `Blocks.device_pool` does; None where the service has no such pool. Raises KvfsError, OSError."""
log = logging.getLogger("kvfs.connectors")


@dataclass(slots=True)
class _Place:
    pool: DevicePool
    users: int = 1
    is_lost: bool = False


@dataclass(slots=True)
class PoolCounts:
    """Counts blocks: loaded from the pool and verified, added to it, and found wrong on the device."""

    verified: int = 0
    promoted: int = 0
    mismatched: int = 0


class PooledBlocks:
    """The blocks of one namespace in the pool of a device."""

    def __init__(self, copies: SlotCopies, stream: Stream, attach: Attach) -> None:
        """Load on `stream`, which other loads into the same caches use too."""
        self._copies, self._stream, self._attach = copies, stream, attach
        self.counts = PoolCounts()
        self._lock = threading.Condition()
        self._place: _Place | None = None
        self._earlier: DevicePool | None = None
        self._is_attaching = self._is_off = self._has_failed = False
        self._again_s = self._keep_until_s = 0.0
        self._may_add = True

    # --- loads --------------------------------------------------------------------------------------------
    def load(self, keys: bytes, places: DevicePlaces, before: Event, deadline: Deadline) -> list[bool]:
        """Load the blocks that the pool has, behind `before`; return which are at their places."""
        there = [False] * len(places)
        if places.block_bytes < LEAST_BYTES:
            return there
        with self._using(deadline) as pool:
            if pool is None:
                return there
            leased = pool.lease(keys, timeout_s=min(deadline.left_s, CONNECTOR_POOL_S))
            try:
                whole = [
                    (row, block)
                    for row, block in enumerate(leased)
                    if block is not None and block.size_bytes == places.block_bytes
                ]
                at_once = max(min(CONNECTOR_SLOTS, MAX_COPY_PIECES // places.block_pieces), 1)
                for at in range(0, len(whole), at_once):
                    for row in self._load_part(pool, whole[at : at + at_once], places, before):
                        there[row] = True
            finally:
                pool.release(block for block in leased if block is not None)
        return there

    def owes_report(self) -> bool:
        """Return whether the service is to be told of what was loaded."""
        place = self._place
        return place is not None and place.pool.owes_report

    def report(self) -> None:
        """Tell the service what was loaded without asking it."""
        with self._using(Deadline.after(CONNECTOR_POOL_S)) as pool:
            if pool is not None:
                pool.report(timeout_s=CONNECTOR_POOL_S)

    def _load_part(
        self, pool: DevicePool, part: Sequence[tuple[int, PoolBlock]], places: DevicePlaces, before: Event
    ) -> list[int]:
        """Copy leased blocks; return the rows of those that are right."""
        rows, blocks = [row for row, _ in part], [block for _, block in part]
        checksums = self._copies.run(
            places.choose(rows).load_plan([block.address for block in blocks], pool.regions),
            [(block.address, block.size_bytes) for block in blocks],
            self._stream,
            before,
            within=True,
        )
        wrong = [block for block, found in zip(blocks, checksums, strict=True) if block.checksum != found]
        if wrong:
            log.warning("%d blocks are wrong in GPU memory, and are loaded from below", len(wrong))
            pool.drop(wrong, timeout_s=CONNECTOR_POOL_S)
        with self._lock:
            self.counts.verified += len(blocks) - len(wrong)
            self.counts.mismatched += len(wrong)
        return [
            row for row, block, found in zip(rows, blocks, checksums, strict=True) if block.checksum == found
        ]

    # --- additions ----------------------------------------------------------------------------------------
    def promote(
        self, keys: bytes, sources: Sequence[int], size_bytes: int, region: tuple[int, int], stream: Stream
    ) -> None:
        """Add blocks that lie at these addresses of registered memory, as far as the service wants them."""
        if size_bytes < LEAST_BYTES or not self._may_add:
            return
        with self._using(Deadline.after(CONNECTOR_POOL_S)) as pool:
            if pool is None:
                return
            try:
                reserved = pool.reserve(keys, timeout_s=CONNECTOR_POOL_S)
            except AccessDenied as error:
                log.info("blocks are not added to GPU memory: %s", error)
                self._may_add = False
                return
            granted = [
                (draft, source) for draft, source in zip(reserved, sources, strict=True) if draft is not None
            ]
            wanted = [each for each in granted if each[0].size_bytes == size_bytes]
            if len(wanted) < len(granted):  # stored anew since, in another size
                others = [draft for draft, _ in granted if draft.size_bytes != size_bytes]
                pool.abort(others, timeout_s=CONNECTOR_POOL_S)
            for at in range(0, len(wanted), CONNECTOR_SLOTS):
                self._promote_part(pool, wanted[at : at + CONNECTOR_SLOTS], region, stream)

    def _promote_part(
        self,
        pool: DevicePool,
        part: Sequence[tuple[PoolDraft, int]],
        region: tuple[int, int],
        stream: Stream,
    ) -> None:
        """Copy blocks, all of one size, to their drafts, and seal these."""
        drafts = [draft for draft, _ in part]
        slots = DevicePlaces([draft.address for draft in drafts], [0], drafts[0].size_bytes, pool.regions)
        checksums = self._copies.run(
            slots.load_plan([source for _, source in part], [region]),
            [(draft.address, draft.size_bytes) for draft in drafts],
            stream,
            None,
            within=False,
        )
        sealed = pool.seal(drafts, checksums, timeout_s=CONNECTOR_POOL_S)
        with self._lock:
            self.counts.promoted += sum(sealed)

    # --- the place in the pool ----------------------------------------------------------------------------
    @contextmanager
    def _using(self, deadline: Deadline) -> Iterator[DevicePool | None]:
        """Hold the place in the pool, None where there is none now; a failure inside ends the block, and loses it."""
        place = self._enter(deadline)
        try:
            yield None if place is None else place.pool
        except (KvfsError, OSError) as error:
            if place is None:
                raise
            self._say(error)
            place.is_lost = True
        finally:
            if place is not None:
                self._leave(place)

    def _enter(self, deadline: Deadline) -> _Place | None:
        with self._lock:
            if self._place is not None:
                if self._place.is_lost:
                    return None
                self._place.users += 1
                return self._place
            if self._is_off or self._is_attaching or time.monotonic() < self._again_s:
                return None
            self._is_attaching = True
        pool = None
        try:
            pool = self._attach_next(min(deadline.left_s, CONNECTOR_POOL_S))
            if pool is None:
                self._is_off = True
        except (KvfsError, OSError) as error:
            self._say(error)
        finally:
            with self._lock:
                self._is_attaching, self._again_s = False, time.monotonic() + CONNECTOR_RETRY_S
                if pool is not None:
                    self._place, self._has_failed = _Place(pool, is_lost=self._is_off), False
                self._lock.notify_all()
        return self._place if pool is not None else None

    def _attach_next(self, timeout_s: float) -> DevicePool | None:
        """Take a place after the earlier one, which is left then, or once it was kept for long enough."""
        earlier = self._earlier
        try:
            return self._attach(
                self._copies.context,
                timeout_s,
                None if earlier is None else Earlier(earlier, self._checksums),
            )
        finally:
            if earlier is not None and (earlier.is_closed or time.monotonic() >= self._keep_until_s):
                self._earlier = None
                _close(earlier)

    def _checksums(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        return self._copies.checksums(slots, self._stream)

    def _leave(self, place: _Place) -> None:
        with self._lock:
            if place.users > 1 or not place.is_lost:
                place.users -= 1
                return
            keeps = not self._is_off and not place.pool.is_open
        if not keeps:  # still a user, so that `close`, which ends what its memory is mapped in, waits
            _close(place.pool)
        with self._lock:
            now_s = time.monotonic()
            if keeps:
                self._earlier, self._keep_until_s = place.pool, now_s + HBM_KEEP_S
            self._place, self._again_s = None, now_s + CONNECTOR_RETRY_S
            self._lock.notify_all()

    def _say(self, error: BaseException) -> None:
        """Log the first failure after the pool worked, or was not asked yet."""
        if not self._has_failed:
            self._has_failed = True
            log.warning("loads go on without blocks in GPU memory: %s", error)

    def close(self, deadline: Deadline) -> None:
        """Use the pool no more; wait until nothing uses it, and leave it. Raises DeadlinePassed."""
        with self._lock:
            self._is_off = True
            place = self._place
            if place is not None:
                place.users += 1
                place.is_lost = True
        if place is not None:
            self._leave(place)
        with self._lock:
            if not self._lock.wait_for(
                lambda: self._place is None and not self._is_attaching, timeout=deadline.left_s
            ):
                raise DeadlinePassed(f"a load from GPU memory did not end within {deadline.limit_s:g} s")
        if self._earlier is not None:
            _close(self._earlier)


def _close(pool: DevicePool) -> None:
    with suppress(KvfsError, OSError):  # a lost context, or session, has ended it
        pool.close(timeout_s=CONNECTOR_POOL_S)
