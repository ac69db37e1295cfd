"""Loads of blocks into a paged cache on a CUDA device.

Responsibility: copy what the device's pool has (`kvfs.connectors.device.pooled`); read other blocks into registered
memory, part by part, and copy each part to its places on a stream of this object's own while the next one is read; add
those to the pool from there, one part at a time, when the load has ended.

Invariants:
- Nothing is written to the cache before what the engine's stream was given when the load was submitted has ended; and
  nothing any more once the load's future is done.
- A buffer is used again after the copies from it have ended, those to the pool too. Who waits for one holds none, or
  waits for its own copies.

Concurrency: submitted by any thread; loads run on a few threads, whose copies start one after the other.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from kvfs._native.blocks.pieces import Scatter
from kvfs._native.blocks.reader import MISS
from kvfs._native.cuda.copies import Copier, DevicePlaces
from kvfs._native.cuda.driver import Context, Event
from kvfs._native.cuda.images import kernel_image
from kvfs.client.session import choose_keys
from kvfs.client.transport import Deadline
from kvfs.client.workers import Workers
from kvfs.connectors.device.buffers import Buffer, buffer_bytes
from kvfs.connectors.device.pooled import Attach, PooledBlocks
from kvfs.connectors.device.slot_copies import SlotCopies
from kvfs.errors import KvfsError
from kvfs.limits import CONNECTOR_STAGING_BUFFERS, CONNECTOR_TIMEOUT_S

Read = Callable[[bytes, Scatter, float], list[int]]
"""Copies the blocks of these keys to their places within so many seconds; returns the bytes of each, -1 for a miss."""


class _Staging:
    """A buffer, and the end of the copies from it."""

    def __init__(self, context: Context, size_bytes: int) -> None:
        self.buffer = Buffer(context, size_bytes)
        self.copied = context.event(sleeps=True)  # who waits for it may wait for a whole step
        self.keys, self.starts, self.block_bytes = b"", list[int](), 0
        """The blocks that are in it, whole, and where."""

    def close(self) -> None:
        self.buffer.close()
        self.copied.destroy()


@dataclass(frozen=True, slots=True)
class _Load:
    """Blocks that are loaded together."""

    read: Read
    keys: bytes
    places: DevicePlaces
    before: Event
    """Nothing is written before it."""
    deadline: Deadline
    pooled: PooledBlocks | None

    def choose(self, rows: Sequence[int]) -> _Load:
        """Return the load of some of the blocks."""
        return replace(self, keys=choose_keys(self.keys, rows), places=self.places.choose(rows))


class DeviceLoads:
    """Load blocks into the caches of one device."""

    def __init__(self, context: Context, block_bytes: int, compute_stream: Callable[[], int]) -> None:
        """Register memory for blocks of up to `block_bytes`. `compute_stream` returns the driver's handle of the stream
        that the calling thread computes on. Raises what `kvfs.errors.from_cuda` does."""
        self._context, self._compute_stream = context, compute_stream
        self._copier, self._stream = Copier(context, kernel_image("copy")), context.stream()
        self._starting = threading.Lock()
        self._workers = Workers()
        self._slots = SlotCopies(context, self._copier, self._starting)
        self._pooled: list[PooledBlocks] = []
        self._promoter, self._promotions = Workers(), context.stream()
        self._is_idle = threading.Semaphore()
        self._free: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        self._buffer_bytes = buffer_bytes(block_bytes)
        self._buffers = CONNECTOR_STAGING_BUFFERS
        """How many were not given back yet."""
        for _ in range(self._buffers):
            self._free.put(_Staging(context, self._buffer_bytes))

    def close(self) -> None:
        """Begin no load any more, and give the memory back once those under way have ended, or wait no longer. Closing
        twice is harmless: what has been given back is not waited for."""
        self._workers.close()
        self._promoter.close()
        deadline = Deadline.after(CONNECTOR_TIMEOUT_S)
        with suppress(queue.Empty, KvfsError):  # a lost context has given all back
            while self._buffers:
                staging = self._free.get(timeout=deadline.left_s)
                self._buffers -= 1
                staging.close()
            for pooled in self._pooled:
                pooled.close(deadline)
            self._slots.close()
            self._copier.close()
            self._stream.destroy()
            self._promotions.destroy()

    def pooled(self, attach: Attach) -> PooledBlocks:
        """Make what loads a namespace's blocks from the device's pool, for `submit`."""
        self._pooled.append(PooledBlocks(self._slots, self._stream, attach))
        return self._pooled[-1]

    def submit(
        self,
        read: Read,
        keys: bytes,
        places: DevicePlaces,
        *,
        timeout_s: float,
        pooled: PooledBlocks | None = None,
    ) -> Future[list[int]]:
        """Load blocks; the result is the bytes of each, as `read` returns them, once all of it is at its places. Raises
        LimitExceeded."""
        before = self._context.event()
        before.record(self._context.borrow_stream(self._compute_stream()))
        load = _Load(read, keys, places, before, Deadline.after(timeout_s), pooled)
        return self._workers.submit(partial(self._load, load))

    def _load(self, load: _Load) -> list[int]:
        if load.pooled is None:
            return self._load_below(load)
        there = load.pooled.load(load.keys, load.places, load.before, load.deadline)
        if load.pooled.owes_report():
            self._aside(load.pooled.report)
        left = [row for row, is_there in enumerate(there) if not is_there]
        sizes = [load.places.block_bytes] * len(there)
        for row, size in zip(left, self._load_below(load.choose(left)), strict=True):
            sizes[row] = size
        return sizes

    def _load_below(self, load: _Load) -> list[int]:
        sizes: list[int] = []
        used: deque[_Staging] = deque()
        count, at_once = len(load.places), self._buffer_bytes // load.places.block_bytes
        try:
            for first in range(0, count, at_once):
                staging = self._take(used, load.deadline)
                if staging is None:
                    break
                used.append(staging)
                part = load.choose(range(first, min(first + at_once, count)))
                sizes += self._read_part(part, staging)
            for staging in used:
                staging.copied.synchronize()
        finally:
            for staging in used:
                with suppress(KvfsError):  # a lost context copies nothing more
                    staging.copied.synchronize()
                self._give_back(staging, load.pooled)
        return sizes + [MISS] * (count - len(sizes))

    def _give_back(self, staging: _Staging, pooled: PooledBlocks | None) -> None:
        """Free a buffer, after what is in it was added to the pool if nothing else is being added."""
        free = partial(self._free.put, staging)
        if pooled is not None and staging.keys and self._aside(partial(self._promote, staging, pooled), free):
            return
        free()

    def _promote(self, staging: _Staging, pooled: PooledBlocks) -> None:
        pooled.promote(
            staging.keys, staging.starts, staging.block_bytes, staging.buffer.region, self._promotions
        )

    def _aside(self, do: Callable[[], None], after: Callable[[], None] = lambda: None) -> bool:
        """Do what no load waits for by a thread of its own; return False where that has something to do. `after` is
        called then, also where `close` came before its turn."""
        if not self._is_idle.acquire(blocking=False):
            return False

        def end(_: Future[None]) -> None:
            after()
            self._is_idle.release()

        try:
            self._promoter.submit(do).add_done_callback(end)
        except KvfsError:  # closed
            self._is_idle.release()
            return False
        return True

    def _take(self, used: deque[_Staging], deadline: Deadline) -> _Staging | None:
        """Take a buffer, of those this load has used if others have the rest; None: there is none in time."""
        with suppress(queue.Empty):
            return self._free.get_nowait()
        if used:
            used[0].copied.synchronize()
            return used.popleft()
        with suppress(queue.Empty):
            return self._free.get(timeout=deadline.left_s)
        return None

    def _read_part(self, load: _Load, staging: _Staging) -> list[int]:
        """Read blocks into a buffer and start their copies."""
        staging.keys = b""
        block_bytes, begin = load.places.block_bytes, staging.buffer.region[0]
        starts = [row * block_bytes for row in range(len(load.places))]
        sizes = load.read(load.keys, Scatter(staging.buffer.pages, starts, block_bytes), load.deadline.left_s)
        good = load.choose([row for row, size in enumerate(sizes) if size == block_bytes])
        found = [begin + start for start, size in zip(starts, sizes, strict=True) if size == block_bytes]
        plan = good.places.load_plan(found, [staging.buffer.region])
        with self._starting:
            self._copier.start(plan, self._stream, staging.copied, load.before)
        staging.keys, staging.starts, staging.block_bytes = good.keys, found, block_bytes
        return sizes
