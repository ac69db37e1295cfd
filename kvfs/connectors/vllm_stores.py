"""A vLLM worker's stores: drafts that are filled while the engine computes, copies for a store that is late.

Responsibility: copy the blocks of a step out of the engine's cache, part by part, and have the store take them behind
the engine's back. A part goes straight into the store's drafts; where the cache is on a device, or the store does not
grant drafts in time, it is copied into memory and put when its turn comes. From a CUDA device the driver copies it, and
the worker's thread does not wait for that (`kvfs.connectors.device.stores`).

Invariants:
- A part is copied when `finish` returns, or will be before anything that the engine starts afterwards: the engine may
  reuse its blocks then.
- A late store costs a step CONNECTOR_SAVE_S, once, until all that waits for it is stored: no draft is asked for
  meanwhile.
- Late is not lost: a part waits for as long as it takes, also while no service runs. Lost is, and counted as dropped,
  what has no room within CONNECTOR_LATE_BYTES, what the store refuses, what the device fails to copy, and what is in
  drafts of a session that ends: the service was stopped, or did not answer for CONNECTOR_LATE_S.
- Parts are stored in the order of their steps, so that no block is there before its parents.

Concurrency: called by the worker's thread; parts are copied on one thread and stored on another, both of them daemons.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from kvfs._native.blocks.writer import Draft
from kvfs.client.blocks import Blocks
from kvfs.connectors.common import Link
from kvfs.connectors.device.stores import DeviceStores, Outgoing
from kvfs.connectors.vllm_layout import Shard
from kvfs.errors import InvalidRequest, KvfsError, NoSpace, QuotaExceeded
from kvfs.limits import (
    CONNECTOR_LATE_BYTES,
    CONNECTOR_LATE_S,
    CONNECTOR_RETRY_S,
    CONNECTOR_SAVE_S,
    CONNECTOR_STORE_PARTS,
    CONNECTOR_TIMEOUT_S,
)

T = TypeVar("T")
Copies = list[torch.Tensor] | Outgoing
"""A part's blocks in memory, or on their way there."""
log = logging.getLogger("kvfs.connectors")


@dataclass(slots=True)
class Part:
    """Blocks of one step, all of one cache group, that are being stored."""

    shard: Shard
    keys: list[bytes]
    parents: list[bytes | None]
    block_ids: list[int]
    drafts: list[Draft | None] = field(default_factory=list)
    reserved: Future[bool] | None = None
    """Whether there are drafts, or never will be; False: later, perhaps. None: nobody has asked for any."""
    copies: list[Future[None]] = field(default_factory=list)
    layers_begun: int = 0
    has_turn: bool = False
    given_up: bool = False
    """Its drafts are aborted."""

    def split(self, count: int) -> list[Part]:
        """Return the same blocks in parts of `count`."""
        return [
            Part(
                self.shard,
                self.keys[i : i + count],
                self.parents[i : i + count],
                self.block_ids[i : i + count],
            )
            for i in range(0, len(self.keys), count)
        ]


class Stores:
    """Store parts of steps."""

    def __init__(self, link: Link, counts: dict[str, int], device: DeviceStores | None = None) -> None:
        """Add to `counts`: stored_blocks, dropped_blocks, late_blocks. `device` copies out of a device's caches;
        without it PyTorch does."""
        self._link, self._counts, self._device = link, counts, device
        self._copier, self._sealer = _Thread("kvfs-stores"), _Thread("kvfs-seals")
        self._turns = threading.BoundedSemaphore(CONNECTOR_STORE_PARTS)
        """Parts that have drafts, or ask for them."""
        self._changed = threading.Condition()
        """Guards the counts and the next three."""
        self._kept_bytes = 0
        self._is_late = self._is_full = False
        """Until nothing is kept any more."""
        self._is_failing = False
        """The device did not copy a part, and none since."""
        self._closing = threading.Event()
        self.last: Future[None] | None = None
        """The end of all that is to be stored."""

    def close(self) -> None:
        """End the link; what is kept is stored before, as far as CONNECTOR_TIMEOUT_S of a store that answers allow."""
        if self.last is not None and self._link.is_up:
            wait([self.last], CONNECTOR_TIMEOUT_S)
        self._closing.set()
        self._link.close()  # wakes who waits for an answer
        self._copier.close()
        self._sealer.close()
        if self._device is not None:
            self._device.close()

    # --- the step -----------------------------------------------------------------------------------------
    def begin(self, part: Part) -> None:
        """Ask for a part's drafts, unless the store is late."""
        if not (self._is_late or self._blocks(part) is None or not self._link.is_up):
            part.reserved = self._copier.submit(partial(self._reserve, part, self.last))

    def copy_layers(self, part: Part, end: int) -> None:
        """Copy layers below `end` into the drafts when these are there."""
        if part.reserved is not None:
            for layer in range(part.layers_begun, end):
                part.copies.append(self._copier.submit(partial(self._copy, part, layer)))
            part.layers_begun = max(part.layers_begun, end)

    def finish(self, part: Part) -> None:
        """Copy the rest of a part, or begin to, and have it stored."""
        if part.shard.layout.is_on_cpu and self._is_drafted(part):
            self._store_behind(part, None)
        elif self._takes(part) and (copies := self._copy_out(part)) is not None:
            self._store_behind(part, copies)
        else:
            self.give_up(part)

    def give_up(self, part: Part) -> None:
        """Store nothing of a part, and copy no more of it."""
        self._stop(part)
        if part.reserved is not None:  # its drafts are aborted
            self._store_behind(part, None)
        else:
            with self._changed:
                self._counts["dropped_blocks"] += len(part.keys)

    def _is_drafted(self, part: Part) -> bool:
        """Return whether a part is in its drafts, or the store refuses it; False where these are late."""
        if part.reserved is None:
            self.begin(part)
        if part.reserved is None:
            return False
        self.copy_layers(part, part.shard.layout.parts)
        if not wait([part.reserved], CONNECTOR_SAVE_S).done or not part.reserved.result():
            self._stop(part)
            return False
        wait(part.copies)
        return True

    def _stop(self, part: Part) -> None:
        """See to it that nothing more is copied from the engine's blocks."""
        part.given_up = True
        wait([copy for copy in part.copies if not copy.cancel()])

    def _takes(self, part: Part) -> bool:
        """Return whether there is room for a copy of a part, which it has then; wait unless the store is late."""
        size = self._size_of(part)
        with self._changed:
            is_late = part.shard.layout.is_on_cpu or self._is_late or not self._link.is_up
            fits = self._changed.wait_for(
                lambda: not self._kept_bytes or self._kept_bytes + size <= CONNECTOR_LATE_BYTES,
                0 if is_late else CONNECTOR_TIMEOUT_S,
            )
            if fits:
                self._kept_bytes += size
                self._counts["late_blocks"] += len(part.keys) if is_late else 0
            elif not self._is_full:
                log.warning(
                    "blocks are dropped: %d bytes of them wait for the store already", self._kept_bytes
                )
            self._is_late, self._is_full = is_late or not fits, self._is_full or not fits
        return fits

    def _copy_out(self, part: Part) -> Copies | None:
        """Copy a part into memory, or begin to; None where the device fails: it has no room there any more."""
        layout = part.shard.layout
        if self._device is None:
            return list(layout.gather(part.block_ids))
        try:
            return self._device.copy(layout.device_places(part.block_ids))
        except (KvfsError, OSError) as error:
            with self._changed:
                self._failed_on_device(error)
                self._make_room(part)
            return None

    def _failed_on_device(self, error: Exception) -> None:
        if not self._is_failing:
            log.error("blocks are dropped while the device does not copy them: %s", error)
        self._is_failing = True

    def _make_room(self, part: Part) -> None:
        self._kept_bytes -= self._size_of(part)
        if not self._kept_bytes:
            self._is_late = self._is_full = False

    def _size_of(self, part: Part) -> int:
        block_bytes = part.shard.layout.block_bytes if self._device is None else self._device.slot_bytes
        return len(part.keys) * block_bytes

    def _blocks(self, part: Part) -> Blocks | None:
        return self._link.blocks(part.shard.namespace)

    # --- the copier ---------------------------------------------------------------------------------------
    def _reserve(self, part: Part, before: Future[None] | None) -> bool:
        """Reserve a part's drafts; `before` is the end of the stores under way. Return False where the service does not
        answer."""
        blocks = self._blocks(part)
        part.has_turn = self._turns.acquire(timeout=CONNECTOR_LATE_S)
        if blocks is None or not part.has_turn or part.given_up:
            return False
        reserve = partial(
            blocks.reserve,
            part.keys,
            [part.shard.layout.block_bytes] * len(part.keys),
            part.parents,
            layers=part.shard.layout.parts,
            timeout_s=CONNECTOR_LATE_S,
        )
        try:
            part.drafts = _with_room(reserve, before)
        except (KvfsError, OSError) as error:
            part.given_up = True
            return not self._is_outage(error)
        return True

    def _copy(self, part: Part, layer: int) -> None:
        if part.given_up:
            return
        try:
            for draft, block in zip(part.drafts, part.block_ids, strict=True):
                if draft is not None:
                    draft.save_layer(layer, part.shard.layout.pieces(block, layer))
        except (KvfsError, OSError) as error:
            log.warning("blocks are not stored: %s", error)
            part.given_up = True

    # --- the sealer ---------------------------------------------------------------------------------------
    def _store_behind(self, part: Part, copies: Copies | None) -> None:
        self.last = self._sealer.submit(partial(self._store, part, copies))

    def _store(self, part: Part, copies: Copies | None) -> None:
        """Seal a part's drafts, or put its copies in their place."""
        if part.reserved is not None:
            wait([part.reserved])
        stored = None
        try:
            stored = self._seal(part) if copies is None else self._put(part, copies)
        finally:
            if part.has_turn:
                self._turns.release()
            if isinstance(copies, Outgoing):
                copies.give_back()
            with self._changed:
                if copies is not None:
                    self._make_room(part)
                self._counts["stored_blocks"] += stored or 0
                self._counts["dropped_blocks"] += len(part.keys) if stored is None else 0
                self._changed.notify_all()

    def _seal(self, part: Part) -> int | None:
        """Seal the drafts of a part; return how many were new. None: none is stored, and all drafts are aborted."""
        blocks = self._blocks(part)
        if blocks is None:
            return None
        try:
            if not part.given_up:
                return sum(blocks.seal(part.drafts, timeout_s=CONNECTOR_LATE_S))
        except (KvfsError, OSError) as error:
            self._is_outage(error)
        self._abort(blocks, part)
        return None

    def _put(self, part: Part, copies: Copies) -> int | None:
        """Put copies when the store takes them; return how many were new. None: it refuses them, the device fails, or
        this ends."""
        rows = self._wait_copied(copies) if isinstance(copies, Outgoing) else copies
        if rows is None:
            return None
        while not self._closing.is_set():
            blocks = self._blocks(part)
            if not self._link.wait_up(CONNECTOR_RETRY_S) or blocks is None:
                continue
            self._abort(blocks, part)
            try:
                return sum(blocks.put(part.keys, rows, part.parents, timeout_s=CONNECTOR_LATE_S))
            except (KvfsError, OSError) as error:
                if not self._is_outage(error):
                    return None
        return None

    def _wait_copied(self, copies: Outgoing) -> list[memoryview] | None:
        try:
            rows = copies.wait()
        except KvfsError as error:
            with self._changed:
                self._failed_on_device(error)
            return None
        self._is_failing = False
        return rows

    def _abort(self, blocks: Blocks, part: Part) -> None:
        drafts, part.drafts = part.drafts, []
        try:
            blocks.abort(drafts, timeout_s=CONNECTOR_LATE_S)
        except (KvfsError, OSError) as error:
            self._is_outage(error)

    def _is_outage(self, error: BaseException) -> bool:
        """Log a failure; return whether the service did not answer."""
        if isinstance(error, InvalidRequest):
            if not self._closing.is_set():
                log.error("blocks are not stored: %s", error)
            return False
        return self._link.failed(error)


class _Thread:
    """Run calls one after the other on a daemon thread: a process may end while a store does not answer."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, do: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put(partial(_fulfil, future, do))
        return future

    def close(self) -> None:
        """Wait for the calls that were submitted."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _fulfil(future: Future[T], do: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)


def _with_room(reserve: Callable[[], list[Draft | None]], before: Future[None] | None) -> list[Draft | None]:
    """Reserve drafts; where there is no room for them, once more when the stores under way have ended.

    A part that is left out would end every later match before the parts behind it. Raises NoSpace, QuotaExceeded.
    """
    under_way = before is not None and not before.done()
    try:
        return reserve()
    except (NoSpace, QuotaExceeded):
        if before is None or not under_way:
            raise
    wait([before], CONNECTOR_LATE_S)
    return reserve()
