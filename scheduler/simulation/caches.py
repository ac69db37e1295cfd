"""The blocks of all simulated instances: who holds which, and what is evicted, copied, or demoted to lower tiers.

Responsibility: `Caches` keeps the prefix index, a cache for each source of the cluster, and the heat and misses that
`routing.replication` decides by. A commitment inserts a prompt's blocks; lower tiers take what DRAM evicts.

Invariants:
- A block is in the index as held by a source exactly where the cache of that source has it, but for a node that is
  down: the blocks of its lower tiers are in its caches alone.
- A lower tier takes a block when its last copy in DRAM is evicted, and keeps it when it is loaded again. What the
  lowest one evicts is gone.

Concurrency: one thread.
"""

from __future__ import annotations

from bisect import bisect_left

from scheduler.routing import replication
from scheduler.routing.cluster import Source
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import PrefillCandidate
from scheduler.routing.policies import POLICIES
from scheduler.routing.prefix_index import PrefixIndex, Run
from scheduler.routing.queues import Job
from scheduler.simulation.event_queue import Events
from scheduler.simulation.nodes import BlockLru
from scheduler.simulation.options import LowerTier, Options
from scheduler.simulation.results import Counts
from scheduler.simulation.reuse import NEVER
from scheduler.simulation.traces import BLOCK_TOKENS

COPY_SHARE = 0.05
"""How much of one source's time the copies of a sweep may take."""


class Caches:
    """The caches of the instances whose DRAM is `sources`; the sources of lower tiers are appended there."""

    def __init__(self, sources: list[Source], costs: CostModel, options: Options, events: Events) -> None:
        self._sources = sources
        self._costs = costs
        self._events = events
        self._nodes = len(sources)
        self._dram_mask = (1 << self._nodes) - 1
        self._keeps_copies = POLICIES[options.policy].keeps_copies
        self.index = PrefixIndex()
        self.of_source = [BlockLru(options.cache_blocks) for _ in range(self._nodes)]
        self._below: list[list[int]] = []
        """For each lower tier the source that takes what each node demotes."""
        self._down: set[int] = set()
        for tier in options.tiers:
            self._add_tier(tier)
        self._replicates = options.replicates and not self._keeps_copies
        self._heat = replication.Heat()
        self._misses = replication.Misses(options.cache_blocks)
        self._uses = 0
        self._begun: list[int] = []
        self.reused_blocks = 0
        self.references = 0
        self.copied_blocks = 0
        self.thinned_blocks = 0
        """Copies that were ordered ahead of demand, and those that were demoted."""

    def _add_tier(self, tier: LowerTier) -> None:
        first, count = len(self._sources), 1 if tier.shared else self._nodes
        for n in range(count):
            node = None if tier.shared else n
            rate = tier.rate(BLOCK_TOKENS * self._costs.kv_token_bytes)
            self._sources.append(Source(node, tier.name, rate, tier.latency_s))
            self.of_source.append(BlockLru(tier.blocks))
        self._below.append([first + (0 if tier.shared else n) for n in range(self._nodes)])

    @property
    def dram(self) -> list[BlockLru]:
        """Return the caches of the instances' DRAM, without those of lower tiers."""
        return self.of_source[: self._nodes]

    def counts(self, spread: int) -> Counts:
        """Return the counts of a run that spread so many prompts."""
        return Counts(self.reused_blocks, self.references, spread, self.copied_blocks, self.thinned_blocks)

    def runs(self, blocks: tuple[int, ...]) -> tuple[Run, ...]:
        """Return the longest prefix of a prompt that the cluster holds, in runs."""
        return self.index.runs(blocks)

    # --- commitments -------------------------------------------------------------------------------------
    def insert(
        self,
        blocks: tuple[int, ...],
        chosen: PrefillCandidate,
        job: Job,
        predicted: CostModel,
        relayed: int = 0,
    ) -> None:
        """Use and insert the prompt's blocks, last to first, so that a block is younger than its descendants.

        `relayed`: how many of them were inserted for the same prompt before.
        """
        local, now_s = job.instance, self._events.now_s
        sources = [local] * len(blocks)
        for load in chosen.loads:
            sources[load.first_block : load.first_block + load.blocks] = [load.source] * load.blocks
        index, cache = self.index, self.of_source[local]
        room = self._keeps_copies or len(cache) + len(blocks) <= cache.capacity
        copy_heat = 0.0 if room else self.copy_heat(predicted)
        self._begun.append(self._uses)
        self.references += len(blocks) - relayed
        self.reused_blocks += chosen.reused_blocks - relayed
        leaf = chosen.reused_blocks - 1
        own_from = self._own_from(blocks[leaf], sources[leaf], leaf) if leaf >= 0 and not room else None
        for place in range(len(blocks) - 1, -1, -1):
            block, source = blocks[place], sources[place]
            if place >= chosen.reused_blocks:
                index.add(block, local, job)
                if block in self._misses:
                    made_s = predicted.prefill_s((place + 1) * BLOCK_TOKENS, place * BLOCK_TOKENS)
                    self._misses.made(block, made_s - predicted.prefill_fixed_s, now_s)
            elif source >= self._nodes:
                self.of_source[source].use(block)
                index.add(block, local)
            elif place < relayed and block not in self.of_source[source]:
                continue  # the piece before loaded it and kept no copy: it lies where that took it from
            elif source != local:
                heat = self._heat.loaded(block, now_s)
                moves = own_from is not None and self.of_source[source].used(block) == own_from - place
                if not (moves or replication.keeps_copy(heat, self._copies(block), copy_heat)):
                    self._use(block, source)
                    continue
                index.add(block, local)
                if moves:
                    self.of_source[source].remove(block)
                    index.invalidate(block, source)
            elif self._replicates:
                self._heat.used(block, self._copies(block), now_s)
            self._use(block, local)
        self._evict(local)

    def _own_from(self, leaf: int, source: int, place: int) -> int | None:
        """Return the last use of a prompt's first block if nobody else used it since: that of the prompt before in the
        same session, which ended at most one block behind the leaf; None where another prompt was the last."""
        if source >= self._nodes:
            return None
        used = self.of_source[source].used(leaf)
        begun = self._begun[bisect_left(self._begun, used) - 1]
        return used + place if used - begun <= 2 else None

    def _copies(self, block: int) -> int:
        """Return how many instances hold a block in DRAM."""
        return (self.index.holders(block) & self._dram_mask).bit_count()

    def copy_heat(self, predicted: CostModel) -> float:
        """Return the heat that a copy takes."""
        load_s = BLOCK_TOKENS * predicted.kv_token_bytes / predicted.network_bytes_s
        return self._misses.copy_heat(load_s, self._events.now_s)

    def _use(self, block: int, source: int) -> None:
        self._uses += 1
        self.of_source[source].use(block, self._uses)

    # --- eviction ----------------------------------------------------------------------------------------
    def _evict(self, source: int) -> None:
        """Evict down to the capacity; what is the last copy goes where something older is, if routing pools caches."""
        if len(self.of_source[source]) <= self.of_source[source].capacity:
            return
        oldest = [self._oldest(n) for n in range(self._nodes)]
        oldest[source] = self._uses
        for block, used in self.of_source[source].evict():
            self.index.invalidate(block, source)
            if self.index.holders(block) & self._dram_mask:
                continue
            taker = None if self._keeps_copies else replication.taker(oldest, used)
            if taker is None:
                self._demote(block, source)
            else:
                self._hand_on(block, used, source, taker)
                oldest[taker] = self._oldest(taker)

    def _oldest(self, source: int) -> int:
        return NEVER if source in self._down else self.of_source[source].oldest()

    def _hand_on(self, block: int, used: int, source: int, taker: int) -> None:
        """Send an evicted block to another instance, which evicts an older one for it."""
        self._send(source)
        self.of_source[taker].take(block, used)
        self.index.add(block, taker)
        for other, _ in self.of_source[taker].evict():
            self.index.invalidate(other, taker)
            if not self.index.holders(other) & self._dram_mask:
                self._demote(other, taker)

    def _send(self, source: int) -> None:
        """Occupy a source with sending one block."""
        sender = self._sources[source]
        busy_s = sender.send_s(BLOCK_TOKENS * self._costs.kv_token_bytes)
        sender.free_at_s = max(sender.free_at_s, self._events.now_s) + busy_s

    def _demote(self, block: int, source: int, depth: int = 0) -> None:
        """Write a block that is in no DRAM any more to the lower tiers of a node, unless one has it."""
        if not self.index.holders(block):
            if depth < len(self._below):
                below = self._below[depth][source]
                self.of_source[below].use(block)
                self.index.add(block, below)
                for victim, _ in self.of_source[below].evict():
                    self.index.invalidate(victim, below)
                    self._demote(victim, source, depth + 1)
                return
            self._heat.remove(block)
            self._misses.evicted(block)

    # --- copies ------------------------------------------------------------------------------------------
    def sweep(self, predicted: CostModel, period_s: float) -> None:
        """Demote cold copies, and copy hot blocks where that is done ahead of demand."""
        if self._keeps_copies:
            return
        copy_heat = self.copy_heat(predicted)
        copied = [block for block in self._heat.blocks() if self._copies(block) > 1]
        orders = replication.replicate(map(self._heat_of, copied), (), copy_heat)
        for order in orders:
            if isinstance(order, replication.Demotion):
                self.thinned_blocks += 1
                self.of_source[order.source].cool(order.block)
        if self._replicates:
            self._copy_ahead(copy_heat, period_s)

    def _heat_of(self, block: int) -> replication.BlockHeat:
        return replication.BlockHeat(block, self._warm(block), self._heat.of(block, self._events.now_s))

    def _copy_ahead(self, copy_heat: float, period_s: float) -> None:
        """Copy blocks that were wanted since the last sweep, the hottest first, and of equals those before others."""
        now_s, sources = self._events.now_s, self._sources
        up = (node for node in range(self._nodes) if node not in self._down)
        targets = sorted(up, key=lambda node: max(sources[node].free_at_s, now_s))
        wanted = (
            self._heat_of(block)
            for block in reversed(list(self._heat.blocks()))
            if now_s - self._heat.touched_s(block) <= period_s
        )
        hottest = sorted(wanted, key=lambda block: -block.heat)
        orders = replication.replicate(hottest, targets, copy_heat)
        for transfer in replication.transfers(orders, self._most_copies(period_s)):
            for block in transfer.blocks:
                self._send(transfer.source)
                at_s = sources[transfer.source].free_at_s
                self._events.at(at_s, self._copied, block, transfer.source, transfer.target)

    def _warm(self, block: int) -> int:
        """Return the mask of the instances that hold a block in DRAM; without cooled ones where copies are ordered."""
        holders = self.index.holders(block) & self._dram_mask
        if not self._replicates:
            return holders
        warm = (n for n in range(self._nodes) if holders >> n & 1 and self.of_source[n].used(block))
        return sum(1 << n for n in warm)

    def _most_copies(self, period_s: float) -> int:
        """Return how many blocks a sweep may copy: COPY_SHARE of what one source sends in a period."""
        sent_s = BLOCK_TOKENS * self._costs.kv_token_bytes / self._costs.network_bytes_s
        return int(COPY_SHARE * period_s / sent_s)

    def _copied(self, block: int, source: int, target: int) -> None:
        """Insert a copy that has come, as old as the one that it was made of."""
        holders = self.index.holders(block)
        if target in self._down or not holders >> source & 1 or holders >> target & 1:
            return
        if self.index.producer(block) is not None:
            return
        self.copied_blocks += 1
        self.of_source[target].take(block, self.of_source[source].used(block))
        self.index.add(block, target)
        self._evict(target)

    # --- failures ----------------------------------------------------------------------------------------
    def fail(self, node: int) -> None:
        """Clear a node's DRAM, and take its lower tiers out of the index until it is back."""
        self._down.add(node)
        for source in (node, *self._own_tiers(node)):
            for block in self.of_source[source].blocks():
                self._invalidate(block, source)
        self.of_source[node] = BlockLru(self.of_source[node].capacity)

    def back(self, node: int) -> None:
        """Add what a node's lower tiers kept to the index."""
        self._down.discard(node)
        for below in self._own_tiers(node):
            for block in self.of_source[below].blocks():
                self.index.add(block, below)

    def _own_tiers(self, node: int) -> list[int]:
        return [below[node] for below in self._below if self._sources[below[node]].node == node]

    def cancel(self, blocks: tuple[int, ...], job: Job, loaded: set[int]) -> None:
        """Remove the blocks that a job will not make, and those that it does not load, by their places."""
        for place, block in enumerate(blocks):
            if self.index.producer(block) is job:
                for source, cache in enumerate(self.of_source):
                    if self.index.holders(block) >> source & 1:
                        cache.remove(block)
                        self._invalidate(block, source)
            elif place in loaded and self.index.holders(block) >> job.instance & 1:
                self.of_source[job.instance].remove(block)
                self._invalidate(block, job.instance)

    def _invalidate(self, block: int, source: int) -> None:
        self.index.invalidate(block, source)
        if not self.index.holders(block):
            self._heat.remove(block)
