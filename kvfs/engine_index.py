"""What engines hold in their own memory, as their KV events say.

Responsibility: follow the event streams of several engines, notice what was missed, and say which engines hold a
block. It asks for a replay where batches are missing and does without where there is none. I/O is
`kvfs.event_sockets`.

Invariants:
- A stream is a topic and a data-parallel rank: engines that share both would be taken for one that loses events, so
  each engine needs a topic of its own.
- Batches of a stream apply in order, each once. What cannot be filled in clears the stream: a block that is
  not known to be there is a miss, one that is wrongly believed to be there costs a route.
- A number below the expected one means that the engine started anew, unless a replay brought that very batch: replays
  come over a connection of their own and may overtake the stream.
- Nothing grows past its limit: streams, blocks of a stream, batches that wait for a replay.

Concurrency: plain state for one thread, without a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvfs.errors import InvalidRequest
from kvfs.events import (
    GPU,
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    decode_batch,
    sequence_of,
)
from kvfs.limits import MAX_ENGINE_BLOCKS, MAX_ENGINE_STREAMS, MAX_HELD_BATCHES

Place = tuple[str, int | None]
"""A medium, and the engine's group of layers: models with several kinds of attention have a cache for each."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One stream of events."""

    topic: str
    rank: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Batches from `sequence` on are wanted from this engine's replay."""

    engine: Engine
    sequence: int


@dataclass(slots=True)
class _Stream:
    next: int | None = None
    """The sequence number that is expected; None before the first batch."""
    places: dict[Place, set[BlockHash]] = field(default_factory=dict)
    held: deque[tuple[int, Batch]] = field(default_factory=deque)
    """Batches that came while a replay was under way."""
    ahead: dict[int, float] = field(default_factory=dict)
    """Number and time of batches that a replay brought before the stream did."""
    is_replaying: bool = False
    clears: int = 0

    @property
    def block_count(self) -> int:
        return sum(map(len, self.places.values()))


class EngineIndex:
    """See the module's header."""

    def __init__(self, max_blocks: int = MAX_ENGINE_BLOCKS) -> None:
        self._streams: dict[Engine, _Stream] = {}
        self._max_blocks = max_blocks
        self.counts = {"batches": 0, "gaps": 0, "lost": 0, "malformed": 0, "over_limit": 0}

    # --- what is there ------------------------------------------------------------------------------------
    def holders(self, block: BlockHash, medium: str = GPU) -> list[Engine]:
        """The engines that hold a block in this medium, in any group of layers."""
        return [engine for engine, stream in self._streams.items() if _holds(stream, block, medium)]

    def match(self, engine: Engine, blocks: list[BlockHash], medium: str = GPU) -> int:
        """How many of these an engine holds without a gap from the first on."""
        stream = self._streams.get(engine)
        if stream is None:
            return 0
        for count, block in enumerate(blocks):
            if not _holds(stream, block, medium):
                return count
        return len(blocks)

    def status(self) -> dict[str, Any]:
        """Counters and streams, as JSON values."""
        streams = [
            {"topic": e.topic, "rank": e.rank, "blocks": s.block_count, "next": s.next, "clears": s.clears}
            for e, s in self._streams.items()
        ]
        return {**self.counts, "engines": streams}

    # --- what comes in ------------------------------------------------------------------------------------
    def receive(self, frames: list[bytes]) -> Missing | None:
        """Take a message in; what is missing before it, where something is. A malformed one is counted and dropped:
        its number is then missing from the stream."""
        try:
            topic, sequence, batch = _parse(frames)
            stream = self._stream_of(engine := Engine(topic, batch.data_parallel_rank or 0))
        except InvalidRequest:
            self.counts["malformed"] += 1
            return None
        if stream.ahead.pop(sequence, None) == batch.ts:
            return None
        if stream.is_replaying:
            _hold(stream, sequence, batch)
            return None
        if stream.next is None or sequence < stream.next:
            # The first that is heard of an engine, or of one that started anew: nothing before 0 can be missing.
            self._restart(stream)
        assert stream.next is not None
        if sequence > stream.next:
            self.counts["gaps"] += 1
            stream.is_replaying = True
            stream.held.append((sequence, batch))
            return Missing(engine, stream.next)
        self._apply(stream, sequence, batch)
        return None

    def replayed(self, engine: Engine, frames: list[bytes]) -> None:
        """Take in one message of a replay."""
        stream = self._streams[engine]
        try:
            topic, sequence, batch = _parse(frames)
        except InvalidRequest:
            self.counts["malformed"] += 1
            return
        if not stream.is_replaying or topic != engine.topic or (batch.data_parallel_rank or 0) != engine.rank:
            return
        if sequence > stream.held[-1][0] and len(stream.ahead) < MAX_HELD_BATCHES:
            stream.ahead[sequence] = batch.ts
        self._fill(stream, sequence, batch)

    def replay_ended(self, engine: Engine) -> None:
        """The replay is over, or there is none: go on with what came meanwhile."""
        stream = self._streams[engine]
        stream.is_replaying = False
        held, stream.held = stream.held, deque()
        last = -1
        for sequence, batch in held:
            if sequence <= last:
                self._restart(stream)
            last = sequence
            self._fill(stream, sequence, batch)

    def _fill(self, stream: _Stream, sequence: int, batch: Batch) -> None:
        """Apply what is next or later; a gap that is left clears what was known before it."""
        assert stream.next is not None
        if sequence < stream.next:
            return
        if sequence > stream.next:
            self.counts["lost"] += sequence - stream.next
            self._clear(stream)
        self._apply(stream, sequence, batch)

    def _apply(self, stream: _Stream, sequence: int, batch: Batch) -> None:
        self.counts["batches"] += 1
        stream.next = sequence + 1
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(stream)
            elif isinstance(event, BlockStored):
                self._store(stream, event)
            else:
                _remove(stream, event)

    def _store(self, stream: _Stream, event: BlockStored) -> None:
        room = self._max_blocks - stream.block_count
        self.counts["over_limit"] += max(len(event.block_hashes) - room, 0)
        stream.places.setdefault(_place(event), set()).update(event.block_hashes[: max(room, 0)])

    def _restart(self, stream: _Stream) -> None:
        self._clear(stream)
        stream.ahead.clear()
        stream.next = 0

    def _clear(self, stream: _Stream) -> None:
        stream.clears += bool(stream.places)
        stream.places.clear()

    def _stream_of(self, engine: Engine) -> _Stream:
        if engine not in self._streams and len(self._streams) >= MAX_ENGINE_STREAMS:
            raise InvalidRequest(f"KV events: more than {MAX_ENGINE_STREAMS} engines")
        return self._streams.setdefault(engine, _Stream())


def _parse(frames: list[bytes]) -> tuple[str, int, Batch]:
    if len(frames) != 3:
        raise InvalidRequest(f"KV events: message of {len(frames)} frames, not 3")
    try:
        topic = frames[0].decode()
    except UnicodeDecodeError:
        raise InvalidRequest("KV events: the topic is not UTF-8") from None
    return topic, sequence_of(frames[1]), decode_batch(frames[2])


def _hold(stream: _Stream, sequence: int, batch: Batch) -> None:
    if len(stream.held) == MAX_HELD_BATCHES:
        stream.held.popleft()
    stream.held.append((sequence, batch))


def _place(event: BlockStored | BlockRemoved) -> Place:
    return event.medium or GPU, event.group_idx


def _holds(stream: _Stream, block: BlockHash, medium: str) -> bool:
    return any(block in held for (where, _), held in stream.places.items() if where == medium)


def _remove(stream: _Stream, event: BlockRemoved) -> None:
    held = stream.places.get(_place(event))
    if held is not None:
        held.difference_update(event.block_hashes)
