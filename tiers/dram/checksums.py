"""Checksums of sealed slots, computed by a thread after the seal.

Responsibility: what waits for room in the thread's queue, and keeping the thread off a slot that is probed.

Invariants: a sealed slot without its checksum is in the queue, waits in `_waiting`, or had a read that failed; the last
is queued again when somebody asks. Concurrency: the service's thread; the hashing thread is native.
"""

from __future__ import annotations

import time

from kvfs._native.seal.checksummer import Checksummer
from kvfs._native.shared.table import Table
from tiers.model.tier import Extent


class ChecksumQueue:
    """Queues sealed slots for hashing."""

    def __init__(self, table: Table, slotfd: int) -> None:
        self._table = table
        self.thread = Checksummer(table, slotfd)
        """Native; who probes a slot for holders pauses it there, so that it is taken for none."""
        self._waiting: dict[int, int] = {}
        """Slot -> generation of what was sealed while the thread's queue was full."""

    def push(self, extent: Extent) -> None:
        """Have a sealed slot hashed."""
        if self._waiting:
            self.retry()
        if not self.thread.push(extent.slot, extent.generation):
            self._waiting[extent.slot] = extent.generation

    def retry(self) -> None:
        """Queue what waited for room."""
        for slot in list(self._waiting):
            if not self.thread.push(slot, self._waiting[slot]):
                return
            del self._waiting[slot]

    def get(self, extent: Extent) -> int | None:
        """Return the payload's XXH3-64; None while it is still being computed."""
        value = self._table.read_header(extent.slot).checksum
        if value is None and self.thread.idle:  # it waited for room in the queue, or its read failed
            self.push(extent)
        return value

    def wait(self, timeout_s: float) -> None:
        """Block until what is sealed has its checksum. Raises DeadlinePassed."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.retry()
            self.thread.drain(max(0.0, deadline - time.monotonic()))
            if not self._waiting:
                return
