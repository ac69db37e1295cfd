"""An engine's own block hashes, and the prefix hashes that they stand for.

Responsibility: hash the tokens of an engine's events anew into its pool's keys, and find those again when the engine
says its own hash only; count the copies of a block. The engine's hashes are not remade: how it makes them differs
between releases and settings.

Invariants:
- Without layers of full attention each group's own events tell the tokens. Where not all blocks of a stretch are kept,
  nothing says which are, nor what follows it: they are misses, and counted.
- A block whose key depends on more than tokens and weights (an adapter, an image, a salt), or whose parent is unknown,
  has no key here; it and what follows it are counted, and are misses. At most `max_blocks` are remembered.
- A place has a block while all groups of layers that are there have a copy of it, or of all its parts.

Concurrency: one thread.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from kvfs.errors import KvfsError
from kvfs.events.kv_events import BlockHash, BlockRemoved, BlockStored
from kvfs.keys import prefix_hashes, split_keys
from kvfs.limits import MAX_ENGINE_BLOCKS
from kvfs.namespaces import Namespace
from scheduler.conductor.feeds.group_blocks import GroupBlocks
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
        self,
        namespace: Namespace,
        weights: str,
        counts: Counter[str],
        max_blocks: int = MAX_ENGINE_BLOCKS,
        *,
        has_full: bool = True,
    ) -> None:
        """`has_full`: whether there are layers of full attention, whose events tell the tokens of all blocks."""
        self._namespace, self._has_full = namespace, has_full
        self._weights = weights.encode() + b"\0" if weights else None
        self._counts = counts
        self._max_blocks = max_blocks
        self._keys: dict[int, bytes] = {}
        """By the last 64 bits of the engine's hash, which is how others ask for it."""
        self._groups: dict[Place, dict[int | None, GroupBlocks]] = {}
        """By place and number."""

    def __len__(self) -> int:
        return sum(len(blocks) for groups in self._groups.values() for blocks in groups.values())

    def clear(self) -> None:
        """Drop all hashes of the stream."""
        self._keys.clear()
        self._groups.clear()

    def stored(self, place: Place, event: BlockStored) -> Stored:
        """Return what changes in a place by blocks that are stored there; those without a key are left out."""
        own, count = [last_64(each) for each in event.block_hashes], len(event.block_hashes)
        by_tokens = not (place.window.blocks and self._has_full)
        parent, fault = self._parent(event) if by_tokens else (None, _unkeyed(event))
        if not fault and count + len(self) > self._max_blocks:
            fault = "engine_blocks_over_limit"
        if fault:
            self._counts[fault] += count
            return NOTHING
        if not by_tokens:
            # Of a stretch of tokens windows and recurrent layers keep some blocks, which hashes alone tell; those of
            # full attention have come with their tokens before.
            known = own if place.window.parts > 1 else [hash for hash in own if hash in self._keys]
            self._counts["engine_blocks_malformed"] += count - len(known)
            return self._put(place, event, known, None)
        keys = self._keys_of(event, parent)
        if len(keys) != count:
            self._counts["engine_blocks_malformed"] += count or len(keys)
            return NOTHING
        self._keys.update(zip(own, keys, strict=True))
        return self._put(place, event, own, parent)

    def _keys_of(self, event: BlockStored, parent: bytes | None) -> list[bytes]:
        """Return the keys of the blocks that an event's tokens are of; none for tokens that have no key."""
        count = len(event.token_ids) // self._namespace.block_tokens
        first = [self._weights, *[None] * (count - 1)] if parent is None and self._weights and count else None
        try:
            return split_keys(prefix_hashes(self._namespace, event.token_ids, parent=parent, extra=first))
        except KvfsError:
            return []

    def _put(self, place: Place, event: BlockStored, hashes: list[int], parent: bytes | None) -> Stored:
        """Count blocks of known keys in."""
        groups = self._groups.setdefault(place, {})
        others = [blocks for group, blocks in groups.items() if group != event.group_idx]
        is_first = event.group_idx not in groups
        own = groups.setdefault(event.group_idx, GroupBlocks(place.window.parts))
        before = event.parent_block_hash
        whole = own.add(hashes, event, None if before is None else last_64(before), self._keys)
        shared = b"".join(self._keys[hash] for hash in whole if all(hash in each for each in others))
        lacked = {hash for each in others for hash in each if hash not in own} if is_first else ()
        return Stored(shared, parent, b"".join(self._keys[hash] for hash in lacked if hash in self._keys))

    def removed(self, place: Place, event: BlockRemoved) -> bytes:
        """Return the keys of blocks that a place does not have any more."""
        blocks = self._groups.get(place, {}).get(event.group_idx)
        if blocks is None:
            return b""
        gone = []
        for hash in map(last_64, event.block_hashes):
            gone += [self._keys[block] for block in blocks.remove(hash, self._keys)]
            if hash in self._keys and not self._has(hash):
                del self._keys[hash]
        return b"".join(gone)

    def _has(self, hash: int) -> bool:
        return any(blocks.has_part(hash) for groups in self._groups.values() for blocks in groups.values())

    def key_of(self, hash: int) -> bytes | None:
        """Return the key of a block, wherever it is."""
        return self._keys.get(hash)

    def _parent(self, event: BlockStored) -> tuple[bytes | None, str]:
        """Return the key of the block before the first, and why there is none of these."""
        if fault := _unkeyed(event):
            return None, fault
        if event.block_size != self._namespace.block_tokens:
            return None, "engine_blocks_of_other_size"
        before = event.parent_block_hash
        if before is None:
            return None, ""
        found = self.key_of(last_64(before))
        return found, "" if found is not None else "engine_blocks_without_parent"


def _unkeyed(event: BlockStored) -> str:
    """Return why blocks have no keys, whatever is before them; empty where they may have some."""
    by_more = event.lora_id is not None or event.lora_name or any(event.extra_keys or ())
    return "engine_blocks_not_by_tokens" if by_more else ""


def last_64(hash: BlockHash) -> int:
    """Return the last 64 bits of an engine's hash: two of a million blocks share them once in 37 million engines."""
    return int.from_bytes(hash[-8:]) if isinstance(hash, bytes) else hash & (1 << 64) - 1
