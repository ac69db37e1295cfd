"""Opens the sockets for KV events that settings ask for: one that publishes the store's, one that follows engines'.

Responsibility: sockets from settings, and how status shows them. Needs the extra `events`; `tiers.events.publisher`
loads this module where that is asked for. Concurrency: the service's trio thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvfs.config.settings import EventSettings
from kvfs.events.engine_index import EngineIndex
from kvfs.events.kv_events import first_sequence
from kvfs.events.sockets import Publisher, Subscriber
from tiers.events.store_events import BlockEvents
from tiers.store.store import Store


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Follows the events of engines."""

    subscriber: Subscriber
    index: EngineIndex

    async def run(self) -> None:
        """Keep the index of the engines' blocks, until cancelled."""
        await self.subscriber.run()

    def status(self) -> dict[str, Any]:
        """Describe the socket and the index."""
        return {"endpoint": self.subscriber.endpoint, **self.index.status()}


@contextmanager
def open_parts(settings: EventSettings, store: Store) -> Iterator[dict[str, BlockEvents | EngineEvents]]:
    """Open sockets, by the names under which status shows them. Raises ConfigError."""
    parts: dict[str, BlockEvents | EngineEvents] = {}
    with ExitStack() as sockets:
        if settings.publish is not None:
            publisher = Publisher(
                settings.publish,
                topic=settings.topic,
                replay_endpoint=settings.replay,
                sequence=first_sequence(time.time()),
            )
            parts["published"] = BlockEvents(store, sockets.enter_context(publisher))
        if settings.engines is not None:
            index = EngineIndex()
            subscriber = Subscriber(index, settings.engines, replays=settings.engine_replays)
            parts["engines"] = EngineEvents(sockets.enter_context(subscriber), index)
        yield parts
