"""The blocks in engines' own memory, by their KV events.

Responsibility: find the engines that hold a block, and how long a prefix is that they can go on from.
`kvfs.events.event_streams` puts their events in order, `kvfs.groups` has the rules for models whose layers have several
caches.

Invariants: at most `max_blocks` of each stream are remembered; what is not is counted. What layers a group has is what
the last event of its blocks said, and full attention where it said nothing.

Concurrency: plain state for one thread, without a clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from kvfs.events.block_copies import BlockCopies
from kvfs.events.event_streams import Engine, EventStreams, Missing
from kvfs.events.kv_events import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    group_of,
)
from kvfs.groups import Group, longest_prefix
from kvfs.limits import MAX_ENGINE_BLOCKS

Place = tuple[str, int | None]
"""A medium, and the engine's group of layers: models with several kinds of attention have a cache for each."""


@dataclass(slots=True)
class _Held:
    """What an engine has in one place."""

    group: Group
    block_tokens: int = 1
    copies: BlockCopies[BlockHash] = field(default_factory=BlockCopies)


class EngineIndex:
    """Index the blocks of engines, at most `max_blocks` of each stream. Implement `Sink`."""

    def __init__(self, max_blocks: int = MAX_ENGINE_BLOCKS) -> None:
        self._streams = EventStreams(self)
        self._places: dict[Engine, dict[Place, _Held]] = {}
        self._clears: defaultdict[Engine, int] = defaultdict(int)
        self._max_blocks = max_blocks
        self._over_limit = 0

    @property
    def counts(self) -> dict[str, int]:
        """Return counts of all streams, and of blocks that were over the limit."""
        return {**self._streams.counts, "over_limit": self._over_limit}

    # --- what is there ------------------------------------------------------------------------------------
    def holders(self, block: BlockHash, medium: str = GPU) -> list[Engine]:
        """Return the engines that hold a block in this medium, in any group of layers."""
        return [engine for engine in self._places if self._holds(engine, block, medium)]

    def match(self, engine: Engine, blocks: list[BlockHash], medium: str = GPU) -> int:
        """Return how many of these blocks, from the first on, an engine can go on from: each of its groups has what its
        layers read.

        `blocks` are the smallest that a group has. One of another group has as many tokens as some of them, and the
        hash of the last; an engine goes on where a block of each group ends.
        """
        groups = [held for (where, _), held in self._places.get(engine, {}).items() if where == medium]
        smallest = min((held.block_tokens for held in groups), default=1)
        if not groups or any(held.block_tokens % smallest for held in groups):
            return 0
        sizes = [held.block_tokens // smallest for held in groups]
        step = math.lcm(*sizes)
        layers = [replace(held.group, stride=step // size) for held, size in zip(groups, sizes, strict=True)]

        def present(group: int, first: int, last: int) -> list[bool]:
            size = sizes[group]
            ends = blocks[(first + 1) * size - 1 : last * size : size]
            return [block in groups[group].copies for block in ends]

        return longest_prefix(layers, 0, len(blocks) // step, present).boundary * step

    def status(self) -> dict[str, Any]:
        """Return counters and streams, as JSON values."""
        streams = [
            {
                "topic": engine.topic,
                "rank": engine.rank,
                "blocks": _count(places),
                "next": self._streams.next_of(engine),
                "clears": self._clears[engine],
            }
            for engine, places in self._places.items()
        ]
        return {**self.counts, "engines": streams}

    def _holds(self, engine: Engine, block: BlockHash, medium: str) -> bool:
        places = self._places.get(engine, {})
        return any(block in held.copies for (where, _), held in places.items() if where == medium)

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
                for block in event.block_hashes:
                    held.copies.remove(block)

    def _store(self, places: dict[Place, _Held], event: BlockStored) -> None:
        room = self._max_blocks - _count(places)
        self._over_limit += max(len(event.block_hashes) - room, 0)
        if blocks := event.block_hashes[: max(room, 0)]:
            held = places.setdefault(_place(event), _Held(Group()))
            held.group, held.block_tokens = group_of(event), max(event.block_size, 1)
            held.copies.add(blocks, event)


def _count(places: dict[Place, _Held]) -> int:
    return sum(len(held.copies) for held in places.values())


def _place(event: BlockStored | BlockRemoved) -> Place:
    return event.medium or GPU, event.group_idx
