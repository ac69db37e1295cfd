"""Streams of events and the sources that they speak of.

Responsibility: a number for each place of a stream and for what each instance is expected to have; what is known of a
stream: nothing yet, all, or not all (after a gap).

Invariants: a stream that is not current has no blocks in the index. The number of a source is used again only after its
blocks are cleared. What a medium holds of full attention counts as far as the stream's other layers there go on; a
store reads them wherever it has them, and what one medium lacks of a prompt from its other one.

Concurrency: one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from kvfs._native.cluster.index import MAX_STRIDE, MAX_WINDOWS, SPARE_SOURCES, ClusterIndex
from kvfs.errors import LimitExceeded
from kvfs.events.kv_events import CHUNKS, GPU, STORAGE, group_of_kind
from kvfs.limits import MAX_BLOCK_PARTS, MAX_BLOCK_SOURCES, MAX_SWEPT_SEGMENTS, SWEEP_STEP_S
from kvfs.namespace_groups import FULL_KINDS, number_of
from scheduler.conductor.values import CacheGroup, first_full


class StreamName(NamedTuple):
    """A topic, and the data-parallel rank in it."""

    topic: str
    rank: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.rank}" if self.rank else self.topic


ALL_BLOCKS: Final = 1 << 31
"""More than a prompt has."""


class Window(NamedTuple):
    """What layers read before a boundary."""

    blocks: int = 0
    """The last ones of their own, the last state alone among them; ALL_BLOCKS of full attention, but for its first
    group: 0."""
    stride: int = 1
    """Blocks of full attention that one of theirs is as long as."""
    parts: int = 1
    """Where theirs are shorter, how many are as long as one of full attention: `blocks` are these then."""
    is_chunked: bool = False
    """Whether they read back to a multiple of `blocks`."""

    def read_before(self, boundary: int) -> range:
        """Return the blocks of full attention with which those end that are read before a boundary of all layers."""
        own = boundary // self.stride
        first = max(own - (own % self.blocks if self.is_chunked else self.blocks), 0)
        return range((first + 1) * self.stride - 1, own * self.stride, self.stride)


def window_of(
    kind: str | None,
    own_tokens: int,
    window_tokens: int | None,
    chunk_tokens: int | None,
    block_tokens: int,
    *,
    is_beside: bool,
) -> Window | None:
    """Return what layers with blocks of `own_tokens` read before a boundary, beside full attention with blocks of
    `block_tokens`; None where that is not followed. `is_beside`: of full attention it is not the first group.

    Chunks are not where nobody says how long one is: to ask for all of their blocks would find next to nothing. Nor are
    layers that read nothing before a token, and blocks of which neither some are as long as one of full attention, and
    a window or chunk as some of these, nor one as some of full attention.
    """
    group = group_of_kind(kind, window_tokens, chunk_tokens, max(own_tokens, 1))
    is_further = is_beside and kind in FULL_KINDS
    if group.window_blocks is None and not is_further:
        return None if kind in CHUNKS else Window()
    if own_tokens < 1 or group.window_blocks == 0:
        return None
    stride, parts = max(own_tokens // block_tokens, 1), max(block_tokens // own_tokens, 1)
    if stride * block_tokens != parts * own_tokens or stride > MAX_STRIDE or parts > MAX_BLOCK_PARTS:
        return None
    if group.window_blocks is None:
        return Window(ALL_BLOCKS, stride, parts)
    if group.window_blocks % parts:
        return None
    return Window(group.window_blocks // parts, stride, parts, group.is_chunked)


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """What the instances of a model say of its layers, before anything is heard of their blocks."""

    block_tokens: int
    """Tokens of a block of full attention; without such layers of the blocks by whose keys prompts are looked up."""
    groups: tuple[CacheGroup, ...] = ()
    """All of them; none where nobody says which there are."""
    keyed_group: int | None = None
    """Without layers of full attention: the number that a store has for the group whose keys these are."""
    in_store: Mapping[int, Window] = field(init=False)
    """What the groups beside full attention read that are followed, by the numbers that a store has for them."""
    chunk_tokens: Mapping[int, int] = field(init=False)
    """How long a chunk is of a group, by the engine's numbers."""

    def __post_init__(self) -> None:
        found = {}
        first = first_full(self.groups)
        for each in self.groups:
            is_further = each.kind in FULL_KINDS and each is not first
            number = number_of(each.kind, each.window_tokens, each.layers, is_further=is_further)
            said = each.kind, each.block_tokens, each.window_tokens, each.chunk_tokens
            window = window_of(*said, self.block_tokens, is_beside=is_further)
            if number is not None and window is not None and window.blocks:
                found[number] = window
        object.__setattr__(self, "in_store", found)
        chunks = {each.group: each.chunk_tokens for each in self.groups if each.chunk_tokens is not None}
        object.__setattr__(self, "chunk_tokens", chunks)

    @property
    def has_full(self) -> bool:
        """Return whether there are layers of full attention."""
        return self.keyed_group is None

    def reading(self, window: Window) -> list[int]:
        """Return the numbers of the groups that read so much; none where nobody says which there are."""
        return [each for each, other in self.in_store.items() if other == window]

    def are_said_by(self, other: ModelLayers) -> bool:
        """Return whether these are the groups that a store's blocks are to be of, as instances say them."""
        return bool(self.groups) and self.in_store == other.in_store

    def are_keyed_as(self, other: ModelLayers) -> bool:
        """Return whether prompts are looked up by the same blocks."""
        return (self.block_tokens, self.keyed_group) == (other.block_tokens, other.keyed_group)


class Place(NamedTuple):
    """Where a stream's blocks are: in a medium, and of which layers."""

    medium: str
    """Empty: in whichever the store has."""
    window: Window = Window()
    model: bytes = b""
    """Of several kinds of attention, in a store, which has blocks of many: `namespace_groups.NamespaceGroup.model`."""


class WindowBlocks(Protocol):
    """Says by what keys a store has blocks of windows, which are not those of full attention."""

    def beside(self, place: Place, anchor: bytes) -> Iterable[tuple[int, bytes]]:
        """Yield the blocks that follow one of full attention: the number of the group, and the key."""

    def __contains__(self, key: bytes) -> bool:
        """Return whether the store has a block."""


class Knowledge(Enum):
    """Says how much is known of what a stream's publisher holds."""

    UNKNOWN = "unknown"
    """Nothing was heard yet."""
    CURRENT = "current"
    PARTIAL = "partial"
    """Batches were lost: what was known is cleared, what came since counts."""
    MUTE = "mute"
    """It said nothing of blocks that were made: what was known is cleared, until it speaks."""


@dataclass(slots=True)
class Stream:
    """What is known of one stream of events."""

    name: StreamName
    is_store: bool = False
    """Whether a kvfs service publishes it, with its keys, rather than an engine."""
    knowledge: Knowledge = Knowledge.UNKNOWN
    epoch: int = 0
    """How often its blocks were cleared."""
    began_s: float = float("-inf")
    """When its events last began anew."""
    heard_s: float = float("-inf")
    event_s: float = float("-inf")
    """When its last event came."""
    events: int = 0
    """How many have come."""
    owed_s: float = float("inf")
    """Since when an answer needed blocks of which no event has come, nor any other."""
    groups: dict[int, Window] = field(default_factory=dict)
    """What each of the engine's groups of layers reads before a boundary, once it has said that."""
    sources: dict[Place, int] = field(default_factory=dict)
    """The number of each place, of windows MAX_WINDOWS for each medium at most."""
    windows: set[Place] = field(default_factory=set)
    """Where blocks of windows were, whether these places have numbers or not."""
    window_blocks: WindowBlocks | None = None
    """Of a store, once it has told of windows."""
    layers: dict[bytes, ModelLayers] = field(default_factory=dict)
    """By the models of its instances, as `Place.model` has them; blocks of others count for nobody."""
    has_others: bool = False
    """Whether blocks of others were passed over."""
    unused: set[bytes] = field(default_factory=set)
    """Those of `layers` of which no instance is left: what is known counts again with the next one, unless something is
    said of their blocks before."""
    regrouped: set[bytes] = field(default_factory=set)
    """Those of `layers` whose blocks beside full attention are to be said again: other groups of them count now."""
    expecting: set[int] = field(default_factory=set)
    """The sources of what its instances are expected to have."""

    def layers_at(self, place: Place) -> ModelLayers | None:
        """Return of which layers the blocks of a place are; None where no instance says."""
        return self.layers.get(place.model) if self.is_store else next(iter(self.layers.values()), None)

    def media(self, model: bytes) -> Iterator[tuple[str, int]]:
        """Yield where blocks of full attention are that count for a model, and the numbers of these places; without
        such layers those that stand in for them."""
        for place, source in self.sources.items():
            if not place.window.blocks and place.model == (model if self.is_store else b""):
                yield place.medium, source

    def mask_of(self, model: bytes) -> int:
        """Return the index's mask of everywhere that `media` yields."""
        return sum(1 << source for _, source in self.media(model))

    def block_sources(self, model: bytes) -> set[int]:
        """Return the numbers of the places that have a model's blocks: of full attention, without it of windows."""
        own = model if self.is_store else b""
        layers = self.layers.get(model)
        has_full = layers is None or layers.has_full
        return {
            source
            for place, source in self.sources.items()
            if place.model == own and has_full != bool(place.window.blocks)
        }


class Sources:
    """Assign numbers to sources, and clear them, SPARE_SOURCES in one pass of sweeping.

    Of further ones the number is retired: nobody has it, so that its blocks count nowhere, and it is cleared once those
    before it are swept.
    """

    def __init__(self, index: ClusterIndex) -> None:
        self._index = index
        self._free = list(range(MAX_BLOCK_SOURCES - 1, -1, -1))
        self._retired: deque[int] = deque()

    def take(self) -> int:
        """Take a number. Raises LimitExceeded."""
        if not self._free:
            raise LimitExceeded(f"{MAX_BLOCK_SOURCES} sources of blocks are in use, which is the limit")
        return self._free.pop()

    def assign(self, stream: Stream, place: Place) -> int:
        """Give a place of a stream a number, which it has not got. Raises LimitExceeded."""
        if place.window.blocks:
            stream.windows.add(place)
        try:
            self._stand_in(stream)
            number = stream.sources[place] = self.take()
        finally:
            self.limit(stream)
        return number

    def expect(self, stream: Stream, model: bytes, layers: ModelLayers) -> None:
        """Have a stream's blocks of a model be of these layers.

        Of a store full attention counts as far as all others go on that are said, also those of which it has told
        nothing; nothing is known of their blocks then.
        """
        known = stream.layers.get(model)
        stream.layers[model] = layers
        is_rekeyed = known is not None and not known.are_keyed_as(layers)
        if stream.is_store and model and (layers.groups or is_rekeyed):
            before = {each for each in stream.windows if each.model == model}
            self._release_all(stream, before)
            stream.windows -= before
            stream.windows |= {Place("", window, model) for window in layers.in_store.values()}
            self.limit(stream)

    def drop(self, stream: Stream, model: bytes) -> None:
        """Take back all numbers of a model in a store, which nobody asks for any more; that it has windows stays
        known."""
        del stream.layers[model]
        self._release_all(stream, {each for each in stream.sources if each.model == model})

    def _release_all(self, stream: Stream, places: Iterable[Place]) -> None:
        for place in places:
            if place in stream.sources:
                self.release(stream.sources.pop(place))

    def limit(self, stream: Stream) -> None:
        """Have a stream's blocks of full attention count as far as its other layers go on in the same medium.

        In an engine's own memory that is all layers that it has named: of those that have told nothing yet it has
        nothing. What offloads blocks may tell those of full attention alone. Without numbers for all, none count.
        Without layers of full attention a place without blocks stands in for them.
        """
        with suppress(LimitExceeded):
            self._stand_in(stream)
        full = {place: source for place, source in stream.sources.items() if not place.window.blocks}
        for place, source in full.items():
            beside = {each for each in stream.windows if _is_beside(each, place)}
            if place.medium == GPU:
                beside |= {Place(GPU, window) for window in stream.groups.values() if window.blocks}
            other = next(
                (
                    at
                    for each, at in full.items()
                    if stream.is_store and at != source and each.model == place.model
                ),
                None,
            )
            layers, nowhere = stream.layers_at(place), [(source, 1, 1, False)]  # its own window
            try:
                windows = [self._window(stream, each) for each in sorted(beside)]
            except LimitExceeded:
                windows = nowhere
            windows = windows if len(windows) <= MAX_WINDOWS else nowhere
            is_alone = bool(windows) and layers is not None and not layers.has_full
            self._index.set_windows(source, windows, None if is_alone else other, alone=is_alone)

    def _stand_in(self, stream: Stream) -> None:
        """Give a number to what stands in for full attention where windows are alone. Raises LimitExceeded."""
        for window in stream.windows:
            layers = stream.layers_at(window)
            if layers is not None and not layers.has_full:
                place = Place(window.medium or STORAGE, Window(), window.model)
                if place not in stream.sources:
                    stream.sources[place] = self.take()

    def _window(self, stream: Stream, place: Place) -> tuple[int, int, int, bool]:
        """Return what the index is to know of a place, which gets a number. Raises LimitExceeded."""
        if place not in stream.sources:
            stream.sources[place] = self.take()
        return stream.sources[place], place.window.blocks, place.window.stride, place.window.is_chunked

    def forget_layers(self, stream: Stream) -> None:
        """Take back the numbers of all windows of a stream, whose blocks were cleared. A store keeps them: its blocks
        say of which model they are, whose layers are what they were."""
        if stream.is_store:
            return
        stream.groups.clear()
        stream.windows.clear()
        for place, source in list(stream.sources.items()):
            if place.window.blocks:
                self.release(stream.sources.pop(place))
            else:
                self._index.set_windows(source, ())

    def release(self, source: int) -> None:
        """Take a number back, once nothing maps it any more."""
        if self._may_clear:
            self._index.set_windows(source, ())
            self._index.clear(source)
            self._free.append(source)
        else:
            self._retire(source)

    def _retire(self, source: int) -> None:
        self._index.set_windows(source, ())
        self._retired.append(source)

    def clear(self, stream: Stream, knowledge: Knowledge) -> bool:
        """Clear all blocks of a stream: they were cleared there, or batches were lost.

        An engine whose caches are empty will not have what it was expected to have either. Return whether the stream
        has lost numbers, so that what maps them is to be derived anew.
        """
        lost = self._empty(stream.sources)
        if lost:
            self.limit(stream)
        if knowledge is Knowledge.CURRENT and not stream.is_store:
            for expected in stream.expecting:
                if self._may_clear:  # else it fades
                    self._index.clear(expected)
        stream.owed_s = float("inf")
        stream.epoch += 1
        stream.knowledge = knowledge
        return lost

    def _empty(self, numbers: dict[Place, int]) -> bool:
        """Clear sources, and take those out that cannot be cleared now; return whether there were any."""
        before = len(numbers)
        for place, source in list(numbers.items()):
            if self._may_clear:
                self._index.clear(source)
            else:
                self._retire(numbers.pop(place))
        return len(numbers) < before

    @property
    def _may_clear(self) -> bool:
        return not self._retired and self._index.unswept_sources < SPARE_SOURCES

    def sweep(self, clock: Callable[[], float]) -> None:
        """Sweep for limits.SWEEP_STEP_S at most, and clear retired numbers where there is room for them."""
        until_s = clock() + SWEEP_STEP_S
        for _ in range(MAX_SWEPT_SEGMENTS):
            if not self._index.sweep() or clock() >= until_s:
                break
        while self._retired and self._index.unswept_sources < SPARE_SOURCES:
            source = self._retired.popleft()
            self._index.clear(source)
            self._free.append(source)


def _is_beside(window: Place, full: Place) -> bool:
    """Return whether what goes on from blocks of full attention needs those of a window."""
    return window.model == full.model and window.medium in ("", full.medium)
