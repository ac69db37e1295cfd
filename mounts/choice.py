"""A mount or none: pyfuse3 is imported only where there is to be a mount.

Invariant: a service without a mount runs where neither pyfuse3 nor libfuse3 is installed.

Concurrency: `load_mount` at a start; a `NoMount` is one task on the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import trio

from kvfs.errors import ConfigError, DeviceFailed
from kvfs.system.latencies import Latencies


class Served(Protocol):
    """What a service knows of its mount; `mounts.mount.Mount` says what each of these is."""

    limits: list[str]
    latencies: Latencies

    @property
    def mode(self) -> str:
        """Return the mode that runs."""
        ...

    @property
    def failure(self) -> DeviceFailed | None:
        """Return why `serve` ended by itself, if it did."""
        ...

    async def serve(self, *, task_status: trio.TaskStatus[None] = ...) -> None:
        """Serve until cancelled or unmounted from outside."""


class NoMount:
    """Serves nothing, in the place of a mount, until it is cancelled."""

    mode = "off"
    failure: DeviceFailed | None = None

    def __init__(self) -> None:
        self.limits: list[str] = []
        self.latencies = Latencies()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start, and do nothing until cancelled."""
        task_status.started()
        await trio.sleep_forever()


def load_mount() -> Callable[..., Served]:
    """Return `mounts.mount.Mount`. Raises ConfigError where what it needs is not installed."""
    try:
        found: Callable[..., Served] = import_module("mounts.mount").Mount
    except ImportError as error:
        if error.name != "pyfuse3" and "libfuse3" not in str(error):
            raise
        raise ConfigError(
            f"a mount needs pyfuse3 ({error}): pip install 'kvfs[server]'; without a mount: kvfs serve --no-mount"
        ) from None
    return found
