"""The native router against `route` and `Ledger` of scheduler.routing: equal to the bit in every state they come to."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest

from kvfs._native.cluster.index import MAX_SOURCES, ClusterIndex
from kvfs._native.cluster.route import MAX_INSTANCES, Choice, Router
from kvfs.errors import Busy, Exists, InvalidRequest, NotFound
from scheduler.routing.cluster import Cluster, DecodeInstance, PrefillInstance, Source
from scheduler.routing.commitments import Ledger
from scheduler.routing.cost import CostModel, table_costs
from scheduler.routing.decisions import Decision, PrefillCandidate, Prompt
from scheduler.routing.prefix_index import PrefixIndex
from scheduler.routing.queues import Discipline, Job, PrefillQueue
from scheduler.routing.route import route

CLUSTERS = int(os.environ.get("KVFS_TEST_CLUSTERS", "400"))
STEPS = 40
BLOCK_TOKENS = 512
COSTS = [
    table_costs(),
    table_costs("llama3-8b", "h100-sxm", devices=1),
    table_costs().slowed_decode(3.0),
    replace(table_costs(), prefill_pair_s=0.0, prefill_token_s=0.0),
    replace(table_costs(), prefill_token_s=0.005),
]
"""With the last but one, cuts and instances are equally good; with the last one, waiting for blocks is worth it."""
PACES = [(8, 2, 2, 2, 3, 1), (8, 1, 1, 0, 6, 1), (8, 8, 1, 1, 2, 1)]
"""How often each step is drawn; with the second one queues grow."""


def key(block: int) -> bytes:
    return block.to_bytes(8, "big") * 2


def packed(blocks: list[int]) -> bytes:
    return b"".join(map(key, blocks))


class Twins:
    """One cluster twice, in a state that is drawn step by step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = rng.uniform(0, 100)
        self.number = 0
        self.costs: CostModel = rng.choice(COSTS)
        prefill, decode = rng.choice((1, 1, 2, 3, 6)), rng.randint(0, 4)
        self.cluster = Cluster(
            [PrefillInstance(f"p{n}", PrefillQueue(rng.choice(list(Discipline)))) for n in range(prefill)],
            [DecodeInstance(f"d{n}") for n in range(decode)],
            [
                Source(
                    n if n < prefill else None,
                    "dram",
                    rng.choice((87e9, 2e10, 5e9)),
                    rng.choice((0.0, 0.001)),
                )
                for n in range(prefill + rng.randint(0, 3))
            ],
        )
        self.prefixes, self.index = PrefixIndex(), ClusterIndex(100_000)
        self.ledger, self.router = Ledger(self.cluster), Router(self.index, self.costs, 10_000)
        self.jobs: dict[int, tuple[Job, list[int]]] = {}
        self.place = rng.sample(range(MAX_SOURCES), len(self.cluster.sources))
        """The sources' numbers in the index."""
        if rng.random() < 0.5:
            self.router.map_sources({at: (source,) for source, at in enumerate(self.place)})
        else:
            self.place = list(range(len(self.place)))
        self.tell_all()

    def tell_all(self) -> None:
        for n, prefill in enumerate(self.cluster.prefill):
            aware = prefill.queue.discipline is Discipline.LENGTH_AWARE
            self.router.set_prefill(n, length_aware=aware, draining=prefill.draining)
        for n, decode in enumerate(self.cluster.decode):
            self.router.set_decode(
                n,
                active_requests=decode.active_requests,
                active_tokens=decode.active_tokens,
                draining=decode.draining,
            )
        for n, source in enumerate(self.cluster.sources):
            self.router.set_source(n, bytes_s=source.bytes_s, latency_s=source.latency_s)
        self.router.reserved_decode = self.cluster.reserved_decode
        self.router.answer_tokens = self.cluster.answer_tokens

    def blocks(self) -> list[int]:
        """A prompt: a system prompt that others share, and a session of its own."""
        system, session = self.rng.randrange(3), self.rng.randrange(12)
        shared = [system * 1_000 + n for n in range(self.rng.choice((0, 5, 30)))]
        return shared + [100_000 + session * 1_000 + n for n in range(self.rng.randint(0, 60))]

    # --- steps --------------------------------------------------------------------------------------------
    def report(self) -> None:
        """Instances report, drain, and are reserved."""
        rng, cluster = self.rng, self.cluster
        for prefill in cluster.prefill:
            prefill.draining = rng.random() < 0.15
        for decode in cluster.decode:
            decode.draining = rng.random() < 0.15
            decode.active_requests = rng.randint(0, 30)
            decode.active_tokens = decode.active_requests * rng.randint(100, 20_000)
        cluster.reserved_decode = (
            rng.randrange(len(cluster.decode)) if cluster.decode and rng.random() < 0.3 else None
        )
        for n, source in enumerate(cluster.sources):
            source.free_at_s = self.now_s + rng.choice((-1.0, 0.3, 3.0, 30.0))
            self.router.set_source(n, bytes_s=source.bytes_s, free_at_s=source.free_at_s)
        cluster.answered(rng.randint(1, 5_000))
        self.tell_all()

    def hold(self) -> None:
        """A source reports blocks, or that it has them no more."""
        source, blocks = self.rng.randrange(len(self.cluster.sources)), self.blocks()
        blocks = blocks[: self.rng.randint(0, len(blocks))]
        if self.rng.random() < 0.7:
            for block in blocks:
                self.prefixes.stored(block, source)
            self.index.add(self.place[source], packed(blocks))
        else:
            for block in blocks:
                self.prefixes.invalidate(block, source)
            self.index.remove(self.place[source], packed(blocks))

    def route(self) -> None:
        rng, blocks = self.rng, self.blocks()
        tokens = max(len(blocks) * BLOCK_TOKENS - rng.randint(0, BLOCK_TOKENS - 1), 1)
        arrival_s = self.now_s - rng.choice((0.0, 0.5, 7.0))
        holds = rng.random() < 0.3
        prompt = Prompt(arrival_s, tokens, self.prefixes.runs(blocks), BLOCK_TOKENS, holds)
        found = route(prompt, self.cluster, self.costs, self.now_s)
        question: dict[str, Any] = {
            "arrival_s": arrival_s,
            "tokens": tokens,
            "block_tokens": BLOCK_TOKENS,
            "now_s": self.now_s,
        }
        choice = self.router.route(packed(blocks), holds_reservation=holds, **question)
        explained = self.router.explain(packed(blocks), holds_reservation=holds, **question)
        check(found, choice, explained)
        if found.prefill is not None and rng.random() < 0.8:
            self.commit(blocks, prompt, found, choice)

    def commit(self, blocks: list[int], prompt: Prompt, found: Decision, choice: Choice) -> None:
        assert found.prefill is not None
        promised_s = self.rng.choice((float("inf"), 30.0, found.ttft_s, found.ttft_s + 1.0))
        self.number += 1
        instance = found.prefill.instance
        job = self.ledger.commit(self.number, prompt, found, self.now_s, promised_s=promised_s)
        self.router.commit(self.number, choice, self.now_s, promised_s=promised_s)
        for block in blocks:
            self.prefixes.add(block, instance, job)
        self.index.produce(self.place[instance], self.number, job.finish_s, packed(blocks))
        self.jobs[self.number] = job, blocks

    def start(self) -> None:
        for n in range(len(self.cluster.prefill)):
            job = self.ledger.start(n, self.now_s)
            assert self.router.start(n, self.now_s) == (None if job is None else job.number)

    def finish(self) -> None:
        for n, instance in enumerate(self.cluster.prefill):
            job = instance.running
            if job is not None and self.rng.random() < 0.6:
                blocks = self.jobs[job.number][1]
                waited = [other.number for other in self.ledger.prefilled(job) if not other.done]
                assert self.router.prefilled(job.number) == waited
                self.prefixes.produced(blocks, job)
                self.index.produced(job.number, packed(blocks))
                assert self.cluster.prefill[n].running is None

    def end(self) -> None:
        """A request joins its batch, or is given up wherever it is."""
        if not self.jobs:
            return
        number = self.rng.choice(list(self.jobs))
        job, blocks = self.jobs[number]
        if job.done and self.rng.random() < 0.5:
            self.ledger.joined(number)
            self.router.joined(number)
        else:
            was_done = job.done
            waited = [other.number for other in self.ledger.dropped(number) if not other.done]
            assert self.router.dropped(number) == waited
            if not was_done:
                for block in blocks:
                    self.prefixes.invalidate(block, job.instance)
                self.prefixes.produced(blocks, job)
                self.index.remove(self.place[job.instance], packed(blocks))
                self.index.produced(number, packed(blocks))
        del self.jobs[number]

    def check_state(self) -> None:
        assert len(self.router) == len(self.ledger) == len(self.jobs)
        for number, (job, _) in self.jobs.items():
            if not job.done:
                found = job.instance, job.service_s, job.loaded_s, job.finish_s, job.rank, job.slack_s
                assert self.router.job(number) == (*found, job.started_s is not None)
            assert self.router.decode_of(number) == self.ledger.decode_of(number)
        for n, instance in enumerate(self.cluster.prefill):
            assert self.router.queue(n) == tuple(job.number for job in instance.queue.jobs())
        for n, decode in enumerate(self.cluster.decode):
            committed = decode.committed_requests, decode.committed_tokens
            assert self.router.decode_load(n) == (decode.active_requests, decode.active_tokens, *committed)
        for n, source in enumerate(self.cluster.sources):
            assert self.router.source_free_at_s(n) == source.free_at_s


def check(found: Decision, choice: Choice, explained: tuple[object, object]) -> None:
    assert explained == (tuple(map(plain, found.considered)), found.considered_decode)
    assert choice.prefill == (None if found.prefill is None else plain(found.prefill))
    assert choice.prefill_instance == (None if found.prefill is None else found.prefill.instance)
    assert choice.decode == found.decode
    assert choice.decode_instance == (None if found.decode is None else found.decode.instance)
    assert (choice.waited_s, choice.ttft_s) == (found.waited_s, found.ttft_s)


def plain(candidate: PrefillCandidate) -> tuple[object, ...]:
    """The fields, with numbers for jobs."""
    return (*candidate[:6], tuple(job.number for job in candidate.after), *candidate[7:])


@pytest.mark.parametrize("part", range(4))
def test_decisions_and_commitments_equal_the_python_ones_to_the_bit(part: int) -> None:
    for seed in range(part, CLUSTERS, 4):
        rng = random.Random(seed)
        twins = Twins(rng)
        steps = [twins.route, twins.start, twins.finish, twins.end, twins.hold, twins.report]
        pace = rng.choice(PACES)
        for _ in range(STEPS):
            rng.choices(steps, pace)[0]()
            twins.now_s += rng.choice((0.0, 0.1, 1.0, 4.0))
            try:
                twins.check_state()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}") from error


def test_openings_of_queues_that_wait_for_their_blocks_equal_the_python_ones_to_the_bit() -> None:
    for seed in range(CLUSTERS // 4):
        rng = random.Random(seed)
        twins = Twins(rng)
        twins.costs = COSTS[-1]
        twins.router.set_costs(twins.costs)
        for session in range(12):
            blocks = [100_000 + session * 1_000 + n for n in range(60)]
            source = rng.randrange(len(twins.cluster.sources))
            for block in blocks:
                twins.prefixes.stored(block, source)
            twins.index.add(twins.place[source], packed(blocks))
        for _ in range(30):
            for n, at in enumerate(twins.cluster.sources):
                at.free_at_s = twins.now_s + rng.uniform(0, 60)
                twins.router.set_source(n, bytes_s=at.bytes_s, latency_s=at.latency_s, free_at_s=at.free_at_s)
            twins.route()
            if rng.random() < 0.3:
                twins.start()
                twins.finish()
            twins.check_state()


# --- what a caller does wrong ----------------------------------------------------------------------------
def one_router(max_flights: int = 2) -> Router:
    router = Router(ClusterIndex(100), COSTS[0], max_flights)
    router.set_prefill(0, length_aware=False)
    router.set_source(0, bytes_s=1e9)
    return router


def choose(router: Router) -> Choice:
    return router.route(key(1), arrival_s=0.0, tokens=512, block_tokens=512, now_s=0.0)


def test_a_request_is_in_flight_once_and_flights_are_bounded() -> None:
    router = one_router()
    router.commit(1, choose(router), 0.0)
    with pytest.raises(Exists):
        router.commit(1, choose(router), 0.0)
    router.commit(2, choose(router), 0.0)
    with pytest.raises(Busy):
        router.commit(3, choose(router), 0.0)
    assert router.dropped(1) == []
    router.commit(3, choose(router), 0.0)
    assert router.queue(0) == (2, 3)
    with pytest.raises(NotFound):
        router.joined(1)
    router.prefilled(3)  # out of turn
    assert router.queue(0) == (2,)
    with pytest.raises(InvalidRequest):
        router.prefilled(3)


def test_sources_of_the_index_count_as_those_they_are_mapped_to() -> None:
    index = ClusterIndex(100)
    router = Router(index, COSTS[0], 10)
    for n in range(2):
        router.set_prefill(n, length_aware=False)
        router.set_source(n, bytes_s=1e9)
    index.add(700, packed([1, 2]))  # two tiers of instance 1
    index.add(3, packed([2, 3, 4]))
    index.add(0, packed([1, 2, 3, 4, 5]))  # of another cluster
    router.map_sources({700: (1,), 3: (1,)})
    (first, second), _ = router.explain(
        packed([1, 2, 3, 4, 5]), arrival_s=0.0, tokens=5 * 512, block_tokens=512, now_s=0.0
    )
    assert (second[4], second[5]) == (4, ())  # in place
    assert [load[:3] for load in first[5]] in ([], [(1, 0, 4)])
    router.map_sources({700: (0, 1), 3: (1,)})  # a store that both share
    (first, second), _ = router.explain(
        packed([1, 2, 3, 4, 5]), arrival_s=0.0, tokens=5 * 512, block_tokens=512, now_s=0.0
    )
    assert (first[4] - sum(load[2] for load in first[5]), second[4], second[5]) == (2, 4, ())


def test_a_choice_without_an_instance_is_not_committed() -> None:
    router = Router(ClusterIndex(100), COSTS[0], 10)
    choice = choose(router)
    assert (choice.prefill_instance, choice.decode, choice.ttft_s) == (None, None, float("inf"))
    with pytest.raises(InvalidRequest):
        router.commit(1, choice, 0.0)
    assert len(router) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda router: router.set_prefill(MAX_INSTANCES, length_aware=True),
        lambda router: router.set_decode(MAX_INSTANCES, active_requests=0, active_tokens=0),
        lambda router: router.set_source(1 << 20, bytes_s=1.0),
        lambda router: router.set_source(0, bytes_s=0.0),
        lambda router: router.start(1 << 20, 0.0),
        lambda router: router.route(bytes(15), arrival_s=0.0, tokens=1, block_tokens=1, now_s=0.0),
        lambda router: router.route(bytes(16), arrival_s=0.0, tokens=1 << 40, block_tokens=1, now_s=0.0),
        lambda router: router.route(bytes(32), arrival_s=0.0, tokens=1, block_tokens=1 << 30, now_s=0.0),
        lambda router: router.map_sources({0: (MAX_SOURCES,)}),
        lambda router: setattr(router, "reserved_decode", -1),
        lambda router: router.commit(-1, choose(router), 0.0),
    ],
)
def test_what_is_out_of_range_is_refused(call: object) -> None:
    with pytest.raises(InvalidRequest):
        call(one_router())  # type: ignore[operator]
