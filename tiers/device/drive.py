"""Whether a drive answers: here, or away since it left an operation without an answer for too long.

Responsibility: the state, who is refused in it, and the probe that ends it.

Invariants:
- While the drive is away nothing is begun on it but the probe, one read at a time of something known, and whoever
  waited for its turn is refused.
- The drive is here again as soon as it answers anything, the probe or an operation that was late, and few others are
  still without an answer.

Concurrency: the trio thread; the probe is a system task that ends when the drive is here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from kvfs import limits
from kvfs.errors import DeviceAway, DeviceFailed

_log = logging.getLogger("kvfs.device")


class Drive:
    """See the module's header."""

    def __init__(self, probe: Callable[[], Awaitable[object]]) -> None:
        """Begin with a drive that is here. `probe` reads something known, and has `answered` called; it raises
        DeviceFailed where it cannot."""
        self.away_since_ns: int | None = None
        """When the operation began that the drive left without an answer, realtime clock; None while it is here."""
        self.absences = 0
        """How often the drive was away."""
        self._probe = probe
        self._silent_since = -math.inf
        """The same by trio's clock."""
        self._why = ""
        self._returned = trio.Event()
        self._waiting: set[trio.CancelScope] = set()
        self._is_probing = False
        self._is_closed = False

    @property
    def is_away(self) -> bool:
        """Return whether operations are refused, since the drive left one without an answer for too long."""
        return self.away_since_ns is not None

    def check(self) -> None:
        """Raise DeviceAway while the drive is away."""
        if self.is_away:
            raise DeviceAway(f"the drive does not answer: {self._why}")

    async def acquire(self, permits: trio.Semaphore) -> None:
        """Take one of the permits, first come first served. Raises DeviceAway while the drive is away, and DeviceFailed
        once the device is closed, to who waits already, too."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check()
        try:
            permits.acquire_nowait()
            return
        except trio.WouldBlock:
            pass
        with trio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                await permits.acquire()
                return
            finally:
                self._waiting.discard(scope)
        if self._is_closed:
            raise DeviceFailed("the device is closed")
        raise DeviceAway(f"the drive does not answer: {self._why}")

    async def wait_here(self, patience_s: float) -> bool:
        """Wait until the drive is here, so long after it last answered at most; return whether it is."""
        await trio.lowlevel.checkpoint()
        while self.is_away:
            with trio.move_on_at(self._silent_since + patience_s):
                await self._returned.wait()
                continue
            return not self.is_away
        return True

    def leave(self, silent_s: float, why: str) -> None:
        """Note that an operation is without an answer for so long. `why` says which."""
        if self.is_away:
            return
        self.away_since_ns = time.time_ns() - int(silent_s * 1e9)
        self._silent_since = trio.current_time() - silent_s
        self._why = why
        self.absences += 1
        self._returned = trio.Event()
        _log.error("the drive is away: %s", why)
        self._refuse()
        if not self._is_probing:
            self._is_probing = True
            trio.lowlevel.spawn_system_task(self._probe_until_here)

    def close(self) -> None:
        """Refuse whoever waits for its turn: the device is closed."""
        self._is_closed = True
        self._refuse()

    def _refuse(self) -> None:
        for scope in self._waiting:
            scope.cancel()

    def answered(self) -> None:
        """Note that the drive has answered."""
        if self.away_since_ns is not None:
            _log.warning("the drive is back after %.1f s", trio.current_time() - self._silent_since)
            self.away_since_ns = None
            self._returned.set()

    async def _probe_until_here(self) -> None:
        try:
            while self.is_away:
                with suppress(DeviceFailed):
                    await self._probe()
                if self.is_away:
                    await trio.sleep(limits.DEVICE_RETRY_S)
        finally:
            self._is_probing = False
