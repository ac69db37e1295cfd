"""Routing: a decision equals its explanation, invariants in any state of the cluster, queues that starve no one."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.config.settings import RoutingPolicy
from kvfs.errors import InvalidRequest
from scheduler.routing.cluster import Cluster, uniform_cluster
from scheduler.routing.decisions import Action, Decision, PrefillCandidate, Prompt
from scheduler.routing.policies import COMPUTE_WEIGHT, LOAD_WEIGHT, POLICIES
from scheduler.routing.prefix_index import PrefixIndex, Run
from scheduler.routing.queues import AGEING, Discipline, Job, PrefillQueue, start_s, wait_added_s
from scheduler.routing.route import route
from tests.support import golden_routing
from tests.support.clusters import COSTS, Scene, scenes

policies = st.sampled_from(list(POLICIES))
turns = st.integers(0, 1000)
GOLDEN = Path(__file__).parents[1] / "golden" / "routing.json"


# --- decisions -------------------------------------------------------------------------------------------
def expected_score(policy: str, candidate: PrefillCandidate, question: Scene, turn: int) -> float | None:
    """The documented score from the candidate's own figures; None where it is a draw."""
    if policy == "default":
        return (
            max(candidate.queue_s, candidate.ready_s)
            + candidate.prefill_s
            + candidate.delay_s
            + COMPUTE_WEIGHT * candidate.prefill_s
            + LOAD_WEIGHT * sum(load.busy_s for load in candidate.loads)
        )
    if policy in ("local", "kvcache-centric"):
        return candidate.ttft_s
    if policy == "longest-prefix":
        return candidate.queue_s / (1 + candidate.queue_s) - candidate.reused_blocks
    if policy == "least-queued":
        return candidate.queue_s
    if policy == "round-robin":
        return (candidate.instance - turn) % len(question.cluster.prefill)
    return None


@settings(max_examples=300)
@given(scenes, policies, turns)
def test_a_decision_equals_its_explanation(question: Scene, policy: str, turn: int) -> None:
    found = route(*question, policy=policy, turn=turn)
    chosen = min(found.considered, key=lambda candidate: candidate.score, default=None)
    assert found.prefill is chosen
    for candidate in found.considered:
        assert candidate.ttft_s == max(candidate.queue_s, candidate.ready_s) + candidate.prefill_s
        expected = expected_score(policy, candidate, question, turn)
        assert expected is None or candidate.score == pytest.approx(expected)
        cached = min(candidate.reused_blocks * question.prompt.block_tokens, question.prompt.tokens)
        assert candidate.prefill_s == COSTS.prefill_s(question.prompt.tokens, cached)
    if chosen is not None:
        assert found.ttft_s == question.now_s - question.prompt.arrival_s + chosen.ttft_s
    if found.decode is not None:
        assert found.decode is min(found.considered_decode, key=lambda candidate: candidate.score)
        assert [c.reserved for c in found.considered_decode].count(True) <= 1


@given(scenes, policies, turns)
def test_nothing_goes_to_a_draining_instance(question: Scene, policy: str, turn: int) -> None:
    cluster = question.cluster
    found = route(*question, policy=policy, turn=turn)
    assert {candidate.instance for candidate in found.considered} == {
        n for n, instance in enumerate(cluster.prefill) if not instance.draining
    }
    assert {candidate.instance for candidate in found.considered_decode} == {
        n for n, instance in enumerate(cluster.decode) if not instance.draining
    }
    assert (found.prefill is None) == all(instance.draining for instance in cluster.prefill)


@given(scenes, policies)
def test_ranges_cover_the_prompt_and_come_from_who_holds_them(question: Scene, policy: str) -> None:
    prompt = question.prompt
    holders = [run.holders for run in prompt.runs for _ in range(run.blocks)]
    blocks = -(-prompt.tokens // prompt.block_tokens)
    found = route(*question, policy=policy)
    place = 0
    for piece in found.ranges(blocks):
        assert piece.first_block == place
        assert piece.blocks > 0
        if piece.action is Action.RECOMPUTE:
            assert piece.source is None
        else:
            assert piece.source is not None
            assert all(mask >> piece.source & 1 for mask in holders[place : place + piece.blocks])
        place += piece.blocks
    assert place == (blocks if found.prefill is not None else 0)


@given(scenes, policies, turns)
def test_deciding_changes_nothing_and_repeats(question: Scene, policy: str, turn: int) -> None:
    before = _state(question.cluster)
    first = route(*question, policy=policy, turn=turn, seed=3)
    assert _state(question.cluster) == before
    assert route(*question, policy=policy, turn=turn, seed=3) == first


def _state(cluster: Cluster) -> str:
    queues = [[job.number for job in instance.queue.jobs()] for instance in cluster.prefill]
    return f"{cluster.sources} {cluster.decode} {queues}"


@settings(max_examples=200)
@given(scenes)
def test_the_default_is_no_worse_than_every_single_way(question: Scene) -> None:
    """By its own score: recomputing all, or using what is in place, is among what it weighs."""
    found = route(*question)
    local = {c.instance: c for c in route(*question, policy="local").considered}
    for candidate in found.considered:
        plain, instance = local[candidate.instance], question.cluster.prefill[candidate.instance]
        openings = instance.queue.openings(instance.free_s(question.now_s))
        ready_s = question.now_s + plain.ready_s
        place = instance.queue.place(plain.rank, plain.prefill_s, ready_s, openings)
        delay_s = wait_added_s(openings, place, plain.prefill_s, ready_s)
        assert candidate.score <= plain.ttft_s + delay_s + COMPUTE_WEIGHT * plain.prefill_s + 1e-9


def test_golden_decisions() -> None:
    assert golden_routing.text() == GOLDEN.read_text()


def test_the_setting_of_a_conductor_takes_each_policy() -> None:
    assert set(get_args(RoutingPolicy)) == set(POLICIES)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="kvcache-centric"):
        route(Prompt(0.0, 1, (), 512), uniform_cluster(1, 0, network_bytes_s=1e9), COSTS, 0.0, policy="best")


# --- single rules ----------------------------------------------------------------------------------------
def decide(prompt_tokens: int, *runs: Run, cluster: Cluster, policy: str = "default") -> Decision:
    return route(Prompt(0.0, prompt_tokens, runs, 512), cluster, COSTS, 0.0, policy=policy)


def test_an_idle_instance_loads_what_another_holds() -> None:
    cluster = uniform_cluster(2, 0, network_bytes_s=87e9)
    cluster.prefill[0].queue.add(_job(0, service_s=5.0), 0.0)
    found = decide(51_200, Run(0b01, 100, None), cluster=cluster)
    assert [(piece.action, piece.source) for piece in found.ranges(100)] == [(Action.LOAD, 0)]
    assert found.prefill is not None
    assert found.prefill.instance == 1


def test_a_slow_network_is_worth_less_than_computing() -> None:
    cluster = uniform_cluster(2, 0, network_bytes_s=1e8)
    cluster.prefill[0].queue.add(_job(0, service_s=60.0), 0.0)
    found = decide(51_200, Run(0b01, 100, None), cluster=cluster)
    assert [piece.action for piece in found.ranges(100)] == [Action.RECOMPUTE]


def test_what_comes_while_the_queue_lasts_is_loaded_in_part() -> None:
    """1.5 GB/s are too slow for all 100 blocks, but the instance is busy for 4 s."""
    cluster = uniform_cluster(2, 0, network_bytes_s=1.5e9)
    cluster.prefill[0].draining = True
    cluster.prefill[1].queue.add(_job(0, service_s=4.0), 0.0)
    found = decide(51_200, Run(0b01, 100, None), cluster=cluster)
    [load, compute] = found.ranges(100)
    assert (load.action, compute.action) == (Action.LOAD, Action.RECOMPUTE)
    assert load.blocks == int(4.0 * 1.5e9 / (512 * COSTS.kv_token_bytes))


def test_a_prefix_is_put_together_from_several_nodes() -> None:
    cluster = uniform_cluster(3, 0, network_bytes_s=87e9)
    for n in (0, 1):
        cluster.prefill[n].queue.add(_job(n, service_s=9.0), 0.0)
    found = decide(51_200, Run(0b001, 40, None), Run(0b010, 30, None), Run(0b100, 20, None), cluster=cluster)
    assert [(piece.action, piece.blocks, piece.source) for piece in found.ranges(100)] == [
        (Action.LOAD, 40, 0),
        (Action.LOAD, 30, 1),
        (Action.USE, 20, 2),
        (Action.RECOMPUTE, 10, None),
    ]


def test_algorithm_1_transfers_only_what_is_much_longer() -> None:
    cluster = uniform_cluster(2, 0, network_bytes_s=87e9)
    cluster.prefill[0].queue.add(_job(0, service_s=30.0), 0.0)
    shorter = decide(
        51_200, Run(0b11, 80, None), Run(0b01, 20, None), cluster=cluster, policy="kvcache-centric"
    )
    longer = decide(
        51_200, Run(0b11, 70, None), Run(0b01, 30, None), cluster=cluster, policy="kvcache-centric"
    )
    assert shorter.prefill is not None
    assert longer.prefill is not None
    assert (shorter.prefill.reused_blocks, shorter.prefill.loads) == (80, ())
    assert (longer.prefill.reused_blocks, longer.prefill.loads[0].blocks) == (100, 30)


def test_a_prefix_that_is_being_made_elsewhere_is_waited_for_or_made_again() -> None:
    cluster = uniform_cluster(2, 0, network_bytes_s=87e9)
    producer = _job(0, service_s=3.0)
    producer.finish_s = 3.0
    cluster.prefill[0].queue.add(producer, 0.0)
    soon = decide(51_200, Run(0b01, 99, producer), cluster=cluster)
    assert soon.prefill is not None
    assert soon.prefill.after == (producer,)
    assert soon.prefill.ready_s >= (3.0 if soon.prefill.instance == 1 else 0.0)
    producer.finish_s = 100.0
    late = decide(5_120, Run(0b01, 9, producer), cluster=cluster)
    assert late.prefill is not None
    assert (late.prefill.instance, late.prefill.after) == (1, ())


def test_a_prompt_waits_for_a_late_producer_where_those_behind_it_need_not() -> None:
    """Its blocks are there after 30 s, and take longer to make again. Ten jobs of 1 s pass it meanwhile."""
    cluster = uniform_cluster(2, 0, network_bytes_s=87e9, discipline=Discipline.LENGTH_AWARE)
    producer = _job(0, service_s=10.0)
    producer.finish_s = 30.0
    cluster.prefill[0].draining = True
    for number in range(1, 11):
        cluster.prefill[1].queue.add(_job(number, service_s=1.0, discipline=Discipline.LENGTH_AWARE), 0.0)
    [found] = decide(90_000, Run(0b01, 175, producer), cluster=cluster).considered
    assert found.after == (producer,)
    assert found.delay_s == 0.0
    made_again_s = 10.0 + 2 * COSTS.prefill_s(90_000, 0)  # behind the ten
    assert found.score < made_again_s


# --- the index -------------------------------------------------------------------------------------------
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 3)), max_size=60),
    st.lists(st.integers(0, 12), unique=True, max_size=10),
)
def test_the_index_against_sets(changes: list[tuple[bool, int, int]], prompt: list[int]) -> None:
    index = PrefixIndex()
    model: dict[int, set[int]] = {}
    for add, block, source in changes:
        if add:
            index.add(block, source)
            model.setdefault(block, set()).add(source)
        else:
            index.invalidate(block, source)
            model.get(block, set()).discard(source)
    runs = index.runs(prompt)
    held = [mask for run in runs for mask in [run.holders] * run.blocks]
    expected = []
    for block in prompt:
        if not model.get(block):
            break
        expected.append(sum(1 << source for source in model[block]))
    assert held == expected
    assert all(one.holders != other.holders for one, other in pairwise(runs))
    assert len(index) == sum(1 for holders in model.values() if holders)


def test_a_producer_is_known_until_it_is_done_or_its_blocks_leave() -> None:
    index, producer = PrefixIndex(), _job(0, service_s=1.0)
    for block in (1, 2, 3):
        index.add(block, 0, producer)
    index.invalidate(3, 0)
    index.add(3, 1)
    assert index.runs((1, 2, 3)) == (Run(1, 2, producer), Run(2, 1, None))
    index.produced((1, 2, 3), producer)
    assert index.runs((1, 2)) == (Run(1, 2, None),)


def test_of_several_that_make_a_block_the_one_that_ends_first_is_its_producer() -> None:
    index = PrefixIndex()
    long, short, other = (_job(n, service_s=1.0) for n in range(3))
    long.finish_s, short.finish_s, other.finish_s = 24.0, 3.0, 5.0
    for block in (1, 2, 3):
        index.add(block, 0, long)
    for source, job in ((1, short), (2, other)):
        for block in (1, 2):
            index.add(block, source, job)
    assert index.runs((1, 2, 3)) == (Run(0b111, 2, short), Run(0b001, 1, long))
    short.finish_s = 30.0  # it is late: what the others were predicted counts, as natively
    index.add(2, 3, other)
    assert index.producer(2) is short
    index.stored(2, 2)
    index.produced((1,), short)
    assert index.runs((1, 2, 3)) == (Run(0b111, 1, None), Run(0b1111, 1, None), Run(0b001, 1, long))
    index.add(1, 3, short)
    assert index.producer(1) is None, "it is there, and is made once more"


# --- queues ----------------------------------------------------------------------------------------------
def _job(
    number: int, *, service_s: float, arrival_s: float = 0.0, discipline: Discipline = Discipline.FCFS
) -> Job:
    return Job(
        number,
        0,
        arrival_s=arrival_s,
        service_s=service_s,
        loaded_s=arrival_s,
        finish_s=arrival_s + service_s,
        rank=discipline.rank(arrival_s, service_s),
    )


def run_queue(discipline: Discipline, arrivals: list[tuple[float, float]]) -> list[Job]:
    """Serve (arrival, service) one at a time; the jobs in the order of their starts."""
    queue, waiting = PrefillQueue(discipline), sorted(arrivals)
    now_s, started = 0.0, []
    while waiting or len(queue):
        while waiting and waiting[0][0] <= now_s:
            arrival_s, service_s = waiting.pop(0)
            came = _job(len(waiting), service_s=service_s, arrival_s=arrival_s, discipline=discipline)
            queue.add(came, now_s)
        job = queue.next(now_s)
        if job is None:
            now_s = waiting[0][0]
            continue
        job.started_s = now_s
        started.append(job)
        now_s += job.service_s
    return started


loads = st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 30)), min_size=1, max_size=60)


@given(loads)
def test_first_come_is_first_served(arrivals: list[tuple[float, float]]) -> None:
    served = [job.arrival_s for job in run_queue(Discipline.FCFS, arrivals)]
    assert served == sorted(served)


@given(loads)
def test_length_aware_starves_no_one(arrivals: list[tuple[float, float]]) -> None:
    """A job is overtaken only by jobs that came before its arrival + AGEING x its service."""
    started = run_queue(Discipline.LENGTH_AWARE, arrivals)
    for place, job in enumerate(started):
        for earlier in started[:place]:
            assert earlier.arrival_s <= job.arrival_s + AGEING * job.service_s


def test_endless_short_jobs_let_a_long_one_through() -> None:
    short = [(n * 1.0, 1.0) for n in range(500)]
    started = run_queue(Discipline.LENGTH_AWARE, [*short, (0.0, 30.0)])
    [long] = [job for job in started if job.service_s == 30.0]
    assert long.started_s is not None
    assert long.started_s <= AGEING * 30.0 + 2.0


@given(loads, st.floats(1, 60), st.sampled_from(Discipline))
def test_a_promise_is_kept_whoever_comes_later(
    arrivals: list[tuple[float, float]], promised_s: float, discipline: Discipline
) -> None:
    """A job that was admitted for a time to its end ends by then; one that is removed makes nobody later."""
    queue, free_s, removed = PrefillQueue(discipline), 0.0, random.Random(len(arrivals))

    def serve_until(now_s: float) -> None:
        nonlocal free_s
        while len(queue) and free_s <= now_s:
            job = queue.next(free_s)
            assert job is not None
            free_s += job.service_s
            assert free_s <= job.arrival_s + promised_s + 1e-6

    for number, (arrival_s, service_s) in enumerate(sorted(arrivals)):
        serve_until(arrival_s)
        free_s = max(free_s, arrival_s)
        job = _job(number, service_s=service_s, arrival_s=arrival_s, discipline=discipline)
        openings = queue.openings(free_s)
        place = queue.place(job.rank, service_s, arrival_s, openings)
        job.slack_s = promised_s - (start_s(openings[place], service_s, arrival_s) + service_s - arrival_s)
        if job.slack_s >= 0:
            queue.add(job, free_s)
        if len(queue) and removed.random() < 0.2:
            queue.remove(removed.choice(queue.jobs()))
    serve_until(float("inf"))


@given(loads)
def test_an_opening_is_the_service_of_what_goes_first(arrivals: list[tuple[float, float]]) -> None:
    queue = PrefillQueue(Discipline.LENGTH_AWARE)
    for number, (arrival_s, service_s) in enumerate(arrivals[1:]):
        job = _job(number, service_s=service_s, arrival_s=arrival_s, discipline=queue.discipline)
        queue.add(job, 100.0)
    rank = queue.discipline.rank(*arrivals[0])
    openings = queue.openings(100.0)
    place = queue.place(rank, arrivals[0][1], 0.0, openings)
    ahead_s = sum(job.service_s for job in queue.jobs() if job.rank <= rank)
    assert start_s(openings[place], 1.0, 0.0) == pytest.approx(100.0 + ahead_s)
    assert len(openings) - 1 - place == sum(job.rank > rank for job in queue.jobs())


@given(loads, st.floats(0.01, 30), st.floats(0, 100), st.sampled_from(Discipline))
def test_the_waiting_that_a_job_adds_is_how_much_later_those_behind_it_end(
    arrivals: list[tuple[float, float]], service_s: float, ready_s: float, discipline: Discipline
) -> None:
    """Nobody else waits for blocks; the job was deferred, so it has some behind it in both orders."""
    queue = PrefillQueue(discipline)
    for number, (arrival_s, each_s) in enumerate(arrivals):
        queue.add(_job(number, service_s=each_s, arrival_s=arrival_s, discipline=discipline), 100.0)
    job = _job(99, service_s=service_s, arrival_s=50.0, discipline=discipline)
    job.loaded_s = 100.0 + ready_s
    openings = queue.openings(100.0)
    place = queue.place(job.rank, service_s, job.loaded_s, openings)
    behind, before_s = queue.jobs()[place:], [each.finish_s for each in queue.jobs()[place:]]
    queue.add(job, 100.0)
    later_s = sum(each.finish_s - end_s for each, end_s in zip(behind, before_s, strict=True))
    assert wait_added_s(openings, place, service_s, job.loaded_s) == pytest.approx(later_s, abs=1e-6)


def test_the_waiting_that_a_job_adds_where_others_hold_it_up() -> None:
    """Openings are (free, held, later, slack): who ends by `held` goes at `free`, who does not at `later`."""
    inf = float("inf")
    later = [(0.0, 5.0, 12.0, inf), (1.0, 5.0, 12.0, inf), (20.0, inf, 20.0, inf), (21.0, inf, 21.0, inf)]
    assert wait_added_s(later, 0, 8.0, 0.0) == 16.0, "it begins at 12, and one has ended by then"
    held = [(0.0, inf, 0.0, inf), (0.0, 20.0, 30.0, inf), (2.0, 20.0, 30.0, inf), (35.0, inf, 35.0, inf)]
    assert wait_added_s(held, 0, 8.0, 3.0) == 9.0, "one that fits in before 20 stands still from 2 to 3"
    assert wait_added_s(held, 0, 18.0, 3.0) == 18.0, "one that does not, for nothing"


jobs_that_wait = st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 10)), max_size=8)


@given(jobs_that_wait, st.floats(0.01, 10), st.integers(0, 8), st.booleans())
def test_an_opening_behind_all_is_when_a_job_starts(
    waiting: list[tuple[float, float]], service_s: float, loading: int, ascending: bool
) -> None:
    """One of the jobs waits for a transfer: the others pass it as far as they end before its blocks are there. Where
    one is shorter than one ahead of it, what is left of that time may be put to better use."""
    if ascending:
        waiting, service_s = sorted(waiting, key=lambda job: job[1]), 10.0
    queue = PrefillQueue()
    for number, (loaded_s, job_s) in enumerate(waiting):
        job = _job(number, service_s=job_s)
        job.loaded_s = loaded_s if number == loading else 0.0
        queue.add(job, 1.0)
    expected_s = start_s(queue.openings(1.0)[-1], service_s, 1.0)
    last = _job(99, service_s=service_s)
    queue.add(last, 1.0)
    now_s = 1.0
    while last.started_s is None:
        found = queue.next(now_s)
        if found is None:
            now_s = min(job.loaded_s for job in queue.jobs() if job.loaded_s > now_s)
        else:
            found.started_s = now_s
            now_s += found.service_s
    assert last.started_s <= expected_s + 1e-6
    if ascending:
        assert last.started_s == pytest.approx(expected_s)


def test_a_job_whose_producer_is_elsewhere_is_waited_for_once_that_runs() -> None:
    """Blocks are there at 10, made from 7 on: what starts before 7 passes; later ones wait or end by 10."""
    producer = _job(9, service_s=3.0)
    producer.instance, producer.finish_s = 1, 10.0
    queue = PrefillQueue()
    queue.add(Job(0, 0, arrival_s=0, service_s=1, loaded_s=0, finish_s=11, rank=0, after={producer}), 0.0)
    queue.add(_job(1, service_s=8.0), 0.0)
    openings = queue.openings(0.0)
    assert [start_s(opening, 1.5, 0.0) for opening in openings] == [0.0, 0.0, 8.0]
    assert [start_s(opening, 2.5, 0.0) for opening in openings] == [0.0, 0.0, 11.0]


def test_a_job_behind_becomes_later_by_what_the_one_before_it_waits_for() -> None:
    queue = PrefillQueue(Discipline.LENGTH_AWARE)
    behind = _job(0, service_s=9.0, discipline=queue.discipline)
    behind.slack_s = 4.0
    queue.add(behind, 0.0)
    for loaded_s, passes in ((4.5, False), (2.5, True)):
        job = _job(1, service_s=1.0, discipline=queue.discipline)
        job.loaded_s = loaded_s
        queue.add(job, 0.0)
        assert (queue.jobs()[0] is job) == passes
        queue.remove(job)
    assert behind.slack_s == pytest.approx(1.5)


def test_a_job_that_waits_for_blocks_is_passed_only_by_what_ends_in_time() -> None:
    queue = PrefillQueue()
    waiting = _job(0, service_s=1.0)
    waiting.loaded_s = 0.5
    queue.add(waiting, 0.0)
    queue.add(_job(1, service_s=2.0, arrival_s=0.1), 0.0)
    queue.add(_job(2, service_s=0.3, arrival_s=0.2), 0.0)
    first = queue.next(0.2)
    assert first is not None
    assert first.number == 2
    assert queue.next(0.2) is None
    assert queue.next(0.5) is waiting


def test_a_job_whose_producer_has_not_started_holds_nobody_up() -> None:
    queue, producer = PrefillQueue(), _job(9, service_s=5.0)
    follower = Job(0, 0, arrival_s=0, service_s=1, loaded_s=0, finish_s=1, rank=0, after={producer})
    queue.add(follower, 0.0)
    queue.add(_job(1, service_s=2.0, arrival_s=0.1), 0.0)
    passing = queue.next(1.0)
    assert passing is not None
    assert passing.number == 1
    assert queue.next(1.0) is None
    assert producer.finished() == [follower]
    assert queue.next(1.0) is follower


def test_random_is_even_and_round_robin_turns() -> None:
    cluster = uniform_cluster(4, 0, network_bytes_s=87e9)
    prompt = Prompt(0.0, 1000, (), 512)
    for policy, spread in (("random", 60), ("round-robin", 0)):
        counts = [0] * 4
        for turn in range(1000):
            found = route(prompt, cluster, COSTS, 0.0, policy=policy, turn=turn, seed=1).prefill
            assert found is not None
            counts[found.instance] += 1
        assert max(counts) - min(counts) <= spread
    rng = random.Random(0)
    assert {_drawn(cluster, rng.randrange(1 << 30)) for _ in range(30)} == {0, 1, 2, 3}


def _drawn(cluster: Cluster, seed: int) -> int:
    found = route(Prompt(0.0, 1000, (), 512), cluster, COSTS, 0.0, policy="random", seed=seed).prefill
    assert found is not None
    return found.instance
