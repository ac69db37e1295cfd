"""How each policy weighs the prefill instances for a prompt.

Responsibility: one planner per policy, from a `View` of the cluster to the candidates with their scores; the smallest
wins. Baselines are there to be compared with: random, round robin, least queued time, longest prefix, local, and
Algorithm 1 of the Mooncake paper (FAST'25, section 6.1).

Costs: instances x runs of the prefix; runs are few (a system prompt, what one turn after another left).

Concurrency: none. Nothing here changes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.routing.cluster import Cluster
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Load, PrefillCandidate, Prompt
from scheduler.routing.prefix_index import Run
from scheduler.routing.queues import Job, start_s, wait_added_s

TRANSFER_THRESHOLD = 1.3
"""In algorithm 1 of the Mooncake paper, a remote prefix is worth a transfer when it is this many times as long."""


COMPUTE_WEIGHT = 1.0
"""The cost of a second of prefill to later requests. Without it an idle instance computes a shared prefix that is just
being made elsewhere: up to 2 % of the mean TTFT where system prompts are long and hot."""
LOAD_WEIGHT = 1.0
"""The cost of a second of a source's time to later requests."""


def cost_to_all(time_s: float, compute_s: float, load_s: float) -> float:
    """Return the score of a prompt: its own time with what it delays, and what it takes of instances and sources."""
    return time_s + COMPUTE_WEIGHT * compute_s + LOAD_WEIGHT * load_s


class Step(NamedTuple):
    """A run of blocks and the time to fetch it, the same for every instance."""

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
        """Return the numbers of the instances that take work."""
        return [n for n, instance in enumerate(self.cluster.prefill) if not instance.draining]


Planner = Callable[[View], list[PrefillCandidate]]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to weigh instances."""

    plan: Planner
    keeps_copies: bool
    """Whether an instance keeps every block that was loaded into it; else `replication` decides."""


def steps_of(prompt: Prompt, cluster: Cluster, costs: CostModel, now_s: float) -> tuple[Step, ...]:
    """Return the runs of a prompt's blocks, each with its best source, and when it is there from that."""
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
    """Return the holder that would have sent a run first, its wait, and its time to send."""
    best = (-1, 0.0, 0.0)
    best_s = float("inf")
    holders = run.holders
    while holders:
        bit = holders & -holders
        holders ^= bit
        n = bit.bit_length() - 1
        source = cluster.sources[n]
        wait_s = max(source.free_at_s - now_s, 0.0)
        load_s = source.send_s(run.blocks * block_bytes)
        if wait_s + load_s < best_s:
            best, best_s = (n, wait_s, load_s), wait_s + load_s
    return best


# --- planners --------------------------------------------------------------------------------------------
def _place(view: View, n: int, prefill_s: float, ready_s: float) -> tuple[float, int, float]:
    """Return the rank in the queue of instance n, the place, and the time until the prompt would start."""
    instance = view.cluster.prefill[n]
    rank = instance.queue.discipline.rank(view.prompt.arrival_s, prefill_s)
    openings = instance.queue.openings(instance.free_s(view.now_s))
    place = instance.queue.place(rank, prefill_s, view.now_s + ready_s, openings)
    return rank, place, start_s(openings[place], prefill_s, view.now_s + ready_s) - view.now_s


def _prefill_s(view: View, blocks: int) -> float:
    tokens = view.prompt.tokens
    return view.costs.prefill_s(tokens, min(blocks * view.prompt.block_tokens, tokens))


def _in_place(view: View, n: int) -> PrefillCandidate:
    """Plan to use the instance's own blocks from the first on, and to recompute the rest."""
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
    rank, _, queue_s = _place(view, n, prefill_s, ready_s)
    score = max(queue_s, ready_s) + prefill_s
    return PrefillCandidate(n, queue_s, ready_s, prefill_s, blocks, (), tuple(after), rank, 0.0, score)


def _plan_local(view: View) -> list[PrefillCandidate]:
    """Plan without transfers: the smallest TTFT with what each instance has."""
    return [_in_place(view, n) for n in view.instances]


def _plan_least_queued(view: View) -> list[PrefillCandidate]:
    found = [_in_place(view, n) for n in view.instances]
    return [candidate._replace(score=candidate.queue_s) for candidate in found]


def _plan_longest_prefix(view: View) -> list[PrefillCandidate]:
    """Plan to stay where the longest prefix is in place, however long its queue; of equals where that is shortest: any
    wait counts less than a block."""
    found = [_in_place(view, n) for n in view.instances]
    return [
        candidate._replace(score=candidate.queue_s / (1 + candidate.queue_s) - candidate.reused_blocks)
        for candidate in found
    ]


def _plan_round_robin(view: View) -> list[PrefillCandidate]:
    count = len(view.cluster.prefill)
    return [_in_place(view, n)._replace(score=(n - view.turn) % count) for n in view.instances]


def _plan_random(view: View) -> list[PrefillCandidate]:
    return [_in_place(view, n)._replace(score=_draw(view.seed, view.turn, n)) for n in view.instances]


def _draw(seed: int, turn: int, n: int) -> float:
    """Return a number in [0, 1) that looks drawn: the finaliser of SplitMix64 over its arguments."""
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + turn * 0xD1B54A32D192ED03 + n * 0x8CB92BA72F3D8DD7) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & mask
    return (x ^ x >> 31) / 2**64


def _plan_algorithm_1(view: View) -> list[PrefillCandidate]:
    """Plan by algorithm 1 of the Mooncake paper: the instance with the longest prefix sends it to those with much less.

    The transfer follows the work in the queue; it is not overlapped with it.
    """
    candidates = [_in_place(view, n) for n in range(len(view.cluster.prefill))]
    found = [candidates[n] for n in view.instances]
    held = [candidate.reused_blocks for candidate in candidates]
    most = max(held, default=0)
    holder = held.index(most) if most else -1
    for place, candidate in enumerate(found):
        if most > candidate.reused_blocks * TRANSFER_THRESHOLD:
            found[place] = _with_transfer(view, candidate, holder, most)
    return found


def _with_transfer(view: View, local: PrefillCandidate, holder: int, most: int) -> PrefillCandidate:
    source = view.cluster.sources[holder]
    blocks = most - local.reused_blocks
    size_bytes = blocks * view.prompt.block_tokens * view.costs.kv_token_bytes
    busy_s = source.send_s(size_bytes)
    made_s, after = 0.0, []
    for step in view.steps:
        if step.first_block < most and step.producer is not None:
            after.append(step.producer)
            made_s = max(made_s, step.made_s)
    prefill_s = _prefill_s(view, most)
    wait_s = max(source.free_at_s - view.now_s, 0.0)
    rank, place, queue_s = _place(view, local.instance, prefill_s, made_s)
    instance = view.cluster.prefill[local.instance]
    begin_s = instance.free_s(view.now_s) - view.now_s + instance.queue.service_s(place)
    ready_s = max(begin_s + wait_s, made_s) + busy_s
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
        max(queue_s, ready_s) + prefill_s,
    )


def _plan_pooled(view: View) -> list[PrefillCandidate]:
    """Plan with the caches of all instances as one pool, the default: each range of blocks goes the fastest way.

    The score is the request's TTFT and its cost to others: the waiting of the jobs behind it, the time of the instance,
    and that of the sources that it loads from.
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
    """Return the candidate of the cut with the smallest score; of equals the one that reuses most."""
    prompt, costs, instance = view.prompt, view.costs, view.cluster.prefill[n]
    queue = instance.queue
    now_s, openings = view.now_s, queue.openings(instance.free_s(view.now_s))
    best: tuple[_Cut, float, float, float, float] | None = None
    best_score = float("inf")
    for cut in _cuts(view, n, openings[-1][0] - now_s):
        prefill_s = costs.prefill_s(prompt.tokens, min(cut.blocks * prompt.block_tokens, prompt.tokens))
        rank = queue.discipline.rank(prompt.arrival_s, prefill_s)
        place = queue.place(rank, prefill_s, now_s + cut.ready_s, openings)
        queue_s = start_s(openings[place], prefill_s, now_s + cut.ready_s) - now_s
        begin_s = queue_s if queue_s > cut.ready_s else cut.ready_s
        delay_s = wait_added_s(openings, place, prefill_s, now_s + cut.ready_s)
        score = cost_to_all(begin_s + prefill_s + delay_s, prefill_s, cut.load_s)
        if score <= best_score:
            best, best_score = (cut, queue_s, prefill_s, rank, delay_s), score
    assert best is not None
    cut, queue_s, prefill_s, rank, delay_s = best
    return PrefillCandidate(
        n, queue_s, cut.ready_s, prefill_s, cut.blocks, cut.loads, cut.after, rank, delay_s, best_score
    )


def _cuts(view: View, n: int, free_s: float) -> list[_Cut]:
    """Return the places at which reuse may end; the instance is free at `free_s`.

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
            begin_s = step.wait_s + _busy_s(loads, step.source)
            blocks = _blocks_in_time(step, begin_s, free_s)
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


def _busy_s(loads: tuple[Load, ...], source: int) -> float:
    """Return how long the loads occupy a source; added one by one, as natively: sum() rounds otherwise from 3.12 on."""
    busy_s = 0.0
    for load in loads:
        if load.source == source:
            busy_s += load.busy_s
    return busy_s


def _blocks_in_time(step: Step, begin_s: float, free_s: float) -> int:
    """Return how many blocks of the step come before the instance is free; 0 where all or none do."""
    if begin_s >= free_s or begin_s + step.load_s <= free_s:
        return 0
    return int((free_s - begin_s) / step.load_s * step.blocks)


def _load(view: View, step: Step, blocks: int, busy_s: float) -> Load:
    size_bytes = blocks * view.prompt.block_tokens * view.costs.kv_token_bytes
    return Load(step.source, step.first_block, blocks, size_bytes, busy_s)


POLICIES = {
    "default": Policy(_plan_pooled, keeps_copies=False),
    "kvcache-centric": Policy(_plan_algorithm_1, keeps_copies=True),
    "local": Policy(_plan_local, keeps_copies=True),
    "longest-prefix": Policy(_plan_longest_prefix, keeps_copies=True),
    "least-queued": Policy(_plan_least_queued, keeps_copies=True),
    "round-robin": Policy(_plan_round_robin, keeps_copies=True),
    "random": Policy(_plan_random, keeps_copies=True),
}
