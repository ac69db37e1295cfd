"""Events of blocks in an engine's or a store's stream, and what an index makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvfs.events.engine_index import EngineIndex
from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import (
    GPU,
    Batch,
    BlockHash,
    BlockStored,
    KVEvent,
    encode_batch,
    sequence_frame,
)

TOPIC = "engine"
ENGINE = Engine(TOPIC, 0)


def store_event(
    blocks: Sequence[BlockHash], medium: str | None = GPU, group: int | None = None
) -> BlockStored:
    """Return the event that these blocks were stored."""
    return BlockStored(list(blocks), None, [], 16, None, medium, None, group_idx=group)


def message(
    sequence: int, *events: KVEvent, topic: str = TOPIC, rank: int = 0, time_s: float = 1.0
) -> list[bytes]:
    """Return the frames of a message with these events."""
    return [topic.encode(), sequence_frame(sequence), encode_batch(Batch(time_s, list(events), rank))]


def known(index: EngineIndex) -> set[BlockHash]:
    """Return which of the first 40 blocks an index believes that the engine holds, and nobody else."""
    return {block for block in range(40) if index.holders(block) == [ENGINE]}
