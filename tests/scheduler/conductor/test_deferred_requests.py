"""Requests that the Conductor defers: who waits, and whose batch is kept for whom, with both planners."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from kvfs.limits import DEFERRED_FORGOTTEN_S, DEFERRED_SILENT_S
from scheduler.conductor import waiters
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.values import Instance, Refused, Routed, RouteRequest
from scheduler.routing.admission import DEFER_S, RESERVE_AFTER_S, Reason, Slo
from scheduler.routing.cost import CostModel
from tests.scheduler.conductor.test_planners import Twins, anonymous
from tests.support.conductors import asking, instance, over, serving, tokens

CAPACITY_TOKENS = 4_000
COSTS = CostModel(
    prefill_fixed_s=0.0,
    prefill_token_s=1e-5,
    prefill_pair_s=0.0,
    kv_token_bytes=1,
    host_bytes_s=1e12,
    network_bytes_s=1e12,
    step_fixed_s=0.005,
    step_context_s=0.0,
    step_request_s=0.0,
    kv_capacity_tokens=CAPACITY_TOKENS,
)
LONG, SHORT = 3_000, 600
"""A long prompt fits no batch that has another request, a short one the gap beside it."""


class Line(Twins):
    """Two Conductors whose batches have little room, and who waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *instances: Instance, **options: Any) -> None:
        super().__init__(monkeypatch, *instances, costs=COSTS, fitted=False, **options)
        self.ids: dict[str, str] = {}
        """The other Conductor's ids."""

    def ask(self, count: int, id: str = "", waited_s: float = 0.0, **values: Any) -> Routed | Refused:
        """Ask both for a prompt of so many tokens; `id`: of the answer that deferred it."""
        request = RouteRequest(model="m", tokens=tokens(count, count), waited_s=waited_s, **values)
        found = self.native.route(replace(request, deferred_id=id))
        wanted = self.python.route(replace(request, deferred_id=self.ids.get(id, "")))
        assert anonymous(found) == anonymous(wanted)
        self.ids[found.id] = wanted.id
        return found

    def defer(self, count: int, waited_s: float) -> Refused:
        """Ask twice for a request, which is deferred."""
        waits = deferred(self.ask(count, waited_s=waited_s))
        return deferred(self.ask(count, waits.id, waited_s))

    def tell(self, name: str, id: str) -> None:
        getattr(self.native, name)(id)
        getattr(self.python, name)(self.ids[id])

    def tick(self, s: float) -> None:
        self.clock.now_s += s
        self.both(lambda made: made.tick())
        self.check()

    def kept(self) -> list[str]:
        return [each["name"] for each in self.native.status()["instances"] if each["kept"]]

    def fill(self, count: int, names: tuple[str, ...]) -> dict[str, str]:
        """Put a request of so many tokens into the batch of each instance; return their ids."""
        ids = {}
        for name in names:
            found = self.ask(count, exclude=[each for each in ("a", "b") if each != name])
            assert isinstance(found, Routed)
            assert found.decode == name
            self.tell("first_token", found.id)
            ids[name] = found.id
        return ids

    def wait(self, id: str, count: int, s: float, waited_s: float = 0.0) -> Refused:
        """Ask again for so long, as often as one is told to."""
        found: Routed | Refused | None = None
        for step in range(1, round(s / DEFER_S) + 1):
            self.tick(DEFER_S)
            found = self.ask(count, id, waited_s + step * DEFER_S)
            assert deferred(found).id == id
        self.tick(0.0)
        assert found is not None
        return deferred(found)


def deferred(found: Routed | Refused) -> Refused:
    assert isinstance(found, Refused)
    assert found.deferred
    return found


def two(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Line:
    return Line(monkeypatch, instance("a"), instance("b"), **options)


def test_who_waits_longest_has_a_batch_kept_which_no_later_request_fills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = two(monkeypatch)
    ids = line.fill(2_500, ("a",)) | line.fill(2_600, ("b",))
    waits = deferred(line.ask(LONG))
    assert (waits.reason, waits.retry_after_s) == (Reason.MEMORY.value, DEFER_S)
    line.wait(waits.id, LONG, RESERVE_AFTER_S - DEFER_S)
    assert line.kept() == [], "a request that has waited for less may find room by itself"
    line.wait(waits.id, LONG, DEFER_S, RESERVE_AFTER_S - DEFER_S)
    assert line.kept() == ["a"], "the one that drains first"
    later = line.ask(SHORT)
    assert isinstance(later, Routed)
    assert later.decode == "b"
    assert deferred(line.ask(SHORT, exclude=["b"])).reason == Reason.RESERVED.value
    line.tell("done", ids["a"])
    assert deferred(line.ask(LONG + 1, exclude=["b"])).reason == Reason.RESERVED.value
    found = line.ask(LONG, waits.id, 6.0)
    assert isinstance(found, Routed)
    assert (found.decode, found.prefill) == ("a", None)
    line.tick(0.0)
    assert line.kept() == []


def test_the_batch_is_the_one_s_who_came_first_whoever_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two proxies ask, each for its own."""
    line = two(monkeypatch)
    line.fill(2_500, ("a", "b"))
    deferred(line.ask(LONG + 2, waited_s=9.0))
    line.tick(0.0)
    assert line.kept() == [], "it may never be asked for again by its id"
    late, early = line.defer(LONG, 6.0), line.defer(LONG + 1, 7.0)
    line.tick(0.0)
    [kept] = line.kept()
    line.both(lambda made: made.remove(kept))
    line.add(instance(kept))
    line.tick(0.0)
    assert line.kept() == [kept], "empty now"
    assert deferred(line.ask(LONG, late.id, 6.0)).id == late.id
    assert isinstance(line.ask(LONG + 1, early.id, 7.0), Routed)
    line.tick(0.0)
    assert line.kept(), "the other's turn"
    line.tell("cancel", late.id)
    assert line.kept() == []
    assert line.native.status()["waiting"] == 1
    assert line.native.status()["counts"]["left"] == 1


def test_who_is_not_asked_for_again_has_no_batch_kept_and_is_forgotten_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = two(monkeypatch)
    line.fill(2_500, ("a", "b"))
    waits = line.defer(LONG, RESERVE_AFTER_S)
    line.tick(DEFERRED_SILENT_S)
    assert (line.native.status()["waiting"], len(line.kept())) == (1, 1)
    line.tick(DEFER_S)
    assert (line.native.status()["waiting"], line.kept()) == (1, [])
    assert deferred(line.ask(LONG, waits.id, 7.0)).id == waits.id
    line.tick(0.0)
    assert len(line.kept()) == 1
    line.tick(DEFERRED_FORGOTTEN_S)
    assert line.native.status()["waiting"] == 1
    line.tick(DEFER_S)
    assert (line.native.status()["waiting"], line.kept()) == (0, [])


def test_another_batch_is_kept_where_one_takes_no_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, instance("a"), instance("b"), instance("p", role="prefill"))
    line.fill(2_500, ("a",))
    line.fill(2_600, ("b",))
    line.defer(LONG, RESERVE_AFTER_S)
    line.tick(0.0)
    assert line.kept() == ["a"]
    line.both(lambda made: made.registry.drain("a"))
    line.tick(0.0)
    assert line.kept() == ["b"]
    line.both(lambda made: made.unreachable("b"))
    line.tick(0.0)
    assert line.kept() == [], "none decodes"
    line.both(lambda made: made.registry.drain("a", draining=False))
    line.tick(0.0)
    assert line.kept() == ["a"]


def test_a_request_that_waits_is_one_decision_however_often_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = two(monkeypatch, slo=Slo(ttft_s=2.0))
    line.fill(2_500, ("a", "b"))
    waits = deferred(line.ask(LONG))
    assert waits.give_up_s == pytest.approx(2.0 - LONG * COSTS.prefill_token_s)
    line.wait(waits.id, LONG, 1.5)
    made = line.native
    status = made.status()
    assert status["counts"]["deferred"] == 1
    assert "refused" not in status["counts"]
    assert [each.outcome for each in made.log.all()][-1] == f"deferred: {Reason.MEMORY.value}"
    explained = made.explain(waits.id)
    assert (explained["verdict"], explained["words"][:9]) == ("defer", "Deferred:")
    line.clock.now_s += DEFER_S
    late = line.ask(LONG, waits.id, 2.0)
    assert isinstance(late, Refused)
    assert (late.deferred, late.give_up_s) == (False, None), "its first token would be late"
    assert made.status()["waiting"] == 0
    assert made.status()["counts"]["refused"] == 1
    assert made.explain(late.id)["verdict"] == "reject"


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "MAX_DEFERRED_REQUESTS", 2)
    line = two(monkeypatch)
    line.fill(2_500, ("a", "b"))
    first = deferred(line.ask(LONG))
    deferred(line.ask(LONG + 1))
    third = line.ask(LONG + 2)
    assert isinstance(third, Refused)
    assert (third.deferred, third.retry_after_s) == (False, DEFER_S)
    line.tell("cancel", first.id)
    last = deferred(line.ask(LONG + 2))
    line.tick(DEFERRED_SILENT_S)
    assert deferred(line.ask(LONG + 2, last.id)).id == last.id
    line.tick(DEFER_S)
    deferred(line.ask(LONG + 3))
    assert line.native.waits(last.id), "another had not been asked for"
    assert line.native.status()["waiting"] == 2


def test_a_place_is_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    line = two(monkeypatch)
    line.fill(2_500, ("a", "b"))
    waits = deferred(line.ask(LONG, waited_s=RESERVE_AFTER_S))
    made: Conductor = line.native
    made.registry.add(instance("n", model="n", namespace={**instance().namespace, "model": "n"}))
    made.tick()
    filled = made.route(RouteRequest(model="n", tokens=tokens(1, 2_500)))
    assert isinstance(filled, Routed)
    other = deferred(made.route(RouteRequest(model="n", tokens=tokens(2, LONG), deferred_id=waits.id)))
    assert other.id != waits.id
    assert made.waits(waits.id)
    made.cancel(filled.id)
    made.cancel(other.id)
    made.cancel(waits.id)
    made.remove("n")


class Drawn:
    """A life of a pool with little room, step by step."""

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        roles = rng.choice((("both",), ("both", "both"), ("prefill", "decode", "decode", "both")))
        self.rng, self.seen = rng, Counter[str]()
        self.line = Line(monkeypatch, *(instance(f"i{n}", role=role) for n, role in enumerate(roles)))
        self.live: list[str] = []
        self.waiting: dict[str, tuple[int, float]] = {}
        """The tokens of who waits, and since when."""

    def ask(self) -> None:
        self._asked(self.rng.randrange(100, 3_800), "", self.line.clock.now_s)

    def ask_again(self) -> None:
        for id, (count, arrival_s) in tuple(self.waiting.items()):
            self._asked(count, id, arrival_s)

    def _asked(self, count: int, id: str, arrival_s: float) -> None:
        line, made = self.line, self.line.native
        [pool] = made.registry.pools()
        held = made._waiters.holds(id, pool)
        found = line.ask(count, id, line.clock.now_s - arrival_s)
        self.waiting.pop(id, None)
        if isinstance(found, Refused):
            self.waiting[deferred(found).id] = count, arrival_s
            return
        self.seen["held"] += held
        line.tell("first_token", found.id)
        self.live.append(found.id)

    def end(self) -> None:
        if self.live:
            self.line.tell("done", self.live.pop(self.rng.randrange(len(self.live))))

    def leave(self) -> None:
        if self.waiting:
            id = self.rng.choice(tuple(self.waiting))
            del self.waiting[id]
            self.line.tell("cancel", id)

    def tick(self) -> None:
        self.line.tick(DEFER_S)
        self.seen["kept"] += len(self.line.kept())
        assert len(self.line.kept()) <= 1


def test_both_planners_keep_the_same_batch_in_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counter[str]()
    for seed in range(12):
        drawn = Drawn(random.Random(seed), monkeypatch)
        steps = [drawn.ask, drawn.ask_again, drawn.end, drawn.leave, drawn.tick]
        for _ in range(150):
            drawn.rng.choices(steps, (4, 4, 3, 0.2, 6))[0]()
        seen += drawn.seen
        assert drawn.line.native.status()["waiting"] == len(drawn.waiting)
    assert min(seen["kept"], seen["held"]) > 0, seen


async def test_a_deferred_request_is_answered_and_cancelled_through_the_door() -> None:
    async with serving(fitted=False) as (service, addresses), asking(addresses) as asker:
        service.add(instance("a"))
        [pool] = service.conductor.registry.pools()
        pool.planner.set_costs(COSTS)
        pool.costs = COSTS
        body = {"model": "m", "tokens": tokens(1, 2_500)}
        first = await asker.ask("POST", "/v1/route", body)
        assert first.status == 200
        answer = await asker.ask("POST", "/v1/route", {"model": "m", "tokens": tokens(2, LONG)})
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert answer.json["deferred"] is True
        again = {"model": "m", "tokens": tokens(2, LONG), "deferred_id": answer.json["id"], "waited_s": 0.25}
        assert (await asker.ask("POST", "/v1/route", again)).json["id"] == answer.json["id"]
        path = f"/v1/reservations/{answer.json['id']}"
        assert (await asker.ask("POST", f"{path}/done")).status == 404, "it has no reservation"
        assert (await asker.ask("DELETE", path)).status == 204
        assert (await asker.ask("DELETE", path)).status == 404
        await asker.ask("DELETE", f"/v1/reservations/{first.json['id']}")
        over(service.conductor)
