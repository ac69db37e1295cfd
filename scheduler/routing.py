"""Which instance prefills a prompt, which decodes it, and where each range of its blocks comes from.

Responsibility: `route`, a pure function of the prompt, the cluster's state, the cost model and the clock. It
weighs every instance that takes work and returns all of them with their predicted figures, so that a decision
explains itself: the choice is the considered candidate of the smallest score, the first of equals.

Predicted TTFT of an instance: its queue, or the time until the blocks that it does not have are there if that is
later, and then the prefill of the tokens that are not reused. Ranges of the prompt go the way that is ready
first: used in place, loaded from another source, or recomputed.

Policies differ in how they plan and score (`POLICIES`); baselines are there to be compared with.

Costs: instances x runs of the prefix; runs are few (a system prompt, what one turn after another left).

Concurrency: none. Nothing here changes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvfs.errors import InvalidRequest
from scheduler.cost import CostModel
from scheduler.instances import Cluster, DecodeInstance
from scheduler.prefixes import Run
from scheduler.queues import Job

TRANSFER_THRESHOLD = 1.3
"""Algorithm 1 of the Mooncake paper: a remote prefix is worth a transfer when it is this much longer."""


class Prompt(NamedTuple):
    """What is to be routed."""

    arrival_s: float
    tokens: int
    runs: tuple[Run, ...]
    """Its longest prefix that the cluster holds (PrefixIndex.runs)."""
    block_tokens: int


class Load(NamedTuple):
    """A range of blocks that a source sends to the instance."""

    source: int
    first_block: int
    blocks: int
    size_bytes: int
    busy_s: float
    """How long it occupies the source."""


class PrefillCandidate(NamedTuple):
    """One instance, as predicted. Times count from the decision."""

    instance: int
    queue_s: float
    """Until it could start."""
    ready_s: float
    """Until all reused blocks are there."""
    prefill_s: float
    reused_blocks: int
    loads: tuple[Load, ...]
    after: tuple[Job, ...]
    """Prefills whose blocks it reuses."""
    rank: float
    """Its place in the instance's queue."""
    delay_s: float
    """Waiting that it adds to the jobs behind it, summed over them."""
    score: float

    @property
    def ttft_s(self) -> float:
        return max(self.queue_s, self.ready_s) + self.prefill_s

    @property
    def load_s(self) -> float:
        """Time of sources that it takes."""
        return sum(load.busy_s for load in self.loads)


class DecodeCandidate(NamedTuple):
    """One decode instance, as predicted once the request is in its batch."""

    instance: int
    tbt_now_s: float
    """With the batch of this moment."""
    tbt_s: float
    """With everything that is committed to it as well."""
    context_tokens: int
    """Of the batch, the committed and the request itself."""

    @property
    def score(self) -> float:
        return self.tbt_s


class Action(Enum):
    USE = "use"
    LOAD = "load"
    RECOMPUTE = "recompute"


class Range(NamedTuple):
    """A range of blocks and how the instance comes by it."""

    first_block: int
    blocks: int
    action: Action
    source: int | None


class Decision(NamedTuple):
    """Where a prompt goes, and everything that was weighed."""

    policy: str
    waited_s: float
    """Between arrival and decision."""
    prefill: PrefillCandidate | None
    """None when no instance takes work."""
    decode: DecodeCandidate | None
    considered: tuple[PrefillCandidate, ...]
    considered_decode: tuple[DecodeCandidate, ...]

    @property
    def ttft_s(self) -> float:
        """Predicted, from the arrival on; infinite without an instance."""
        return self.waited_s + self.prefill.ttft_s if self.prefill is not None else float("inf")

    def ranges(self, blocks: int) -> tuple[Range, ...]:
        """How each range of a prompt of so many blocks is come by, in order."""
        if self.prefill is None:
            return ()
        found: list[Range] = []
        place = 0
        for load in self.prefill.loads:
            if load.first_block > place:
                found.append(Range(place, load.first_block - place, Action.USE, self.prefill.instance))
            found.append(Range(load.first_block, load.blocks, Action.LOAD, load.source))
            place = load.first_block + load.blocks
        if self.prefill.reused_blocks > place:
            found.append(Range(place, self.prefill.reused_blocks - place, Action.USE, self.prefill.instance))
        if blocks > self.prefill.reused_blocks:
            reused = self.prefill.reused_blocks
            found.append(Range(reused, blocks - reused, Action.RECOMPUTE, None))
        return tuple(found)


class _Step(NamedTuple):
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
class _View:
    """All arguments of a decision, for the planners below."""

    prompt: Prompt
    steps: tuple[_Step, ...]
    cluster: Cluster
    costs: CostModel
    now_s: float
    turn: int
    seed: int

    @property
    def instances(self) -> list[int]:
        return [n for n, instance in enumerate(self.cluster.prefill) if not instance.draining]


Planner = Callable[[_View], list[PrefillCandidate]]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to weigh instances."""

    plan: Planner
    keeps_copies: bool
    """Whether an instance keeps every block that was loaded into it; else `replication` decides."""


def route(
    prompt: Prompt,
    cluster: Cluster,
    costs: CostModel,
    now_s: float,
    *,
    policy: str = "default",
    turn: int = 0,
    seed: int = 0,
) -> Decision:
    """Weigh every instance that takes work and choose; changes nothing.

    `turn` counts decisions: round robin and random take their place from it and from `seed`.
    Raises InvalidRequest for a policy that is not in POLICIES.
    """
    try:
        chosen = POLICIES[policy]
    except KeyError:
        raise InvalidRequest(f"policy {policy!r}: there are {', '.join(POLICIES)}") from None
    view = _View(prompt, _steps(prompt, cluster, costs, now_s), cluster, costs, now_s, turn, seed)
    considered = tuple(chosen.plan(view))
    decodes = tuple(
        _decode_candidate(n, instance, prompt.tokens, costs)
        for n, instance in enumerate(cluster.decode)
        if not instance.draining
    )
    return Decision(
        policy,
        now_s - prompt.arrival_s,
        _smallest(considered),
        _smallest_decode(decodes),
        considered,
        decodes,
    )


def _smallest(candidates: Sequence[PrefillCandidate]) -> PrefillCandidate | None:
    return min(candidates, key=lambda candidate: candidate.score) if candidates else None


def _smallest_decode(candidates: Sequence[DecodeCandidate]) -> DecodeCandidate | None:
    return min(candidates, key=lambda candidate: candidate.tbt_s) if candidates else None


def _decode_candidate(n: int, instance: DecodeInstance, tokens: int, costs: CostModel) -> DecodeCandidate:
    context = instance.active_tokens + tokens
    everything = context + instance.committed_tokens
    requests = instance.active_requests + 1
    return DecodeCandidate(
        n,
        costs.step_s(context, requests),
        costs.step_s(everything, requests + instance.committed_requests),
        everything,
    )


# --- what the cluster holds ------------------------------------------------------------------------------
def _steps(prompt: Prompt, cluster: Cluster, costs: CostModel, now_s: float) -> tuple[_Step, ...]:
    block_bytes = prompt.block_tokens * costs.kv_token_bytes
    steps: list[_Step] = []
    first = 0
    for run in prompt.runs:
        made_s = max(run.producer.finish_s - now_s, 0.0) if run.producer is not None else 0.0
        source, wait_s, load_s = _best_source(run, cluster, block_bytes, now_s)
        steps.append(
            _Step(run.holders, run.blocks, first, source, max(wait_s, made_s), load_s, made_s, run.producer)
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
def _place(view: _View, n: int, prefill_s: float) -> tuple[float, float, int]:
    """Rank in the queue of instance n, time until its turn, jobs behind it."""
    instance = view.cluster.prefill[n]
    rank = instance.queue.discipline.rank(view.prompt.arrival_s, prefill_s)
    ahead_s, behind = instance.queue.ahead(rank)
    return rank, instance.busy_s(view.now_s) + ahead_s, behind


def _prefill_s(view: _View, blocks: int) -> float:
    tokens = view.prompt.tokens
    return view.costs.prefill_s(tokens, min(blocks * view.prompt.block_tokens, tokens))


def _in_place(view: _View, n: int) -> PrefillCandidate:
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


def _plan_local(view: _View) -> list[PrefillCandidate]:
    """Cache-aware without transfers: the smallest TTFT with what each instance has."""
    return [_in_place(view, n) for n in view.instances]


def _plan_least_queued(view: _View) -> list[PrefillCandidate]:
    found = [_in_place(view, n) for n in view.instances]
    return [candidate._replace(score=candidate.queue_s) for candidate in found]


def _plan_round_robin(view: _View) -> list[PrefillCandidate]:
    count = len(view.cluster.prefill)
    return [_in_place(view, n)._replace(score=(n - view.turn) % count) for n in view.instances]


def _plan_random(view: _View) -> list[PrefillCandidate]:
    return [_in_place(view, n)._replace(score=_draw(view.seed, view.turn, n)) for n in view.instances]


def _draw(seed: int, turn: int, n: int) -> float:
    """A number in [0, 1) that looks drawn: the finaliser of SplitMix64 over its arguments."""
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + turn * 0xD1B54A32D192ED03 + n * 0x8CB92BA72F3D8DD7) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & mask
    return (x ^ x >> 31) / 2**64


def _plan_algorithm_1(view: _View) -> list[PrefillCandidate]:
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


def _leading_blocks(steps: Sequence[_Step], n: int) -> int:
    blocks = 0
    for step in steps:
        if not step.holders >> n & 1:
            break
        blocks += step.blocks
    return blocks


def _with_transfer(view: _View, local: PrefillCandidate, holder: int, most: int) -> PrefillCandidate:
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


def _plan_pooled(view: _View) -> list[PrefillCandidate]:
    """The default: the caches of all instances as one pool; what is ready first for each range of blocks.

    The score is the request's TTFT and what it costs the others: the waiting of the jobs behind it, and the time
    of the sources that it loads from.
    """
    return [_best_cut(view, n) for n in view.instances]


def _best_cut(view: _View, n: int) -> PrefillCandidate:
    """Reuse the prefix up to where the score is smallest, and recompute the rest.

    Loading costs a source's rate, recomputing grows with the place in the prompt, and blocks that come while the
    queue lasts are free. So the best cut is an end of a run, or inside a run that is loaded the last block that
    comes before the instance is free.
    """
    best = _cut(view, n, 0, 0.0, (), ())
    loads: tuple[Load, ...] = ()
    after: tuple[Job, ...] = ()
    ready_s, blocks = 0.0, 0
    for step in view.steps:
        if step.producer is not None:
            after = (*after, step.producer)
            ready_s = max(ready_s, step.made_s)
        if not step.holders >> n & 1:
            begin_s = step.wait_s + sum(load.busy_s for load in loads if load.source == step.source)
            part = _partly(view, n, step, begin_s, ready_s, loads, after)
            if part is not None and part.score <= best.score:
                best = part
            loads = (*loads, _load(view, step, step.blocks, step.load_s))
            ready_s = max(ready_s, begin_s + step.load_s)
        blocks += step.blocks
        cut = _cut(view, n, blocks, ready_s, loads, after)
        if cut.score <= best.score:
            best = cut
    return best


def _partly(
    view: _View,
    n: int,
    step: _Step,
    begin_s: float,
    ready_s: float,
    loads: tuple[Load, ...],
    after: tuple[Job, ...],
) -> PrefillCandidate | None:
    """The step's blocks that come before the instance is free, where that is some and not all."""
    queue_s = _place(view, n, _prefill_s(view, step.first_block))[1]
    if begin_s >= queue_s or begin_s + step.load_s <= queue_s:
        return None
    blocks = int((queue_s - begin_s) / step.load_s * step.blocks)
    if not blocks:
        return None
    busy_s = step.load_s * blocks / step.blocks
    loads = (*loads, _load(view, step, blocks, busy_s))
    return _cut(view, n, step.first_block + blocks, max(ready_s, begin_s + busy_s), loads, after)


def _load(view: _View, step: _Step, blocks: int, busy_s: float) -> Load:
    size_bytes = blocks * view.prompt.block_tokens * view.costs.kv_token_bytes
    return Load(step.source, step.first_block, blocks, size_bytes, busy_s)


def _cut(
    view: _View, n: int, blocks: int, ready_s: float, loads: tuple[Load, ...], after: tuple[Job, ...]
) -> PrefillCandidate:
    prefill_s = _prefill_s(view, blocks)
    rank, queue_s, behind = _place(view, n, prefill_s)
    delay_s = behind * prefill_s
    score = (queue_s if queue_s > ready_s else ready_s) + prefill_s + delay_s
    for load in loads:
        score += load.busy_s
    return PrefillCandidate(n, queue_s, ready_s, prefill_s, blocks, loads, after, rank, delay_s, score)


POLICIES = {
    "default": Policy(_plan_pooled, keeps_copies=False),
    "kvcache-centric": Policy(_plan_algorithm_1, keeps_copies=True),
    "local": Policy(_plan_local, keeps_copies=True),
    "least-queued": Policy(_plan_least_queued, keeps_copies=True),
    "round-robin": Policy(_plan_round_robin, keeps_copies=True),
    "random": Policy(_plan_random, keeps_copies=True),
}
