"""The blocks in engines' own memory, by their KV events.

Responsibility: find the engines that hold a block. `kvfs.events.event_streams` puts their events in order.

Invariants: at most `max_blocks` of each stream are remembered; what is not is counted.

Concurrency: plain state for one thread, without a clock.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from kvfs.events.event_streams import Engine, EventStreams, Missing
from kvfs.events.kv_events import GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from kvfs.limits import MAX_ENGINE_BLOCKS

Place = tuple[str, int | None]
"""A medium, and the engine's group of layers: models with several kinds of attention have a cache for each."""


class EngineIndex:
    """Index the blocks of engines, at most `max_blocks` of each stream."""

    def __init__(self, max_blocks: int = MAX_ENGINE_BLOCKS) -> None:
        self._streams = EventStreams(self)
        self._places: dict[Engine, dict[Place, set[BlockHash]]] = {}
        self._clears: defaultdict[Engine, int] = defaultdict(int)
        self._max_blocks = max_blocks
        self._over_limit = 0

    @property
    def counts(self) -> dict[str, int]:
        return {**self._streams.counts, "over_limit": self._over_limit}

    # --- what is there ------------------------------------------------------------------------------------
    def holders(self, block: BlockHash, medium: str = GPU) -> list[Engine]:
        """Return the engines that hold a block in this medium, in any group of layers."""
        return [engine for engine in self._places if self._holds(engine, block, medium)]

    def match(self, engine: Engine, blocks: list[BlockHash], medium: str = GPU) -> int:
        """Return how many of these blocks an engine holds without a gap from the first on."""
        for count, block in enumerate(blocks):
            if not self._holds(engine, block, medium):
                return count
        return len(blocks)

    def status(self) -> dict[str, Any]:
        """Return counters and streams, as JSON values."""
        streams = [
            {
                "topic": engine.topic,
                "rank": engine.rank,
                "blocks": sum(map(len, places.values())),
                "next": self._streams.next_of(engine),
                "clears": self._clears[engine],
            }
            for engine, places in self._places.items()
        ]
        return {**self.counts, "engines": streams}

    def _holds(self, engine: Engine, block: BlockHash, medium: str) -> bool:
        places = self._places.get(engine, {})
        return any(block in held for (where, _), held in places.items() if where == medium)

    # --- what comes in ------------------------------------------------------------------------------------
    def receive(self, frames: list[bytes]) -> Missing | None:
        """Take a message; return the gap before it, None without one."""
        return self._streams.receive(frames)

    def replayed(self, engine: Engine, frames: list[bytes]) -> None:
        """Take one message of a replay."""
        self._streams.replayed(engine, frames)

    def replay_ended(self, engine: Engine) -> None:
        """End a replay, or go on without one."""
        self._streams.replay_ended(engine)

    # --- what the streams say -----------------------------------------------------------------------------
    def restarted(self, engine: Engine) -> None:
        places = self._places.setdefault(engine, {})
        self._clears[engine] += bool(places)
        places.clear()

    def lost(self, engine: Engine, batches: int) -> None:
        self.restarted(engine)

    def apply(self, engine: Engine, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.restarted(engine)
        elif isinstance(event, BlockStored):
            self._store(self._places[engine], event)
        else:
            held = self._places[engine].get(_place(event))
            if held is not None:
                held.difference_update(event.block_hashes)

    def _store(self, places: dict[Place, set[BlockHash]], event: BlockStored) -> None:
        room = self._max_blocks - sum(map(len, places.values()))
        self._over_limit += max(len(event.block_hashes) - room, 0)
        places.setdefault(_place(event), set()).update(event.block_hashes[: max(room, 0)])


def _place(event: BlockStored | BlockRemoved) -> Place:
    return event.medium or GPU, event.group_idx
