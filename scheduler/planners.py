"""How each policy weighs the prefill instances for a prompt.

Responsibility: one planner per policy, from a `View` of the cluster to the candidates with their scores; the smallest
wins. Baselines are there to be compared with: random, round robin, least queued time, local, and Algorithm 1 of the
Mooncake paper (FAST'25, section 6.1).

Costs: instances x runs of the prefix; runs are few (a system prompt, what one turn after another left).

Concurrency: none. Nothing here changes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.cost import CostModel
from scheduler.decisions import Load, PrefillCandidate, Prompt
from scheduler.instances import Cluster
from scheduler.prefixes import Run
from scheduler.queues import Job

TRANSFER_THRESHOLD = 1.3
"""Algorithm 1 of the Mooncake paper: a remote prefix is worth a transfer when it is this much longer."""


COMPUTE_WEIGHT = 1.0
"""What a second of prefill costs those who come later. Without it an idle instance computes a shared prefix that is
just being made elsewhere: up to 2 % of the mean TTFT where system prompts are long and hot."""
LOAD_WEIGHT = 1.0
"""What a second of a source's time costs those who come later."""


class Step(NamedTuple):
    """A run with what fetching it would take, the same for every instance."""

    holders: int
    blocks: int
    first_block: int
    source: int
    wait_s: float
    """Until the source is free and the blocks are made."""
    load_s: float
    made_s: float
    producer: Job | None


@dataclass(frozen=True, slots=True)
class View:
    """All arguments of a decision, for the planners below."""

    prompt: Prompt
    steps: tuple[Step, ...]
    cluster: Cluster
    costs: CostModel
    now_s: float
    turn: int
    seed: int

    @property
    def instances(self) -> list[int]:
        return [n for n, instance in enumerate(self.cluster.prefill) if not instance.draining]


Planner = Callable[[View], list[PrefillCandidate]]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to weigh instances."""

    plan: Planner
    keeps_copies: bool
    """Whether an instance keeps every block that was loaded into it; else `replication` decides."""


def steps_of(prompt: Prompt, cluster: Cluster, costs: CostModel, now_s: float) -> tuple[Step, ...]:
    block_bytes = prompt.block_tokens * costs.kv_token_bytes
    steps: list[Step] = []
    first = 0
    for run in prompt.runs:
        made_s = max(run.producer.finish_s - now_s, 0.0) if run.producer is not None else 0.0
        source, wait_s, load_s = _best_source(run, cluster, block_bytes, now_s)
        steps.append(
            Step(run.holders, run.blocks, first, source, max(wait_s, made_s), load_s, made_s, run.producer)
        )
        first += run.blocks
    return tuple(steps)


def _best_source(run: Run, cluster: Cluster, block_bytes: int, now_s: float) -> tuple[int, float, float]:
    """Of the run's holders the one that would have sent it first: source, wait, time to send."""
    best = (-1, 0.0, 0.0)
    best_s = float("inf")
    holders = run.holders
    while holders:
        bit = holders & -holders
        holders ^= bit
        n = bit.bit_length() - 1
        source = cluster.sources[n]
        wait_s = max(source.free_at_s - now_s, 0.0)
        load_s = source.latency_s + run.blocks * block_bytes / source.bytes_s
        if wait_s + load_s < best_s:
            best, best_s = (n, wait_s, load_s), wait_s + load_s
    return best


# --- planners --------------------------------------------------------------------------------------------
def _place(view: View, n: int, prefill_s: float) -> tuple[float, float, int]:
    """Rank in the queue of instance n, time until its turn, jobs behind it."""
    instance = view.cluster.prefill[n]
    rank = instance.queue.discipline.rank(view.prompt.arrival_s, prefill_s)
    ahead_s, behind = instance.queue.ahead(rank)
    return rank, instance.busy_s(view.now_s) + ahead_s, behind


def _prefill_s(view: View, blocks: int) -> float:
    tokens = view.prompt.tokens
    return view.costs.prefill_s(tokens, min(blocks * view.prompt.block_tokens, tokens))


def _in_place(view: View, n: int) -> PrefillCandidate:
    """Use what the instance has from the first block on, and recompute the rest."""
    blocks, ready_s = 0, 0.0
    after: list[Job] = []
    for step in view.steps:
        if not step.holders >> n & 1:
            break
        blocks += step.blocks
        if step.producer is not None:
            after.append(step.producer)
            ready_s = max(ready_s, step.made_s)
    prefill_s = _prefill_s(view, blocks)
    rank, queue_s, _ = _place(view, n, prefill_s)
    score = max(queue_s, ready_s) + prefill_s
    return PrefillCandidate(n, queue_s, ready_s, prefill_s, blocks, (), tuple(after), rank, 0.0, score)


def _plan_local(view: View) -> list[PrefillCandidate]:
    """Cache-aware without transfers: the smallest TTFT with what each instance has."""
    return [_in_place(view, n) for n in view.instances]


def _plan_least_queued(view: View) -> list[PrefillCandidate]:
    found = [_in_place(view, n) for n in view.instances]
    return [candidate._replace(score=candidate.queue_s) for candidate in found]


def _plan_round_robin(view: View) -> list[PrefillCandidate]:
    count = len(view.cluster.prefill)
    return [_in_place(view, n)._replace(score=(n - view.turn) % count) for n in view.instances]


def _plan_random(view: View) -> list[PrefillCandidate]:
    return [_in_place(view, n)._replace(score=_draw(view.seed, view.turn, n)) for n in view.instances]


def _draw(seed: int, turn: int, n: int) -> float:
    """A number in [0, 1) that looks drawn: the finaliser of SplitMix64 over its arguments."""
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + turn * 0xD1B54A32D192ED03 + n * 0x8CB92BA72F3D8DD7) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & mask
    return (x ^ x >> 31) / 2**64


def _plan_algorithm_1(view: View) -> list[PrefillCandidate]:
    """Algorithm 1 of the Mooncake paper: the instance with the longest prefix sends it to those that have much less.

    The transfer follows the queue there; it is not overlapped with it.
    """
    found = [_in_place(view, n) for n in view.instances]
    held = [_leading_blocks(view.steps, n) for n in range(len(view.cluster.prefill))]
    most = max(held, default=0)
    holder = held.index(most) if most else -1
    for place, candidate in enumerate(found):
        if most > candidate.reused_blocks * TRANSFER_THRESHOLD:
            found[place] = _with_transfer(view, candidate, holder, most)
    return found


def _leading_blocks(steps: Sequence[Step], n: int) -> int:
    blocks = 0
    for step in steps:
        if not step.holders >> n & 1:
            break
        blocks += step.blocks
    return blocks


def _with_transfer(view: View, local: PrefillCandidate, holder: int, most: int) -> PrefillCandidate:
    source = view.cluster.sources[holder]
    blocks = most - local.reused_blocks
    size_bytes = blocks * view.prompt.block_tokens * view.costs.kv_token_bytes
    busy_s = source.latency_s + size_bytes / source.bytes_s
    made_s, after = 0.0, []
    for step in view.steps:
        if step.first_block < most and step.producer is not None:
            after.append(step.producer)
            made_s = max(made_s, step.made_s)
    prefill_s = _prefill_s(view, most)
    rank, queue_s, _ = _place(view, local.instance, prefill_s)
    ready_s = max(queue_s + max(source.free_at_s - view.now_s, 0.0), made_s) + busy_s
    load = Load(holder, local.reused_blocks, blocks, size_bytes, busy_s)
    return PrefillCandidate(
        local.instance,
        queue_s,
        ready_s,
        prefill_s,
        most,
        (load,),
        tuple(after),
        rank,
        0.0,
        ready_s + prefill_s,
    )


def _plan_pooled(view: View) -> list[PrefillCandidate]:
    """The default: the caches of all instances as one pool; what is ready first for each range of blocks.

    The score is the request's TTFT and what it costs the others: the waiting of the jobs behind it, the time of the
    instance, and that of the sources that it loads from.
    """
    return [_best_cut(view, n) for n in view.instances]


class _Cut(NamedTuple):
    """A place up to which the prefix is reused."""

    blocks: int
    ready_s: float
    loads: tuple[Load, ...]
    load_s: float
    after: tuple[Job, ...]


def _best_cut(view: View, n: int) -> PrefillCandidate:
    """The candidate of the cut with the smallest score; of equals the one that reuses most."""
    prompt, costs, instance = view.prompt, view.costs, view.cluster.prefill[n]
    queue, busy_s = instance.queue, instance.busy_s(view.now_s)
    best: tuple[_Cut, float, float, float, float] | None = None
    best_score = float("inf")
    for cut in _cuts(view, n, busy_s):
        prefill_s = costs.prefill_s(prompt.tokens, min(cut.blocks * prompt.block_tokens, prompt.tokens))
        rank = queue.discipline.rank(prompt.arrival_s, prefill_s)
        ahead_s, behind = queue.ahead(rank)
        queue_s, delay_s = busy_s + ahead_s, behind * prefill_s
        start_s = queue_s if queue_s > cut.ready_s else cut.ready_s
        score = start_s + prefill_s + delay_s + COMPUTE_WEIGHT * prefill_s + LOAD_WEIGHT * cut.load_s
        if score <= best_score:
            best, best_score = (cut, queue_s, prefill_s, rank, delay_s), score
    assert best is not None
    cut, queue_s, prefill_s, rank, delay_s = best
    return PrefillCandidate(
        n, queue_s, cut.ready_s, prefill_s, cut.blocks, cut.loads, cut.after, rank, delay_s, best_score
    )


def _cuts(view: View, n: int, busy_s: float) -> list[_Cut]:
    """Where reuse may end.

    Loading costs a source's rate, recomputing grows with the place in the prompt, and blocks that come while the
    queue lasts are free. So the best cut is an end of a run, or inside a run that is loaded the last block that
    comes before the instance is free.
    """
    cut = _Cut(0, 0.0, (), 0.0, ())
    cuts = [cut]
    for step in view.steps:
        ready_s, after, loads, load_s = cut.ready_s, cut.after, cut.loads, cut.load_s
        if step.producer is not None:
            after = (*after, step.producer)
            ready_s = max(ready_s, step.made_s)
        if not step.holders >> n & 1:
            begin_s = step.wait_s + sum(load.busy_s for load in loads if load.source == step.source)
            blocks = _blocks_in_time(view, n, step, begin_s, busy_s)
            if blocks:
                part_s = step.load_s * blocks / step.blocks
                part = (*loads, _load(view, step, blocks, part_s))
                part_ready_s = max(ready_s, begin_s + part_s)
                cuts.append(_Cut(step.first_block + blocks, part_ready_s, part, load_s + part_s, after))
            loads = (*loads, _load(view, step, step.blocks, step.load_s))
            load_s += step.load_s
            ready_s = max(ready_s, begin_s + step.load_s)
        cut = _Cut(step.first_block + step.blocks, ready_s, loads, load_s, after)
        cuts.append(cut)
    return cuts


def _blocks_in_time(view: View, n: int, step: Step, begin_s: float, busy_s: float) -> int:
    """Blocks of the step that come before the instance is free; 0 where that is all or none."""
    queue_s = busy_s + view.cluster.prefill[n].queue.total_s
    if begin_s >= queue_s or begin_s + step.load_s <= queue_s:
        return 0
    return int((queue_s - begin_s) / step.load_s * step.blocks)


def _load(view: View, step: Step, blocks: int, busy_s: float) -> Load:
    size_bytes = blocks * view.prompt.block_tokens * view.costs.kv_token_bytes
    return Load(step.source, step.first_block, blocks, size_bytes, busy_s)


POLICIES = {
    "default": Policy(_plan_pooled, keeps_copies=False),
    "kvcache-centric": Policy(_plan_algorithm_1, keeps_copies=True),
    "local": Policy(_plan_local, keeps_copies=True),
    "least-queued": Policy(_plan_least_queued, keeps_copies=True),
    "round-robin": Policy(_plan_round_robin, keeps_copies=True),
    "random": Policy(_plan_random, keeps_copies=True),
}
