"""Figures of a Conductor's core: the cluster's index and the native router, against the Python ones.

Responsibility: one function for each figure. The cluster has 64 instances that prefill and 64 that decode, with three
jobs in each queue; the index a million blocks, each session's held by one to three of the prefill instances, behind
system prompts that sessions share. A prompt has 256 blocks, drawn from all sessions, so that most look-ups miss the
processor's caches.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from functools import cache
from random import Random
from time import monotonic, perf_counter_ns, sleep
from typing import Final

from bench.measure import Plan, Result, Side, compare
from kvfs._native.cluster.index import ClusterIndex
from kvfs._native.cluster.route import Choice, Router
from kvfs.errors import DeviceMissing
from kvfs.keys import HASH_BYTES, split_keys
from kvfs.limits import GIB, MAX_BLOCK_SOURCES, MAX_CONDUCTOR_INSTANCES
from scheduler.routing.cluster import Cluster, uniform_cluster
from scheduler.routing.commitments import Ledger
from scheduler.routing.cost import NETWORK_BYTES_S, table_costs
from scheduler.routing.decisions import Decision, Prompt
from scheduler.routing.prefix_index import PrefixIndex
from scheduler.routing.queues import Discipline
from scheduler.routing.route import route

INSTANCES: Final = 64
"""Of each kind."""
BLOCKS: Final = 1_000_000
MANY_BLOCKS: Final = 10_000_000
PROMPT_BLOCKS: Final = 256
SHARED_BLOCKS: Final = 16
SYSTEM_PROMPTS: Final = 32
BLOCK_TOKENS: Final = 512
QUEUED: Final = 3
"""Jobs in each queue."""
UPDATES_S: Final = 20_000
"""Blocks that are added or removed in a second."""
UPDATE_BLOCKS: Final = 64
"""Blocks of one event."""
TIERS: Final = MAX_BLOCK_SOURCES // MAX_CONDUCTOR_INSTANCES
LEAST_FREE_BYTES: Final = 2 * GIB
COSTS: Final = table_costs()


@dataclass(frozen=True, slots=True)
class Twins:
    """One cluster, natively and in Python, and prompts for both."""

    router: Router
    cluster: Cluster
    prefixes: PrefixIndex
    prompts: list[bytes]
    numbers: list[list[int]] = field(default_factory=list)
    """The prompts of the Python index."""


def decisions(seconds: float) -> Result:
    """Route by the native index and router, and by the Python ones; the unit is a decision's microseconds."""
    twins = _twins()
    return compare(
        "conductor.decisions",
        Side(lambda n: _choose(twins, n)),
        Side(lambda n: _decide(twins, n)),
        Plan(seconds, batch=64),
    )


def match_256(seconds: float) -> Result:
    """Find the runs of a prompt of 256 blocks."""
    twins = _twins()
    index, prompts, prefixes, numbers = twins.router.index, twins.prompts, twins.prefixes, twins.numbers
    return compare(
        "conductor.match_256",
        Side(lambda n: index.runs(prompts[n % len(prompts)])),
        Side(lambda n: prefixes.runs(numbers[n % len(numbers)])),
        Plan(seconds, batch=256),
    )


def decision_p99(seconds: float) -> Result:
    """Route while another thread adds and removes blocks."""
    twins = _twins()
    stop = threading.Event()
    updater = threading.Thread(target=_update, args=(twins.router.index, stop))
    updater.start()
    times: list[float] = []
    try:
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            begin = perf_counter_ns()
            _choose(twins, len(times))
            times.append((perf_counter_ns() - begin) / 1000)
    finally:
        stop.set()
        updater.join()
    times.sort()
    return Result("conductor.decision_p99", times[len(times) * 99 // 100], "us", p99=times[-1])


def bytes_per_block(_: float) -> Result:
    """Count the bytes of an index of ten million blocks and as many sources as there may be."""
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE") < LEAST_FREE_BYTES:
        raise DeviceMissing("bench: an index of ten million blocks needs 2 GiB of free memory")
    index = ClusterIndex(MANY_BLOCKS)
    fill_tiers(index, MANY_BLOCKS)
    return Result("conductor.bytes_per_block", index.size_bytes / len(index), "bytes")


def fill_tiers(index: ClusterIndex, blocks: int) -> None:
    """Add blocks in prompts of 256, each held by one to three instances: by one tier whole, by the others its begin.

    So most prompts have sets of sources of their own.
    """
    draw = Random(2)
    while len(index) < blocks:
        hashes = draw.randbytes(HASH_BYTES * min(PROMPT_BLOCKS, blocks - len(index)))
        for instance in draw.sample(range(MAX_CONDUCTOR_INSTANCES), draw.choice((1, 1, 2, 3))):
            first, *others = range(instance * TIERS, (instance + 1) * TIERS)
            index.add(first, hashes)
            for source in others:
                index.add(source, hashes[: HASH_BYTES * draw.randint(0, PROMPT_BLOCKS)])


# --- the cluster -----------------------------------------------------------------------------------------
@cache
def _twins() -> Twins:
    draw = Random(1)
    index, prefixes = ClusterIndex(2 * BLOCKS), PrefixIndex()
    cluster = uniform_cluster(
        INSTANCES, INSTANCES, network_bytes_s=NETWORK_BYTES_S, discipline=Discipline.LENGTH_AWARE
    )
    twins = Twins(_router(index, cluster), cluster, prefixes, [])
    systems = [draw.randbytes(HASH_BYTES * SHARED_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    while len(index) < BLOCKS:
        prompt = draw.choice(systems) + draw.randbytes(HASH_BYTES * (PROMPT_BLOCKS - SHARED_BLOCKS))
        numbers = [int.from_bytes(key, "big") for key in split_keys(prompt)]
        for source in draw.sample(range(INSTANCES), draw.choice((1, 1, 2, 3))):
            index.add(source, prompt)
            for number in numbers:
                prefixes.add(number, source)
        twins.prompts.append(prompt)
        twins.numbers.append(numbers)
    _fill_queues(twins)
    return twins


def _router(index: ClusterIndex, cluster: Cluster) -> Router:
    router = Router(index, COSTS, 2 * QUEUED * INSTANCES)
    for n in range(INSTANCES):
        router.set_prefill(n, length_aware=True)
        router.set_decode(n, active_requests=n % 7, active_tokens=1_000 * n)
        router.set_source(n, bytes_s=NETWORK_BYTES_S)
        cluster.decode[n].active_requests, cluster.decode[n].active_tokens = n % 7, 1_000 * n
    return router


def _fill_queues(twins: Twins) -> None:
    ledger = Ledger(twins.cluster)
    for number in range(QUEUED * INSTANCES):
        choice, decision = _choose(twins, number), _decide(twins, number)
        twins.router.commit(number, choice, 0.0)
        ledger.commit(number, _prompt(twins, number), decision, 0.0)


def _choose(twins: Twins, n: int) -> Choice:
    return twins.router.route(
        twins.prompts[n % len(twins.prompts)],
        arrival_s=0.0,
        tokens=PROMPT_BLOCKS * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        now_s=0.0,
    )


def _prompt(twins: Twins, n: int) -> Prompt:
    runs = twins.prefixes.runs(twins.numbers[n % len(twins.numbers)])
    return Prompt(0.0, PROMPT_BLOCKS * BLOCK_TOKENS, runs, BLOCK_TOKENS)


def _decide(twins: Twins, n: int) -> Decision:
    return route(_prompt(twins, n), twins.cluster, COSTS, 0.0)


def _update(index: ClusterIndex, stop: threading.Event) -> None:
    """Add and remove blocks at the rate of the figure, as events of 64 blocks."""
    draw, began, count = Random(3), monotonic(), 0
    held: list[tuple[int, bytes]] = []
    while not stop.is_set():
        source, hashes = draw.randrange(INSTANCES), draw.randbytes(HASH_BYTES * UPDATE_BLOCKS)
        index.add(source, hashes)
        held.append((source, hashes))
        if len(held) > INSTANCES:
            index.remove(*held.pop(0))
            count += UPDATE_BLOCKS
        count += UPDATE_BLOCKS
        sleep(max(began + count / UPDATES_S - monotonic(), 0.0))
