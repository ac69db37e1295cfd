"""What a group of an engine's layers has, by the blocks of full attention beside which it lies.

Responsibility: count the copies of its blocks; where they are shorter than those of full attention, say of which of
these it has all parts. The last part has the hash of the block, and parts come in order.

Concurrency: plain state for one thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

from kvfs.events.block_copies import BlockCopies
from kvfs.events.kv_events import BlockStored


class GroupBlocks:
    """Follow one group; `parts` of its blocks are as long as one of full attention."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._copies: BlockCopies[int] = BlockCopies()
        self._before: dict[int, int] = {}
        """Of each part that is there the one before."""
        self._after: defaultdict[int, set[int]] = defaultdict(set)
        """The other way round: prompts part behind any of them."""

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, block: int) -> bool:
        """Return whether all parts of a block of full attention are there."""
        part: int | None = block
        for _ in range(self._parts):
            if part is None or part not in self._copies:
                return False
            part = self._before.get(part)
        return True

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks of full attention of which all parts are there, and other parts with as many before them."""
        return (part for part in self._copies if part in self)

    def has_part(self, hash: int) -> bool:
        """Return whether a block of the group is there."""
        return hash in self._copies

    def add(
        self, hashes: Sequence[int], event: BlockStored, before: int | None, full: Container[int]
    ) -> list[int]:
        """Count blocks of an event in; return which of full attention now have all their parts. `before`: what precedes
        the event's tokens. `full`: the blocks of full attention that are known."""
        self._copies.add(hashes, event)
        if self._parts == 1:
            return [*hashes]
        # vLLM leaves out of an event what a window has passed: then `before` is not before the first. What it leaves
        # out further on ends where a block of full attention does.
        has_all = len(event.token_ids) == len(hashes) * event.block_size
        for one, other in pairwise([before, *hashes] if has_all and before is not None else hashes):
            if one not in full and (has_all or other not in self._before):
                self._unlink(other)
                self._before[other] = one
                self._after[one].add(other)
        blocks = dict.fromkeys(block for hash in hashes for block in self._blocks_with(hash, full))
        return [block for block in blocks if block in self]

    def remove(self, hash: int, full: Container[int]) -> list[int]:
        """Take a copy out; return which blocks of full attention have not all their parts any more."""
        if self._parts == 1:  # half the time of what follows, for each block that an engine evicts
            return [hash] if self._copies.remove(hash) else []
        whole = [block for block in self._blocks_with(hash, full) if block in self]
        if not self._copies.remove(hash):
            return []
        self._unlink(hash)
        return whole

    def _unlink(self, hash: int) -> None:
        before = self._before.pop(hash, None)
        if before is not None:
            self._after[before].remove(hash)
            if not self._after[before]:
                del self._after[before]

    def _blocks_with(self, hash: int, full: Container[int]) -> Iterator[int]:
        """Yield the known blocks of full attention that a part is of."""
        parts = {hash}
        for _ in range(self._parts):
            yield from (part for part in parts if part in full)
            parts = {after for part in parts if part not in full for after in self._after.get(part, ())}
