"""An engine's own block hashes, and the prefix hashes that they stand for.

Responsibility: hash the tokens of an engine's events anew into its pool's keys, and find those again when the engine
says its own hash only; count the copies of a block. The engine's hashes are not remade: how it makes them differs
between releases and settings.

Invariants:
- A block whose key depends on more than tokens and weights (an adapter, an image, a salt), or whose parent is unknown,
  has no key here; it and what follows it are counted, and are misses. At most `max_blocks` are remembered.
- A place has a block while all groups of layers that are there have a copy of it.

Concurrency: one thread.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from kvfs.errors import KvfsError
from kvfs.events.block_copies import BlockCopies
from kvfs.events.kv_events import BlockHash, BlockRemoved, BlockStored, group_of
from kvfs.keys import HASH_BYTES, prefix_hashes
from kvfs.limits import MAX_ENGINE_BLOCKS
from kvfs.namespaces import Namespace
from scheduler.conductor.sources import Place


class Stored(NamedTuple):
    """Keys of a place, one behind the other."""

    keys: bytes
    """Of blocks that it now has."""
    parent: bytes | None
    """Of the block before the first."""
    gone: bytes
    """Of blocks that it has not, as a group of layers has appeared there which lacks them."""


NOTHING: Final = Stored(b"", None, b"")


class EngineHashes:
    """Translate the hashes of one stream."""

    def __init__(
        self, namespace: Namespace, weights: str, counts: Counter[str], max_blocks: int = MAX_ENGINE_BLOCKS
    ) -> None:
        self._namespace = namespace
        self._weights = weights.encode() + b"\0" if weights else None
        self._counts = counts
        self._max_blocks = max_blocks
        self._keys: dict[int, bytes] = {}
        """By the last 64 bits of the engine's hash, which is how others ask for it."""
        self._copies: dict[Place, dict[int | None, BlockCopies[int]]] = {}
        """By place and group of layers."""

    def __len__(self) -> int:
        return sum(len(copies) for groups in self._copies.values() for copies in groups.values())

    def clear(self) -> None:
        """Drop all hashes of the stream."""
        self._keys.clear()
        self._copies.clear()

    def stored(self, place: Place, event: BlockStored) -> Stored:
        """Return what changes in a place by blocks that are stored there; those without a key are left out."""
        own, count = [last_64(each) for each in event.block_hashes], len(event.block_hashes)
        parent, fault = self._parent(event)
        if not fault and count + len(self) > self._max_blocks:
            fault = "engine_blocks_over_limit"
        if fault:
            self._counts[fault] += count
            return NOTHING
        if place.window.blocks:
            # Of a stretch of tokens windows and recurrent layers keep some blocks, which hashes alone tell; those of
            # full attention have come with their tokens before.
            known = [hash for hash in own if hash in self._keys]
            self._counts["engine_blocks_malformed"] += count - len(known)
            return self._put(place, event, known, None)
        first = [self._weights, *[None] * (count - 1)] if parent is None and self._weights and count else None
        try:
            keys = prefix_hashes(self._namespace, event.token_ids, parent=parent, extra=first)
        except KvfsError:
            keys = b""
        if len(keys) != count * HASH_BYTES:
            self._counts["engine_blocks_malformed"] += count
            return NOTHING
        split = (keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES))
        self._keys.update(zip(own, split, strict=True))
        return self._put(place, event, own, parent)

    def _put(self, place: Place, event: BlockStored, hashes: list[int], parent: bytes | None) -> Stored:
        """Count blocks of known keys in."""
        groups = self._copies.setdefault(place, {})
        others = [copies for group, copies in groups.items() if group != event.group_idx]
        is_first = event.group_idx not in groups
        own = groups.setdefault(event.group_idx, BlockCopies())
        own.add(hashes, event)
        shared = b"".join(self._keys[hash] for hash in hashes if all(hash in each for each in others))
        lacked = {hash for each in others for hash in each.missing(own)} if is_first else ()
        return Stored(shared, parent, b"".join(self._keys[hash] for hash in lacked))

    def removed(self, place: Place, event: BlockRemoved) -> bytes:
        """Return the keys of blocks that a place does not have any more."""
        copies = self._copies.get(place, {}).get(event.group_idx)
        if copies is None:
            return b""
        gone = []
        for hash in map(last_64, event.block_hashes):
            if copies.remove(hash):
                gone.append(self._keys[hash])
                if not self._has(hash):
                    del self._keys[hash]
        return b"".join(gone)

    def _has(self, hash: int) -> bool:
        return any(hash in copies for groups in self._copies.values() for copies in groups.values())

    def key_of(self, hash: int) -> bytes | None:
        """Return the key of a block, wherever it is."""
        return self._keys.get(hash)

    def _parent(self, event: BlockStored) -> tuple[bytes | None, str]:
        """Return the key of the block before the first, and why there is none of these."""
        if event.lora_id is not None or event.lora_name or any(event.extra_keys or ()):
            return None, "engine_blocks_not_by_tokens"
        if event.block_size != self._namespace.block_tokens and group_of(event).is_full:
            return None, "engine_blocks_of_other_size"
        before = event.parent_block_hash
        if before is None:
            return None, ""
        found = self.key_of(last_64(before))
        return found, "" if found is not None else "engine_blocks_without_parent"


def last_64(hash: BlockHash) -> int:
    """Return the last 64 bits of an engine's hash: two of a million blocks share them once in 37 million engines."""
    return int.from_bytes(hash[-8:]) if isinstance(hash, bytes) else hash & (1 << 64) - 1
