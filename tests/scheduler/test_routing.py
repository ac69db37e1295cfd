"""Routing: a decision equals its explanation, invariants in any state of the cluster, single rules."""

from __future__ import annotations

import random
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
from scheduler.routing.prefix_index import Run
from scheduler.routing.queues import Discipline, wait_added_s
from scheduler.routing.route import route
from tests.support import golden_routing
from tests.support.clusters import COSTS, Scene, ready_job, scenes

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
    cluster.prefill[0].queue.add(ready_job(0, service_s=5.0), 0.0)
    found = decide(51_200, Run(0b01, 100, None), cluster=cluster)
    assert [(piece.action, piece.source) for piece in found.ranges(100)] == [(Action.LOAD, 0)]
    assert found.prefill is not None
    assert found.prefill.instance == 1


def test_a_slow_network_is_worth_less_than_computing() -> None:
    cluster = uniform_cluster(2, 0, network_bytes_s=1e8)
    cluster.prefill[0].queue.add(ready_job(0, service_s=60.0), 0.0)
    found = decide(51_200, Run(0b01, 100, None), cluster=cluster)
    assert [piece.action for piece in found.ranges(100)] == [Action.RECOMPUTE]


def test_what_comes_while_the_queue_lasts_is_loaded_in_part() -> None:
    """1.5 GB/s are too slow for all 100 blocks, but the instance is busy for 4 s."""
    cluster = uniform_cluster(2, 0, network_bytes_s=1.5e9)
    cluster.prefill[0].draining = True
    cluster.prefill[1].queue.add(ready_job(0, service_s=4.0), 0.0)
    found = decide(51_200, Run(0b01, 100, None), cluster=cluster)
    [load, compute] = found.ranges(100)
    assert (load.action, compute.action) == (Action.LOAD, Action.RECOMPUTE)
    assert load.blocks == int(4.0 * 1.5e9 / (512 * COSTS.kv_token_bytes))


def test_a_prefix_is_put_together_from_several_nodes() -> None:
    cluster = uniform_cluster(3, 0, network_bytes_s=87e9)
    for n in (0, 1):
        cluster.prefill[n].queue.add(ready_job(n, service_s=9.0), 0.0)
    found = decide(51_200, Run(0b001, 40, None), Run(0b010, 30, None), Run(0b100, 20, None), cluster=cluster)
    assert [(piece.action, piece.blocks, piece.source) for piece in found.ranges(100)] == [
        (Action.LOAD, 40, 0),
        (Action.LOAD, 30, 1),
        (Action.USE, 20, 2),
        (Action.RECOMPUTE, 10, None),
    ]


def test_algorithm_1_transfers_only_what_is_much_longer() -> None:
    cluster = uniform_cluster(2, 0, network_bytes_s=87e9)
    cluster.prefill[0].queue.add(ready_job(0, service_s=30.0), 0.0)
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
    producer = ready_job(0, service_s=3.0)
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
    producer = ready_job(0, service_s=10.0)
    producer.finish_s = 30.0
    cluster.prefill[0].draining = True
    for number in range(1, 11):
        cluster.prefill[1].queue.add(
            ready_job(number, service_s=1.0, discipline=Discipline.LENGTH_AWARE), 0.0
        )
    [found] = decide(90_000, Run(0b01, 175, producer), cluster=cluster).considered
    assert found.after == (producer,)
    assert found.delay_s == 0.0
    made_again_s = 10.0 + 2 * COSTS.prefill_s(90_000, 0)  # behind the ten
    assert found.score < made_again_s


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
