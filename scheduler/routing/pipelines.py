"""Long prompts on several instances: in a chunked pipeline, or one after the other.

Responsibility: pure plans. In a *group* of X instances each computes a share of the layers, of one chunk of the prompt
after the other, and hands the chunk on: stage s ends chunk c at max(its last end, that of stage s - 1 for c) + t/X
(chunked pipeline parallelism, section 4 of the Mooncake paper). In a *relay* the first blocks are made on one instance,
in a gap before a job that waits for its own blocks, and the rest on another one, which loads them: a prompt moves at a
block boundary. What a block needs is all of those before it, so a relay is never faster than an instance that is free.

Both are taken where they pay: where a single instance would be late and they would not, or by the score of the default
policy, which counts what a request costs the others.

Concurrency: none. Nothing here changes what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scheduler.routing.cluster import Cluster
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, Load, PrefillCandidate, Prompt
from scheduler.routing.policies import cost_to_all
from scheduler.routing.queues import INFINITY

CHUNK_TOKENS = 2_048
"""What a stage hands on at once: 128k tokens take 8.2 s on four instances, in chunks of 12k 10.7 s."""
LEAST_GROUP_S = 2.0
"""Prefills below this are not spread: filling a pipeline costs a chunk for each stage."""
LEAST_PIECE_BLOCKS = 8
"""The fewest blocks that are worth a piece of their own: a prefill has a fixed cost."""


class Stage(NamedTuple):
    """One instance of a group, which computes layers from `first_share` to `last_share` of the model."""

    candidate: PrefillCandidate
    first_share: float
    last_share: float
    ends_s: tuple[float, ...]
    """When it hands on each chunk, as predicted, from the decision on."""


class Group(NamedTuple):
    """A prompt in a pipeline."""

    stages: tuple[Stage, ...]
    chunks_s: tuple[float, ...]
    """What each chunk takes on a single instance."""
    ttft_s: float
    score: float


class Relay(NamedTuple):
    """A prompt whose first blocks one instance makes, and the rest another, which loads them."""

    first: PrefillCandidate
    blocks: int
    """How many blocks of the prompt the first one hands over."""
    rest: PrefillCandidate


# --- groups ----------------------------------------------------------------------------------------------
def chunks_s(
    costs: CostModel, tokens: int, cached: int, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[float, ...]:
    """Return what each chunk of a prompt takes on one instance, in all as long as the whole prompt."""
    begins = range(cached, tokens, chunk_tokens)
    chunks = [costs.compute_s(min(begin + chunk_tokens, tokens), begin) for begin in begins] or [0.0]
    chunks[0] += costs.prefill_fixed_s
    return tuple(chunks)


def stage_ends_s(
    chunks: Sequence[float], stages: int, start_s: float, before: Sequence[float] | None
) -> tuple[float, ...]:
    """Return when a stage of so many ends each chunk; `before`: when the stage ahead does, None for the first one."""
    ends, end_s = [], start_s
    for n, chunk_s in enumerate(chunks):
        end_s = (end_s if before is None else max(end_s, before[n])) + chunk_s / stages
        ends.append(end_s)
    return tuple(ends)


def plan_group(
    decision: Decision,
    prompt: Prompt,
    cluster: Cluster,
    costs: CostModel,
    now_s: float,
    *,
    most: int,
    ttft_slo_s: float = INFINITY,
) -> Group | None:
    """Return the best group of 2, 4, 8 and so on up to `most` instances for a prompt, if it pays; else None."""
    single = decision.prefill
    if single is None or single.prefill_s < LEAST_GROUP_S:
        return None
    chunks = chunks_s(costs, prompt.tokens, min(single.reused_blocks * prompt.block_tokens, prompt.tokens))
    free = sorted(_free(decision, cluster, now_s))
    groups = [
        _group(decision, prompt, cluster, costs, now_s, chunks, free[:count])
        for count in (1 << n for n in range(1, most.bit_length()))
        if count <= min(most, len(free))
    ]
    found = min(groups, key=lambda group: group.score, default=None)
    if found is None or not _pays(found.score, found.ttft_s, single, decision.waited_s, ttft_slo_s):
        return None
    return found


def _free(decision: Decision, cluster: Cluster, now_s: float) -> Iterator[tuple[float, int]]:
    """Yield when each instance is free that takes work and has no queue, from now.

    A stage that waits for another one holds its instance, so none goes behind a queue whose order may change.
    """
    for candidate in decision.considered:
        instance = cluster.prefill[candidate.instance]
        if not len(instance.queue):
            yield instance.free_s(now_s) - now_s, candidate.instance


def _group(
    decision: Decision,
    prompt: Prompt,
    cluster: Cluster,
    costs: CostModel,
    now_s: float,
    chunks: tuple[float, ...],
    free: list[tuple[float, int]],
) -> Group:
    """Return the group of the instances `free`, which are in order of the time at which they are."""
    assert decision.prefill is not None
    loads, ready_s = _group_loads(decision, prompt, cluster, costs, now_s, free[-1][1])
    stages: list[Stage] = []
    before: tuple[float, ...] | None = None
    for place, (free_s, n) in enumerate(free):
        start_s = max(free_s, ready_s, before[0] if before is not None else 0.0)
        before = stage_ends_s(chunks, len(free), start_s, before)
        candidate = decision.prefill._replace(
            instance=n,
            queue_s=start_s,
            ready_s=ready_s,
            prefill_s=before[-1] - start_s,
            loads=loads if place == len(free) - 1 else (),
            rank=-INFINITY,
            delay_s=0.0,
        )
        stages.append(Stage(candidate, place / len(free), (place + 1) / len(free), before))
    assert before is not None
    busy = sum(stage.candidate.prefill_s for stage in stages)
    load_s = sum(load.busy_s for load in loads)
    return Group(tuple(stages), chunks, before[-1], cost_to_all(before[-1], busy, load_s))


def _group_loads(
    decision: Decision, prompt: Prompt, cluster: Cluster, costs: CostModel, now_s: float, last: int
) -> tuple[tuple[Load, ...], float]:
    """Return what the last stage's instance loads of what the single one reuses, and when all of it is there. The other
    stages load their layers of it in that time."""
    single = decision.prefill
    assert single is not None
    loads: list[Load] = []
    ready_s = single.ready_s
    for piece in decision.ranges(single.reused_blocks):
        if piece.source is None or piece.source == last:
            continue
        source = cluster.sources[piece.source]
        size_bytes = piece.blocks * prompt.block_tokens * costs.kv_token_bytes
        busy_s = source.send_s(size_bytes)
        loads.append(Load(piece.source, piece.first_block, piece.blocks, size_bytes, busy_s))
        ready_s = max(ready_s, max(source.free_at_s - now_s, 0.0) + busy_s)
    return tuple(loads), ready_s


def _pays(score: float, ttft_s: float, single: PrefillCandidate, waited_s: float, ttft_slo_s: float) -> bool:
    late, still_late = (waited_s + each_s > ttft_slo_s for each_s in (single.ttft_s, ttft_s))
    if late is not still_late:
        return late
    load_s = sum(load.busy_s for load in single.loads)
    return score < cost_to_all(single.ttft_s + single.delay_s, single.prefill_s, load_s)


# --- relays ----------------------------------------------------------------------------------------------
def plan_relay(
    decision: Decision,
    prompt: Prompt,
    cluster: Cluster,
    costs: CostModel,
    now_s: float,
    *,
    ttft_slo_s: float = INFINITY,
) -> Relay | None:
    """Return the fastest relay over two instances for a prompt, if it pays; else None."""
    single = decision.prefill
    if single is None:
        return None
    relays = (
        relay
        for first in decision.considered
        for piece in (_piece(first, prompt, cluster, costs, now_s),)
        if piece is not None
        for rest in decision.considered
        if rest.instance != first.instance
        for relay in (_relay(*piece, rest, prompt, cluster, costs, now_s),)
    )
    found = min(relays, key=lambda relay: relay.rest.ttft_s, default=None)
    if found is None or found.rest.ttft_s >= single.ttft_s:
        return None
    pays = _pays(found.rest.score, found.rest.ttft_s, single, decision.waited_s, ttft_slo_s)
    return found if pays else None


def _piece(
    first: PrefillCandidate, prompt: Prompt, cluster: Cluster, costs: CostModel, now_s: float
) -> tuple[PrefillCandidate, int] | None:
    """Return what an instance can make of a prompt before a job of its queue has its blocks; None for too little."""
    instance = cluster.prefill[first.instance]
    free_s, held_s, *_ = instance.queue.openings(instance.free_s(now_s))[-1]
    begin_s = max(free_s - now_s, first.ready_s)
    room_s = held_s - now_s - begin_s
    if held_s == INFINITY or room_s <= 0.0:
        return None
    cached = first.reused_blocks * prompt.block_tokens
    low, high = first.reused_blocks, prompt.tokens // prompt.block_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = costs.prefill_s(middle * prompt.block_tokens, cached) <= room_s
        low, high = (middle, high) if fits else (low, middle - 1)
    if low - first.reused_blocks < LEAST_PIECE_BLOCKS:
        return None
    made_s = costs.prefill_s(low * prompt.block_tokens, cached)
    rank = max(instance.queue.discipline.rank(prompt.arrival_s, made_s), instance.queue.last_rank())
    piece = first._replace(queue_s=begin_s, prefill_s=made_s, rank=rank, delay_s=0.0)
    return piece, low


def _relay(
    piece: PrefillCandidate,
    blocks: int,
    rest: PrefillCandidate,
    prompt: Prompt,
    cluster: Cluster,
    costs: CostModel,
    now_s: float,
) -> Relay:
    """Return the relay with the rest on an instance, which loads all blocks up to the boundary from the first one."""
    source, queue = cluster.sources[piece.instance], cluster.prefill[rest.instance].queue
    size_bytes = blocks * prompt.block_tokens * costs.kv_token_bytes
    load = Load(piece.instance, 0, blocks, size_bytes, source.send_s(size_bytes))
    ready_s = piece.ttft_s + max(source.free_at_s - now_s - piece.ttft_s, 0.0) + load.busy_s
    prefill_s = costs.prefill_s(prompt.tokens, blocks * prompt.block_tokens)
    queue_s = queue.openings(cluster.prefill[rest.instance].free_s(now_s))[-1][2] - now_s
    rank = max(queue.discipline.rank(prompt.arrival_s, prefill_s), queue.last_rank())
    busy_s = piece.prefill_s + prefill_s
    load_s = load.busy_s + sum(each.busy_s for each in piece.loads)
    score = cost_to_all(max(queue_s, ready_s) + prefill_s, busy_s, load_s)
    second = PrefillCandidate(
        rest.instance, queue_s, ready_s, prefill_s, blocks, (load,), (), rank, 0.0, score
    )
    return Relay(piece, blocks, second)
