"""Who is on each device, asked beside the service's thread.

Responsibility: ask what lists processes, keep each device's last listing for as long as it says something, find pids in
it that are of no process here, and say once what is in the way.

Invariants: nobody waits for an answer; one question is under way at a time, so a driver that never answers has one
thread of ours. A question that failed, or that went on for too long, is no listing.
Concurrency: the service's thread asks and takes; a thread for each run of questions answers. The lock guards all state,
and nobody holds it during a question.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from kvfs import limits
from kvfs.errors import KvfsError
from tiers.hbm.driver_ports import Listing

log = logging.getLogger("kvfs.hbm")


def start_thread(run: Callable[[], None]) -> None:
    """Start a thread that does not keep the process from ending: the driver may hold it for ever."""
    threading.Thread(target=run, name="device-holders", daemon=True).start()


def is_here(pid: int) -> bool:
    """Return whether a pid is of a process that this one sees."""
    if not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class AskedHolders:
    """Implements `DeviceHolders`."""

    def __init__(
        self,
        processes: Callable[[str], frozenset[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] = start_thread,
    ) -> None:
        """Take what lists the pids on a device or raises KvfsError; and what runs the questions."""
        self._processes, self._clock, self._start = processes, clock, start
        self._lock = threading.Lock()
        self._listings: dict[str, Listing] = {}
        self._next_s: dict[str, float] = {}
        """Before when a device is not asked for again."""
        self._wanted: list[str] = []
        """Devices that are asked for; the first one's question is under way."""
        self._asked_s: float | None = None
        """When the question that is under way was begun."""
        self._runs = False
        self._missing: dict[str, str] = {}
        self._said: set[tuple[str, str]] = set()
        """Devices and kinds of what was logged of them."""

    def listing(self, device: str) -> Listing | None:
        with self._lock:
            found = self._listings.get(device)
        return found if found is not None and not self._is_old(found.asked_s) else None

    def _is_old(self, since_s: float) -> bool:
        return self._clock() - since_s > limits.HBM_LISTING_AGE_S

    def ask(self, device: str) -> None:
        with self._lock:
            if self._asked_s is not None and self._is_old(self._asked_s):
                why = f"NVML has not answered for {limits.HBM_LISTING_AGE_S:.0f} s"
                self._note_missing(device, "silent", why)
            if device in self._wanted or self._clock() < self._next_s.get(device, 0.0):
                return
            self._wanted.append(device)
            starts, self._runs = not self._runs, True
        if starts:
            try:
                self._start(self._answer)
            except RuntimeError as error:  # no thread
                with self._lock:
                    self._wanted.clear()
                    self._runs = False
                    self._note_missing(device, "thread", str(error))

    def missing(self) -> list[str]:
        with self._lock:
            return list(self._missing.values())

    def _answer(self) -> None:
        """Answer all that is asked until nothing is."""
        while (question := self._begin()) is not None:
            device, asked_s = question
            try:
                pids = self._processes(device)
                strange = sorted(pid for pid in pids if not is_here(pid))
                self._end(device, Listing(pids, asked_s, is_ours=not strange), strange)
            except KvfsError as error:
                self._fail(device, error)

    def _begin(self) -> tuple[str, float] | None:
        with self._lock:
            if not self._wanted:
                self._runs, self._asked_s = False, None
                return None
            self._asked_s = self._clock()
            return self._wanted[0], self._asked_s

    def _end(self, device: str, listing: Listing, strange: list[int]) -> None:
        with self._lock:
            before = self._listings.get(device)
            self._wanted.remove(device)
            self._next_s[device] = listing.asked_s + limits.HBM_LISTING_PAUSE_S
            self._listings[device] = listing
            if not strange:
                self._missing.pop(device, None)
            elif before is not None and not before.is_ours:  # not only one that was just killed
                why = f"NVML lists process {strange[0]}, which is none that this service sees"
                self._note_missing(device, "strange", why)

    def _fail(self, device: str, error: KvfsError) -> None:
        with self._lock:
            self._wanted.remove(device)
            self._next_s[device] = self._clock() + limits.HBM_LISTING_RETRY_S
            self._note_missing(device, type(error).__name__, str(error))

    def _note_missing(self, device: str, kind: str, why: str) -> None:
        self._missing[device] = (
            f"who is on device {device} is not known, and what ended processes might write waits "
            f"{limits.HBM_DRAIN_S:.0f} s: {why}"
        )
        if (device, kind) not in self._said:
            self._said.add((device, kind))
            log.warning("%s", self._missing[device])
