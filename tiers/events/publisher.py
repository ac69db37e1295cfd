"""The service's door for KV events: what `[events]` asks for, open and running.

Responsibility: load the sockets where settings ask for them, run them, and describe them. Nothing runs without
settings, and only then are pyzmq and msgspec needed (the extra `events`): `tiers.events.event_sockets` alone imports
them. Concurrency: the service's trio thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from kvfs.config.settings import EventSettings
from kvfs.errors import ConfigError
from tiers.store.store import Store

_SOCKETS = "tiers.events.event_sockets"


class EventPart(Protocol):
    """Runs one open socket, and describes it as JSON values."""

    async def run(self) -> None:
        """Publish or follow events until cancelled."""

    def status(self) -> dict[str, Any]:
        """Describe the part as JSON values."""


@dataclass(frozen=True, slots=True)
class EventDoor:
    """Runs the parts that settings ask for, by the names under which status shows them."""

    parts: dict[str, EventPart] = field(default_factory=dict)

    async def run(self) -> None:
        """Publish and follow, until cancelled."""
        async with trio.open_nursery() as nursery:
            for part in self.parts.values():
                nursery.start_soon(part.run)

    def status(self) -> dict[str, Any]:
        """Describe each part."""
        return {name: part.status() for name, part in self.parts.items()}


@contextmanager
def open_events(settings: EventSettings, store: Store) -> Iterator[EventDoor]:
    """Open what settings ask for. Raises ConfigError for an endpoint that cannot be had, or without the extra."""
    if settings.publish is None and settings.engines is None:
        yield EventDoor()
        return
    try:
        sockets = importlib.import_module(_SOCKETS)
    except ImportError as error:
        raise ConfigError(f"[events] needs {error.name}: pip install 'kvfs[events]'") from None
    with sockets.open_parts(settings, store) as parts:
        yield EventDoor(parts)
