"""Blocks of sliding windows and recurrent layers in a store, and the blocks of full attention that they lie beside.

Responsibility: a store keys each cache group by itself, and has a window's block follow the block of full attention
with the same last token. Prompts are looked up by the keys of full attention: say under which of them all groups of a
kind have their block. Without full attention one group's keys serve for that, and its blocks lie beside themselves.

Invariants: a block is there while any medium has it. A place has what each group has that instances say, or that was
ever told of there: one that appears takes out what it lacks. At most `max_blocks` are remembered; others are misses,
and counted.

Concurrency: one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvfs.events.kv_events import CPU, STORAGE, BlockRemoved, BlockStored
from kvfs.limits import MAX_ENGINE_BLOCKS
from scheduler.conductor.sources import ModelLayers, Place, Window

_MEDIA: Final = {CPU: 1, STORAGE: 2}
_OTHER_MEDIUM: Final = 4


class Change(NamedTuple):
    """Keys of full attention beside which a place now has all, or has not any more."""

    place: Place
    keys: list[bytes]
    gone: list[bytes]


@dataclass(slots=True)
class _Block:
    place: Place
    group: int
    anchor: bytes
    """The block of full attention that it follows, or itself."""
    media: int


@dataclass(slots=True)
class _Beside:
    """What a place has beside each block of full attention."""

    parts: int
    """As `Window` has them."""
    groups: dict[int, int] = field(default_factory=dict)
    """Each group's number by itself: all its blocks have one object."""
    keys: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """The blocks of all groups, by the one of full attention."""

    def is_whole(self, anchor: bytes) -> bool:
        return len(self.keys.get(anchor, ())) == len(self.groups) * self.parts


class StoreWindows:
    """Follow one store. Implement `WindowBlocks`."""

    def __init__(self, counts: Counter[str], max_blocks: int = MAX_ENGINE_BLOCKS) -> None:
        self._counts, self._max_blocks = counts, max_blocks
        self._blocks: dict[bytes, _Block] = {}
        self._places: dict[Place, _Beside] = {}

    def clear(self) -> None:
        """Drop all blocks; which groups there are stays known."""
        self._blocks.clear()
        for beside in self._places.values():
            beside.keys.clear()

    def forget(self, model: bytes) -> None:
        """Drop the blocks of a model, and which groups it has."""
        self.empty(model)
        self._places = {place: beside for place, beside in self._places.items() if place.model != model}

    def empty(self, model: bytes) -> None:
        """Drop the blocks of a model; which groups there are stays known."""
        for place, beside in self._places.items():
            if place.model == model:
                beside.keys.clear()
        self._blocks = {hash: block for hash, block in self._blocks.items() if block.place.model != model}

    def stored(
        self,
        window: Window,
        event: BlockStored,
        hashes: list[bytes],
        anchors: list[bytes],
        layers: ModelLayers,
    ) -> Change:
        """Return what changes by blocks of a group that are stored. `anchors`: beside which blocks of those by which
        prompts are looked up each lies. `layers`: of the model, of which all groups count that are said."""
        place = Place("", window, event.layers_of or b"")
        beside = self._places.get(place)
        if beside is None:
            beside = self._places[place] = _Beside(
                window.parts, {each: each for each in layers.reading(window)}
            )
        group = event.group_idx or 0
        change = Change(place, [], self._appear(beside, group))
        for hash, anchor in zip(hashes, anchors, strict=False):
            known = self._blocks.get(hash)
            if known is not None:
                known.media |= _bit(event)
            elif len(self._blocks) >= self._max_blocks:
                self._counts["store_windows_over_limit"] += 1
            else:
                self._blocks[hash] = _Block(place, beside.groups[group], anchor, _bit(event))
                beside.keys[anchor] = (*beside.keys.get(anchor, ()), hash)
                if beside.is_whole(anchor):
                    change.keys.append(anchor)
        return change

    def _appear(self, beside: _Beside, group: int) -> list[bytes]:
        """Count a group in; return what it lacks if it is new."""
        if group in beside.groups:
            return []
        lacked = [anchor for anchor in beside.keys if beside.is_whole(anchor)]
        beside.groups[group] = group
        return lacked

    def removed(self, event: BlockRemoved, hashes: list[bytes]) -> list[Change]:
        """Return what changes by blocks that have left a medium."""
        changes: dict[Place, Change] = {}
        for hash in hashes:
            block = self._blocks.get(hash)
            if block is None:
                continue
            block.media &= ~_bit(event)
            if not block.media:
                del self._blocks[hash]
                beside = self._places[block.place]
                if beside.is_whole(block.anchor):
                    changes.setdefault(block.place, Change(block.place, [], [])).gone.append(block.anchor)
                left = tuple(key for key in beside.keys.pop(block.anchor) if key != hash)
                if left:
                    beside.keys[block.anchor] = left
        return list(changes.values())

    def beside(self, place: Place, anchor: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks that follow one of full attention: the number of the group, and the key."""
        known = self._places.get(place)
        for key in () if known is None else known.keys.get(anchor, ()):
            yield self._blocks[key].group, key

    def __contains__(self, key: bytes) -> bool:
        """Return whether the store has a block."""
        return key in self._blocks


def _bit(event: BlockStored | BlockRemoved) -> int:
    return _MEDIA.get(event.medium or "", _OTHER_MEDIUM)
