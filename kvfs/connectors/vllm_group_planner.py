"""The scheduler's half of the vLLM connector for models with several cache groups.

Responsibility: what `Planner` does, for blocks of several groups, whose keys are kept for each rank and group; the
rules are in `kvfs.groups`.

Invariants:
- Blocks of groups may have different sizes. What `Planner` counts is then as long as their least common multiple, which
  is where vLLM lets a request go on: a group has `Group.stride` blocks and keys in each.
- A hit is a hit in all groups and on all ranks, or none: the longest prefix for which each group has all that its
  layers read. A request of which one load failed computes everything that the engine itself does not have.
- Of a group of full attention every block is stored; of sliding windows and of chunks those of the prompt's end and of
  what is generated, of each CONNECTOR_WINDOWS-th window, and of where a request leaves what others have stored. Where a
  chunk ends a request goes on without any.
- Of recurrent layers every state is stored that vLLM keeps itself and names the exact block of: at a prompt's last
  whole block, where it leaves what the engine has, and as often as the retention interval says. Their block table has
  passing states too.
- Blocks of all other groups follow in the store the block of the first group of full attention that has their last
  token, without which they are worth nothing, where the rank has one: they go before it, and it goes as it would
  without them.
- vLLM puts the null block in the place of blocks that no layer reads any more: it is not stored, and never loaded.

Concurrency: the engine's scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvfs.client.blocks import Blocks
from kvfs.connectors.common import Link
from kvfs.connectors.vllm_scheduler import BlockRun, Planner, Rank, Step, Tracked, runs_of
from kvfs.groups import Group, Kept, checkpoint_every, longest_prefix
from kvfs.keys import HASH_BYTES
from kvfs.limits import CONNECTOR_WINDOWS

NULL_BLOCK = 0
"""vLLM's block that stands for none, in each group."""


class GroupPlanner(Planner):
    """Plan loads and stores of several groups."""

    def __init__(
        self,
        link: Link,
        block_tokens: int,
        groups: Sequence[Group],
        *,
        store_generated: bool,
        fetches_any: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            link,
            block_tokens,
            store_generated=store_generated,
            is_async=True,
            fetches_any=fetches_any,
            clock=clock,
        )
        self.groups = list(groups)
        self._every = checkpoint_every(self.groups, CONNECTOR_WINDOWS)
        self._junctions: dict[str, int] = {}
        """Where a request leaves what full attention finds, if the windows before that are not there."""

    def _blocks_of(self, step: Step) -> int:
        return min(len(ids) // group.stride for group, ids in zip(self.groups, step.by_group, strict=True))

    # --- loads --------------------------------------------------------------------------------------------
    def _hits(self, tracked: Tracked, first: int, last: int) -> int:
        blocks = self._link.blocks(next(iter(self._namespaces.values())))
        request_id = tracked.request.request_id
        self._junctions.pop(request_id, None)
        if blocks is None or last <= first or request_id in self._failed:
            return 0
        prefix = longest_prefix(self.groups, first, last, partial(self._present, blocks, tracked))
        if prefix.reach > prefix.boundary:
            self._junctions[request_id] = prefix.reach
        return prefix.boundary - first

    def _present(self, blocks: Blocks, tracked: Tracked, group: int, first: int, last: int) -> list[bool]:
        """Return which blocks of a group can be read on all ranks."""
        present = [True] * (last - first)
        for keys in _of_group(tracked.keys, group).values():
            some = bytes(keys[first * HASH_BYTES : last * HASH_BYTES])
            missed = [False] * (last - first)
            there = self._link.attempt(partial(self._lower.each_readable, blocks, some), missed)
            present = [one and other for one, other in zip(present, there, strict=True)]
        return present

    def _needed(self, tracked: Tracked, there: int, last: int) -> Iterator[tuple[Rank, bytes]]:
        for index, group in enumerate(self.groups):
            needed = group.needed(there, last)
            for rank, keys in _of_group(tracked.keys, index).items():
                if needed:
                    yield rank, bytes(keys[needed.start * HASH_BYTES : needed.stop * HASH_BYTES])

    def _loads_of(
        self, tracked: Tracked, first: int, last: int, by_group: Sequence[Sequence[int]]
    ) -> Iterator[BlockRun]:
        for index, group in enumerate(self.groups):
            needed = group.needed(first, last)
            ids = by_group[index]
            assert NULL_BLOCK not in ids[needed.start : needed.stop], "layers read what has no block"
            if needed:
                yield self._run(tracked, _of_group(tracked.keys, index), needed.start, needed.stop, ids)

    # --- stores -------------------------------------------------------------------------------------------
    def _stores_of(self, tracked: Tracked, step: Step, first: int, last: int) -> Iterator[BlockRun]:
        kept = Kept(
            tail=(tracked.request.num_prompt_tokens - 1) // self._block_tokens,
            junction=self._junctions.get(step.request_id, 0),
            every=self._every,
        )
        for index, group in enumerate(self.groups):
            ids = self._states_of(step, index) if group.is_state else step.by_group[index]
            blocks = range(0 if group.is_state else first * group.stride, last * group.stride)
            wanted = [i for i in blocks if ids[i] != NULL_BLOCK and kept.has(group, i)]
            for start, stop in runs_of(wanted):
                missing = self._missing(_of_group(tracked.keys, index), start, stop)
                for run_first, run_last in runs_of(missing):
                    yield self._stored_run(tracked, index, run_first, run_last, ids)

    def _states_of(self, step: Step, index: int) -> list[int]:
        """Return for each block of a recurrent group which one holds the state behind it."""
        ids = [NULL_BLOCK] * len(step.by_group[index])
        block_tokens = self._block_tokens // self.groups[index].stride
        for group, block_id, tokens in step.states:
            if group == index and tokens % block_tokens == 0:
                ids[tokens // block_tokens - 1] = block_id
        return ids

    def finished(self, request: Any) -> dict[str, Any] | None:
        self._junctions.pop(request.request_id, None)
        return super().finished(request)

    def _stored_run(
        self, tracked: Tracked, index: int, first: int, last: int, block_ids: Sequence[int]
    ) -> BlockRun:
        run = self._run(tracked, _of_group(tracked.keys, index), first, last, block_ids)
        anchors = {}
        for rank in run.keys:
            full = next((each for each in tracked.keys if self._is_full_part(each, rank)), None)
            if full is None or full == rank:
                return run
            ends = self._ends_in(full[-1], index, range(first, last))
            anchors[rank] = b"".join(
                bytes(tracked.keys[full][i * HASH_BYTES : (i + 1) * HASH_BYTES]) for i in ends
            )
        return replace(run, anchors=anchors)

    def _ends_in(self, full: int, index: int, blocks: range) -> list[int]:
        """Return for blocks of a group which ones of another have their last token."""
        theirs, own = self.groups[full].stride, self.groups[index].stride
        return [-(-(i + 1) * theirs // own) - 1 for i in blocks]

    def _is_full_part(self, one: Rank, other: Rank) -> bool:
        """Return whether one rank is of full attention, and of the same worker as another."""
        return one[:-1] == other[:-1] and self.groups[one[-1]].is_full


def _of_group(keys: Mapping[Rank, bytearray], group: int) -> dict[Rank, bytearray]:
    """Return the keys of a group, for each rank that has some of its layers."""
    return {rank: some for rank, some in keys.items() if rank[-1] == group}
