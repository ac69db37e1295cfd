"""What became of decisions: rows, tokens by medium, latencies against limits, and what changed."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.events.kv_events import CPU, GPU, STORAGE
from kvfs.limits import MAX_PROBLEMS, MAX_REMEMBERED_DECISIONS, MAX_STREAMED_DECISIONS
from kvfs.watch.window import Window
from scheduler.conductor import conductor as module
from scheduler.conductor.decision_log import Logged, by_medium
from scheduler.conductor.door.conductor_panels import conductor_snapshot, decision_panel
from scheduler.conductor.reservations import Reservations
from scheduler.conductor.values import Refused, RouteRequest, Usage
from tests.support.conductors import BLOCK_TOKENS, Clock, conductor, hears, instance, routed, tokens

PROMPT = tokens(1, 10 * BLOCK_TOKENS + 3)


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 40))
def test_blocks_are_each_of_one_medium(held: list[int], more: int) -> None:
    depths = list(accumulate(held))
    reused = min(more, 30)
    found = by_medium(zip("abcd", depths, strict=False), reused)
    assert sum(count for _, count in found) == reused
    assert all(count >= 0 for _, count in found)
    if depths and reused >= depths[-1]:
        assert [count for _, count in found] == [*held, reused - depths[-1]]


def test_reused_tokens_are_counted_by_the_fastest_medium_that_has_them() -> None:
    made = conductor(Clock(), instance("a", store_topic="node"))
    hears(made, "engine-a", PROMPT[: 4 * BLOCK_TOKENS])
    hears(made, "engine-a", PROMPT[: 6 * BLOCK_TOKENS], CPU)
    hears(made, "node", PROMPT[: 9 * BLOCK_TOKENS], STORAGE)
    assert routed(made, PROMPT).cached_tokens == 9 * BLOCK_TOKENS
    found = made.status()["decisions"]
    assert found["prompt_tokens"] == len(PROMPT)
    counted = {medium: count // BLOCK_TOKENS for medium, count in found["reused_tokens"].items() if count}
    assert counted == {GPU: 4, CPU: 2, STORAGE: 3}
    routed(made, PROMPT)
    assert made.status()["decisions"]["reused_tokens"]["expected"] == BLOCK_TOKENS, "the first is to make it"


def test_a_request_from_its_route_to_its_end() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"))
    id = routed(made, PROMPT, waited_s=0.5, ttft_slo_s=2.0, tbt_slo_s=0.1).id
    [logged] = made.log.all()
    assert (logged.outcome, logged.decode, logged.prefill, logged.tokens) == ("routed", "a", "", len(PROMPT))
    clock.now_s += 3
    made.first_token(id)
    clock.now_s += 1
    made.first_token(id)
    assert (logged.outcome, logged.ttft_s) == ("answering", 3.5)
    made.done(id, Usage(cached_tokens=64, output_tokens=21))
    assert (logged.outcome, logged.cached_tokens, logged.tbt_s) == ("done", 64, 0.05)
    made.done(id, Usage(cached_tokens=0, output_tokens=2))
    assert logged.cached_tokens == 64
    found = made.status()["decisions"]
    assert found["late"] == {"ttft": 1, "tbt": 0}
    assert found["latencies"]["ttft"]["sum_s"] == 3.5


@pytest.mark.parametrize("end", ["cancelled", "orphaned", "expired"])
def test_other_ends_are_named(end: str) -> None:
    clock = Clock()
    made = conductor(clock, instance("a"))
    id = routed(made, PROMPT).id
    if end == "cancelled":
        made.cancel(id)
    elif end == "orphaned":
        made.remove("a")
    else:
        clock.now_s += 1_000
        made.tick()
    assert [each.outcome for each in made.log.all()] == [end]


def test_refusals_are_counted_by_reason_with_and_without_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    made = conductor(Clock(), instance("a"))
    made.registry.drain("a", draining=True)
    assert isinstance(made.route(RouteRequest(model="m", tokens=PROMPT)), Refused)
    monkeypatch.setattr(Reservations, "is_full", True)
    made.route(RouteRequest(model="m", tokens=PROMPT))
    assert made.status()["decisions"]["refused"] == {"no instance takes work": 1, module.FULL: 1}
    assert [each.outcome for each in made.log.all()] == ["refused: no instance takes work"]


def test_what_is_kept_is_bounded_and_what_changed_is_taken_once() -> None:
    made = conductor(Clock(), instance("a"))
    ids = [routed(made, PROMPT[:20]).id for _ in range(MAX_REMEMBERED_DECISIONS + 50)]
    assert [each.id for each in made.log.all()] == ids[50:]
    changed, omitted = made.log.take_changed()
    assert [each.id for each in changed] == ids[-MAX_STREAMED_DECISIONS:]
    assert omitted == len(ids) - MAX_STREAMED_DECISIONS
    made.cancel(ids[0])
    made.cancel(ids[-1])
    assert [each.id for each in made.log.take_changed()[0]] == [ids[0], ids[-1]], (
        "also one that is kept no more"
    )
    assert made.log.take_changed() == ((), 0)
    for id in ids:
        made.cancel(id)
    assert made.log._live == {}


def test_a_snapshot_says_what_is_wrong_and_since_when() -> None:
    clock = Clock()
    made = conductor(clock, instance("<b>"), instance("c"))
    window = Window()
    first = conductor_snapshot(made, window)
    assert (first.window_s, first.decisions) == (0.0, None)
    made.registry.unreachable("c")
    made.registry.has_topic("stranger")
    routed(made, PROMPT)
    shown = conductor_snapshot(made, window, changed=True)
    text = "\n".join(shown.problems)
    for wrong in (
        "c is passed over: it failed a request",
        "stranger: 1 batches",
        "engine-<b>: nothing was heard",
        "1 requests were routed by load",
    ):
        assert wrong in text, wrong
    assert shown.decisions is not None
    assert len(shown.decisions.rows) == 1
    [panel] = [each for each in shown.panels if each.title == "Instances"]
    assert [row[:2] for row in panel.rows] == [
        ("<b>", "ready"),
        ("c", "unreachable"),
    ]
    assert all(len(row) == len(panel.columns) for panel in shown.panels for row in panel.rows)
    assert len(decision_panel(made).rows[0]) == len(decision_panel(made).columns)


def test_many_problems_are_counted() -> None:
    made = conductor(Clock(), *(instance(f"i{n}") for n in range(MAX_PROBLEMS + 5)))
    problems = conductor_snapshot(made, Window()).problems
    assert len(problems) == MAX_PROBLEMS + 1
    assert problems[-1] == "and 5 more"


def test_a_row_is_of_the_calendar() -> None:
    made = conductor(Clock(), instance("a"))
    routed(made, PROMPT)
    shown = decision_panel(made).rows[0][1]
    assert isinstance(shown, float)
    assert shown > 1.6e9
    assert isinstance(made.log.all()[0], Logged)
