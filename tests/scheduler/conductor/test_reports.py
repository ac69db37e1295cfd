"""The Conductor on a virtual clock: what it makes of reports, deadlines, and answers that it cannot trust."""

from __future__ import annotations

import pytest

from kvfs import limits
from scheduler.conductor.values import Refused, Routed, RouteRequest, Usage
from tests.support.conductors import (
    Clock,
    conductor,
    hears,
    instance,
    over,
    prefills_observed,
    routed,
    steps_observed,
    tokens,
)


# --- reports, deadlines --------------------------------------------------------------------------------------
def test_a_request_goes_through_its_steps_and_nothing_is_left() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"), instance("b"))
    found = routed(made, tokens(1, 4000))
    clock.now_s += 0.3
    made.first_token(found.id)
    made.first_token(found.id)
    made.prefilled(found.id)
    [one] = [each for each in made.status()["instances"] if each["requests"]]
    assert (one["queued"], one["active_requests"], one["active_tokens"]) == (0, 1, 4000)
    clock.now_s += 2
    made.done(found.id, Usage(cached_tokens=0, output_tokens=100))
    made.done(found.id)
    over(made)
    assert made.status()["counts"]["unknown_ids"] == 1


def test_ids_are_compared_whole() -> None:
    made = conductor(Clock(), instance("a"))
    found = [routed(made, tokens(n, 100)) for n in range(11)]
    made.cancel(found[1].id[:-1])
    made.cancel(found[1].id)
    assert [made.is_live(each.id) for each in found] == [True, False] + 9 * [True]


def test_ids_of_a_process_that_is_gone_are_unknown() -> None:
    old, new = conductor(Clock(), instance("a")), conductor(Clock(), instance("a"))
    before, now = routed(old, tokens(1, 100)), routed(new, tokens(1, 100))
    new.done(before.id)
    assert new.is_live(now.id)


def test_what_a_dead_client_reserved_ends_by_its_deadline() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"), instance("b"))
    waiting, decoding = routed(made, tokens(1, 4000)), routed(made, tokens(2, 4000))
    made.first_token(decoding.id)
    clock.now_s += waiting.deadline_s
    made.tick()
    assert (made.is_live(waiting.id), made.is_live(decoding.id)) == (False, True)
    clock.now_s += limits.DECODE_DEADLINE_S
    made.tick()
    over(made)
    assert made.status()["expired"] == 2


def test_a_prefill_whose_report_was_lost_does_not_hold_the_queue() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"))
    first, second = routed(made, tokens(1, 4000)), routed(made, tokens(2, 4000))
    clock.now_s += 2 * first.ttft_s + limits.OVERDUE_S + 0.1
    made.tick()
    assert made.status()["instances"][0]["queued"] == 0
    made.first_token(first.id)
    made.first_token(second.id)
    for each in (first, second):
        made.done(each.id)
    over(made)


def test_answers_that_come_whole_free_their_queue_at_the_predicted_end_of_each_prefill() -> None:
    """Nobody sees their first token; they may take longer than a dead client is waited for."""
    clock = Clock()
    made = conductor(clock, instance("a"))
    whole = [routed(made, tokens(n, 4000), streamed=False) for n in range(3)]
    last = routed(made, tokens(9, 4000))
    prefill_s = whole[0].ttft_s

    def load() -> tuple[int, int]:
        made.tick()
        [one] = made.status()["instances"]
        return one["queued"], one["active_requests"]

    clock.now_s += 0.9 * prefill_s
    assert load() == (3, 0)
    clock.now_s += 0.2 * prefill_s
    assert load() == (2, 1)
    clock.now_s += (
        2 * prefill_s
    )  # two ends since the last look: the second counts from the first, not from the look
    assert load() == (0, 3)
    made.first_token(last.id)
    clock.now_s += prefill_s + limits.PREFILL_DEADLINE_S
    assert load() == (0, 4)
    for each in whole:
        made.done(each.id, Usage(cached_tokens=0, output_tokens=900))
    assert (prefills_observed(made), steps_observed(made)) == (0, 0), "predicted times are no measures"
    made.done(last.id)
    over(made)


@pytest.mark.parametrize("report", ["prefilled", "prefill_failed"])
def test_an_answer_that_comes_whole_is_in_its_batch_from_the_end_of_its_leg_on(report: str) -> None:
    clock = Clock()
    made = conductor(clock, instance("p", role="prefill"), instance("d", role="decode"))
    found = routed(made, tokens(1, 16_001), streamed=False)
    assert found.prefill == "p"
    clock.now_s += found.ttft_s / 2
    made.tick()
    assert [each["active_requests"] for each in made.status()["instances"]] == [0, 0], (
        "its leg says when it ends"
    )
    getattr(made, report)(found.id)
    clock.now_s += found.ttft_s + limits.PREFILL_DEADLINE_S
    made.tick()
    assert [each["active_requests"] for each in made.status()["instances"]] == [0, 1]
    made.done(found.id, Usage(output_tokens=900))
    over(made)


def test_reservations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.conductor.reservations.MAX_RESERVATIONS", 3)
    made = conductor(Clock(), instance("a"))
    found = [routed(made, tokens(n, 100)) for n in range(3)]
    full = made.route(RouteRequest(model="m", tokens=[1]))
    assert isinstance(full, Refused)
    assert "which is the limit" in full.reason
    made.cancel(found[0].id)
    routed(made, tokens(4, 100))


def test_costs_follow_what_was_observed() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"))
    first = routed(made, tokens(0, 4000))
    made.cancel(first.id)
    for n in range(60):
        found = routed(made, tokens(n, 4000))
        clock.now_s += 3 * first.ttft_s
        made.first_token(found.id)
        made.done(found.id, Usage(cached_tokens=0, output_tokens=1))
        made.tick()
    assert routed(made, tokens(99, 4000)).ttft_s == pytest.approx(3 * first.ttft_s, rel=0.05)


def test_a_failed_prefill_leg_frees_its_queue_makes_nothing_and_is_no_measure() -> None:
    clock = Clock()
    made = conductor(clock, instance("p", role="prefill"), instance("d", role="decode"))
    prompt = tokens(1, 16_001)
    first, second = routed(made, prompt), routed(made, tokens(2, 16_001), tbt_slo_s=0.05)
    assert (first.prefill, second.prefill) == ("p", "p")
    clock.now_s += 60
    made.prefill_failed(first.id)
    made.prefilled(first.id)
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"p": 0, "d": 0}
    assert {each["name"]: each["queued"] for each in made.status()["instances"]} == {"p": 0, "d": 0}
    made.first_token(first.id)
    made.done(first.id, Usage(cached_tokens=0, output_tokens=5))
    assert prefills_observed(made) == 0
    assert {each["shortfalls"] for each in made.status()["instances"]} == {0}
    made.cancel(second.id)
    over(made)


def test_a_prefill_behind_one_whose_end_nobody_saw_is_no_measure() -> None:
    """An answer that is not streamed is reported when it is whole: the next prefill began before."""
    clock = Clock()
    made = conductor(clock, instance("a"))
    first, second, third = (routed(made, tokens(n, 4000)) for n in range(3))
    clock.now_s += 60
    made.done(first.id, Usage(cached_tokens=0, output_tokens=900))
    clock.now_s += 0.001
    made.first_token(second.id)
    made.done(second.id, Usage(cached_tokens=0, output_tokens=1))
    assert prefills_observed(made) == 0
    clock.now_s += 0.3
    made.first_token(third.id)
    made.done(third.id, Usage(cached_tokens=0, output_tokens=1))
    assert prefills_observed(made) == 1


def test_a_length_without_tokens_may_be_an_estimate_and_is_no_measure() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"))
    found = made.route(RouteRequest(model="m", length=4000))
    assert isinstance(found, Routed)
    clock.now_s += 60
    made.first_token(found.id)
    made.done(found.id, Usage(cached_tokens=0, output_tokens=1))
    assert prefills_observed(made) == 0


def test_the_costs_follow_what_the_prefill_leg_really_had() -> None:
    clock = Clock()
    made = conductor(clock, instance("p", role="prefill"), instance("d", role="decode"))
    before_s = routed(made, tokens(0, 16_001)).ttft_s
    for reservation in list(made._reservations):
        made.cancel(reservation.id)
    for n in range(1, 3):
        hears(made, "engine-p", tokens(n, 16_001))
        found = routed(made, tokens(n, 16_001))
        assert (found.prefill, found.cached_tokens) == ("p", 16_000)
        clock.now_s += before_s
        made.prefilled(found.id)
        made.done(found.id, Usage(cached_tokens=0, prefill_leg=True))
    made.tick()
    assert prefills_observed(made) == 2
    assert routed(made, tokens(9, 16_001)).ttft_s == pytest.approx(before_s, rel=0.01)


# --- trust ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefill_leg", [True, False])
def test_fresh_prompts_through_both_legs_cost_neither_instance_its_trust(prefill_leg: bool) -> None:
    made = conductor(Clock(), instance("p", role="prefill"), instance("d", role="decode"))
    for n in range(3):
        found = routed(made, tokens(n, 8001))
        assert (found.prefill, found.decode) == ("p", "d")
        made.prefilled(found.id)
        made.done(found.id, Usage(cached_tokens=0, prefill_leg=prefill_leg))
    assert {each["shortfalls"] for each in made.status()["instances"]} == {0}
    over(made)


@pytest.mark.parametrize("prefill_leg", [True, False])
def test_each_leg_s_answer_is_compared_with_what_its_own_instance_should_have(prefill_leg: bool) -> None:
    made = conductor(Clock(), instance("p", role="prefill"), instance("d", role="decode"))
    for n in range(3):
        hears(made, "engine-p", tokens(n, 16_000))
        hears(made, "engine-d", tokens(n, 8000))
        found = routed(made, tokens(n, 16_001))
        assert (found.prefill, found.decode, found.cached_tokens) == ("p", "d", 16_000)
        made.prefilled(found.id)
        cached = 8000 if prefill_leg else 7000  # under what the one should have, and the other should not
        made.done(found.id, Usage(cached_tokens=cached, prefill_leg=prefill_leg))
    status = {each["name"]: each for each in made.status()["instances"]}
    assert [status[name]["shortfalls"] for name in "pd"] == ([3, 0] if prefill_leg else [0, 3])
    assert [status[name]["distrusted"] for name in "pd"] == [prefill_leg, not prefill_leg]
    assert made.counts["predicted_tokens"] == 3 * (16_000 if prefill_leg else 8000)
    assert {each.predicted_tokens for each in made.log.all()} == {16_000 if prefill_leg else 8000}


def test_an_instance_that_falls_short_three_times_of_ten_is_distrusted_until_it_agrees() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    prompt = tokens(1, 16_001)
    hears(made, "engine-a", prompt)
    for cached in (16_000, 0, 15_000, 0):
        assert routed(made, prompt).decode == "a"
        for reservation in list(made._reservations):
            made.done(reservation.id, Usage(cached_tokens=cached, output_tokens=5))
    made.done(routed(made, prompt).id, Usage(cached_tokens=0))
    assert made.status()["instances"][0]["distrusted"]
    assert routed(made, prompt).cached_tokens == 0
    for _ in range(8):
        made.done(routed(made, prompt, exclude=["b"]).id, Usage(cached_tokens=16_000))
    assert not made.status()["instances"][0]["distrusted"]
    assert routed(made, prompt).cached_tokens == 16_000
