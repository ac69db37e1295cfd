"""An engine's own block hashes, and the prefix hashes that they stand for.

Responsibility: hash the tokens of an engine's events anew into its pool's keys, and find those again when the engine
says its own hash only. The engine's hashes are not remade: how it makes them differs between releases and settings.

Invariants: a block whose key depends on more than tokens and weights (an adapter, an image, a salt), or whose parent is
unknown, has no key here; it and what follows it are counted, and are misses. At most `max_blocks` are remembered.

Concurrency: one thread.
"""

from __future__ import annotations

from collections import Counter

from kvfs.errors import KvfsError
from kvfs.events.kv_events import BlockHash, BlockStored
from kvfs.keys import HASH_BYTES, prefix_hashes
from kvfs.limits import MAX_ENGINE_BLOCKS
from kvfs.namespaces import Namespace
from scheduler.conductor.sources import Place


class EngineHashes:
    """Translate the hashes of one stream."""

    def __init__(
        self, namespace: Namespace, weights: str, counts: Counter[str], max_blocks: int = MAX_ENGINE_BLOCKS
    ) -> None:
        self._namespace = namespace
        self._weights = weights.encode() + b"\0" if weights else None
        self._counts = counts
        self._max_blocks = max_blocks
        self._keys: dict[Place, dict[int, bytes]] = {}
        """By place and the last 64 bits of the engine's hash, which is how others ask for it."""

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def clear(self) -> None:
        """Drop all hashes of the stream."""
        self._keys.clear()

    def stored(self, place: Place, event: BlockStored) -> tuple[bytes, bytes | None]:
        """Return the keys of blocks stored in a place, none of those without one, and the key before them."""
        own, count = event.block_hashes, len(event.block_hashes)
        parent, fault = self._parent(event)
        if not fault and len(own) + len(self) > self._max_blocks:
            fault = "engine_blocks_over_limit"
        if fault:
            self._counts[fault] += count
            return b"", None
        first = [self._weights, *[None] * (count - 1)] if parent is None and self._weights and count else None
        try:
            keys = prefix_hashes(self._namespace, event.token_ids, parent=parent, extra=first)
        except KvfsError:
            keys = b""
        if len(keys) != count * HASH_BYTES:
            self._counts["engine_blocks_malformed"] += count
            return b"", None
        split = (keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES))
        self._keys.setdefault(place, {}).update(zip(map(last_64, own), split, strict=True))
        return keys, parent

    def removed(self, place: Place, hashes: list[BlockHash]) -> bytes:
        """Return the keys of blocks that a place does not hold any more."""
        known = self._keys.get(place, {})
        return b"".join(known.pop(last_64(each), b"") for each in hashes)

    def key_of(self, hash: int) -> bytes | None:
        """Return the key of a block, wherever it is."""
        return next((keys[hash] for keys in self._keys.values() if hash in keys), None)

    def _parent(self, event: BlockStored) -> tuple[bytes | None, str]:
        """Return the key of the block before the first, and why there is none of these."""
        if event.lora_id is not None or event.lora_name or any(event.extra_keys or ()):
            return None, "engine_blocks_not_by_tokens"
        if event.block_size != self._namespace.block_tokens:
            return None, "engine_blocks_of_other_size"
        before = event.parent_block_hash
        if before is None:
            return None, ""
        found = self.key_of(last_64(before))
        return found, "" if found is not None else "engine_blocks_without_parent"


def last_64(hash: BlockHash) -> int:
    """Return the last 64 bits of an engine's hash: two of a million blocks share them once in 37 million engines."""
    return int.from_bytes(hash[-8:]) if isinstance(hash, bytes) else hash & (1 << 64) - 1
