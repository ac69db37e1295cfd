"""The service's door for KV events: publishes the store's, follows the engines', as `[events]` says.

Responsibility: open the sockets that settings ask for, run them, and describe them. Nothing runs without settings, and
only then are pyzmq and msgspec needed. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from kvfs.config import EventSettings
from kvfs.errors import ConfigError

if TYPE_CHECKING:
    from kvfs.event_sockets import Subscriber
    from tiers.block_events import BlockEvents
    from tiers.store import TieredStore


@dataclass(frozen=True, slots=True)
class EventDoor:
    """What was asked for, open."""

    blocks: BlockEvents | None = None
    engines: Subscriber | None = None

    async def run(self) -> None:
        """Publish and follow, until cancelled."""
        async with trio.open_nursery() as nursery:
            if self.blocks is not None:
                nursery.start_soon(self.blocks.run)
            if self.engines is not None:
                nursery.start_soon(self.engines.run)

    def status(self) -> dict[str, Any]:
        """As JSON values."""
        found: dict[str, Any] = {}
        if self.blocks is not None:
            found["published"] = self.blocks.status()
        if self.engines is not None:
            found["engines"] = {"endpoint": self.engines.endpoint, **self.engines.index.status()}
        return found


@contextmanager
def open_events(settings: EventSettings, store: TieredStore) -> Iterator[EventDoor]:
    """Raises ConfigError for an endpoint that cannot be had, or where the extra `events` is not installed."""
    if settings.publish is None and settings.engines is None:
        yield EventDoor()
        return
    try:
        from kvfs.engine_index import EngineIndex
        from kvfs.event_sockets import Publisher, Subscriber
        from tiers.block_events import BlockEvents
    except ImportError as error:
        raise ConfigError(f"[events] needs {error.name}: pip install 'kvfs[events]'") from None
    with ExitStack() as sockets:
        blocks = engines = None
        if settings.publish is not None:
            publisher = Publisher(settings.publish, topic=settings.topic, replay_endpoint=settings.replay)
            blocks = BlockEvents(store, sockets.enter_context(publisher))
        if settings.engines is not None:
            subscriber = Subscriber(EngineIndex(), settings.engines, replays=settings.engine_replays)
            engines = sockets.enter_context(subscriber)
        yield EventDoor(blocks, engines)
