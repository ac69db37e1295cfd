"""Streams of KV events in order: gaps, replays, publishers that start anew.

Responsibility: put the batches of several publishers in order, each once, and pass their events to a sink. Missing
batches are asked for by a replay; without one the stream goes on after them. I/O is in `kvfs.events.sockets`.

Invariants:
- A stream is a topic and a data-parallel rank. Engines that share both would look like one with gaps, so each engine
  needs a topic of its own.
- The sink is notified of a gap that stays before anything after it: an unknown block is a miss, one wrongly believed to
  be there costs a route.
- A number below the expected one, or after another start (`kv_events.start_of`), means that the publisher started anew,
  unless a replay brought that very batch: replays come over a connection of their own and may overtake the stream. An
  engine's streams all start with 0: one that began anew and lost as many batches as were known is not seen here.
- Nothing grows past its limit: streams, batches that wait for a replay.

Concurrency: plain state for one thread, without a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Protocol

from kvfs.errors import InvalidRequest
from kvfs.events.kv_events import (
    CHUNKS,
    Batch,
    BlockStored,
    KVEvent,
    decode_batch,
    group_of,
    sequence_of,
    start_of,
)
from kvfs.limits import MAX_ENGINE_STREAMS, MAX_EVENT_BATCHES

_MAX_SEQUENCE: Final = (1 << 63) - 1
"""Higher ones are questions of a replay (`kv_events.MANIFEST`), and the one after the very last has no frame."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One stream of events."""

    topic: str
    rank: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A gap: batches from `sequence` on are wanted from this engine's replay."""

    engine: Engine
    sequence: int


class Sink(Protocol):
    """Take the events of streams."""

    def restarted(self, engine: Engine) -> None:
        """Note that a stream begins, or begins anew: nothing is there."""
        ...

    def lost(self, engine: Engine, batches: int) -> None:
        """Note that batches of a stream are lost: nothing is known of it any more."""
        ...

    def apply(self, engine: Engine, event: KVEvent) -> None:
        """Take an event of a stream, in order."""


@dataclass(slots=True)
class _Stream:
    engine: Engine
    next: int | None = None
    """The expected sequence number; None before the first batch."""
    held: deque[tuple[int, Batch]] = field(default_factory=deque)
    """Batches that came during a replay."""
    ahead: dict[int, float] = field(default_factory=dict)
    """Number and time of batches that a replay brought before the stream did."""
    is_replaying: bool = False


class EventStreams:
    """Follow streams for a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._streams: dict[Engine, _Stream] = {}
        self.counts = {"batches": 0, "gaps": 0, "lost": 0, "malformed": 0}

    def next_of(self, engine: Engine) -> int | None:
        """Return the number of the next batch; None before the first."""
        stream = self._streams.get(engine)
        return None if stream is None else stream.next

    def drop(self, engine: Engine) -> None:
        """Follow a stream no more: its next batch is the first."""
        self._streams.pop(engine, None)

    def receive(self, frames: list[bytes]) -> Missing | None:
        """Take a message; return the gap before it, None without one.

        A malformed message is counted and dropped: its number is then a gap in the stream.
        """
        try:
            topic, sequence, batch = _parse(frames)
            stream = self._stream_of(Engine(topic, batch.data_parallel_rank or 0))
        except InvalidRequest:
            self.counts["malformed"] += 1
            return None
        if stream.ahead.pop(sequence, None) == batch.ts:
            return None
        if stream.is_replaying:
            _hold(stream, sequence, batch)
            return None
        if stream.next is None or _is_anew(stream.next, sequence):
            self._restart(stream, sequence)
        assert stream.next is not None
        if sequence > stream.next:
            self.counts["gaps"] += 1
            stream.is_replaying = True
            stream.held.append((sequence, batch))
            return Missing(stream.engine, stream.next)
        self._apply(stream, sequence, batch)
        return None

    def catch_up(self, engine: Engine) -> Missing | None:
        """Begin a replay of what was published before now; None while there is one. Raises InvalidRequest for one
        stream too many."""
        stream = self._stream_of(engine)
        if stream.is_replaying:
            return None
        stream.is_replaying = True
        if stream.next is None:
            stream.next = 0
        return Missing(engine, stream.next)

    def replayed(self, engine: Engine, frames: list[bytes]) -> None:
        """Take one message of a replay."""
        stream = self._streams.get(engine)
        try:
            topic, sequence, batch = _parse(frames)
        except InvalidRequest:
            self.counts["malformed"] += 1
            return
        if stream is None or not stream.is_replaying:
            return
        if topic != engine.topic or (batch.data_parallel_rank or 0) != engine.rank:
            return
        newest = stream.held[-1][0] if stream.held else -1
        self._fill(stream, sequence, batch)
        if sequence > newest and len(stream.ahead) < MAX_EVENT_BATCHES:
            stream.ahead[sequence] = batch.ts

    def replay_ended(self, engine: Engine) -> None:
        """End a replay, or go on without one: apply the batches that came meanwhile."""
        stream = self._streams.get(engine)
        if stream is None:
            return
        stream.is_replaying = False
        held, stream.held = stream.held, deque()
        last = -1
        for sequence, batch in held:
            if sequence <= last:
                self._restart(stream, sequence)
            last = sequence
            self._fill(stream, sequence, batch)

    def _fill(self, stream: _Stream, sequence: int, batch: Batch) -> None:
        """Apply a batch that is next or later; notify the sink first where a gap is left."""
        assert stream.next is not None
        if sequence < stream.next:
            return
        if _is_anew(stream.next, sequence):
            self._restart(stream, sequence)
        if sequence > stream.next:
            self.counts["lost"] += sequence - stream.next
            self._sink.lost(stream.engine, sequence - stream.next)
        self._apply(stream, sequence, batch)

    def _apply(self, stream: _Stream, sequence: int, batch: Batch) -> None:
        self.counts["batches"] += 1
        stream.next = sequence + 1
        for event in full_attention_first(batch.events):
            self._sink.apply(stream.engine, event)

    def _restart(self, stream: _Stream, sequence: int) -> None:
        """Begin anew with a publisher that has come to `sequence`: nothing before its start can be missing."""
        self._sink.restarted(stream.engine)
        stream.ahead.clear()
        stream.next = start_of(sequence)

    def _stream_of(self, engine: Engine) -> _Stream:
        if engine not in self._streams and len(self._streams) >= MAX_ENGINE_STREAMS:
            raise InvalidRequest(f"KV events: more than {MAX_ENGINE_STREAMS} engines")
        return self._streams.setdefault(engine, _Stream(engine))


def full_attention_first(events: Iterable[KVEvent]) -> Iterator[KVEvent]:
    """Yield the events of a batch, of blocks that were stored together those of full attention first: other layers keep
    the end of a prefix alone, and the block before it is named by the former only."""
    for _, stretch in groupby(events, lambda event: isinstance(event, BlockStored)):
        yield from sorted(stretch, key=_is_of_other_layers)


def _is_of_other_layers(event: KVEvent) -> bool:
    if not isinstance(event, BlockStored):
        return False
    return event.kv_cache_spec_kind in CHUNKS or not group_of(event).is_full


def _is_anew(expected: int, sequence: int) -> bool:
    return sequence < expected or start_of(sequence) > expected


def _parse(frames: list[bytes]) -> tuple[str, int, Batch]:
    if len(frames) != 3:
        raise InvalidRequest(f"KV events: message of {len(frames)} frames, not 3")
    try:
        topic = frames[0].decode()
    except UnicodeDecodeError:
        raise InvalidRequest("KV events: the topic is not UTF-8") from None
    sequence = sequence_of(frames[1])
    if sequence > _MAX_SEQUENCE:
        raise InvalidRequest(f"KV events: sequence number {frames[1].hex()}, the limit is 63 bits")
    return topic, sequence, decode_batch(frames[2])


def _hold(stream: _Stream, sequence: int, batch: Batch) -> None:
    if len(stream.held) == MAX_EVENT_BATCHES:
        stream.held.popleft()
    stream.held.append((sequence, batch))
