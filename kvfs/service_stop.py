"""The end of the service: clean, within limits.STOP_WAIT_S, or hard.

Invariants: a clean stop begins once; past its time, or at a second signal, the mount is detached and the process
exits as after a crash, which the next start recovers from.

Concurrency: the service's trio thread, and a timer for the watchdog, so that it works when the loop does not.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Self

import trio

from kvfs import limits
from kvfs.client import discovery
from kvfs.system.notify import notify
from mounts.mount_point import abort

log = logging.getLogger("kvfs.service")


def _abort_mount(mountpoint: Path | None) -> None:
    if mountpoint in discovery.mounts():
        abort(mountpoint)


class Watchdog:
    """Bound a clean stop. Its timer has a thread of its own: it fires even when the event loop is stuck."""

    def __init__(self, mountpoint: Path | None) -> None:
        self._mountpoint = mountpoint
        self._timer = threading.Timer(limits.STOP_WAIT_S, self.stop_hard, ["the clean stop took too long"])
        self._timer.daemon = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def start(self) -> None:
        """Start the timer."""
        self._timer.start()

    def stop_hard(self, why: str) -> None:
        """End the process as a crash would; the next start recovers."""
        log.error("%s: ending at once", why)
        aborting = threading.Thread(target=_abort_mount, args=[self._mountpoint], daemon=True)
        aborting.start()
        aborting.join(limits.DETACH_WAIT_S)
        os._exit(1)


async def stop_on_signal(
    stop: trio.CancelScope,
    watchdog: Watchdog,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Stop cleanly at the first signal, hard at a second one."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if stop.cancel_called:
                watchdog.stop_hard("second signal")
            begin_stop(stop, watchdog, signal.Signals(number).name)


async def stop_when_asked(asked: trio.Event, stop: trio.CancelScope, watchdog: Watchdog) -> None:
    """Stop cleanly when a session asks for it."""
    await asked.wait()
    if not stop.cancel_called:
        begin_stop(stop, watchdog, "a session asked for it")


def begin_stop(stop: trio.CancelScope, watchdog: Watchdog, why: str) -> None:
    """Begin a clean stop, and its time."""
    log.info("stopping: %s", why)
    notify("STOPPING=1")
    watchdog.start()
    stop.cancel()
