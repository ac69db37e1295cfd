"""Labels that follow the load: a Conductor on a virtual clock with 16 engines, each of which prefills one prompt at a
time and decodes a batch, through days of long prompts and nights of long answers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from kvfs.errors import NotFound
from kvfs.limits import CONDUCTOR_TICK_S
from kvfs.watch.window import Window
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.door.conductor_panels import conductor_snapshot, decision_panel
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import Refused, Routed, RouteRequest, Usage
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import table_costs
from scheduler.routing.roles import Rules
from scheduler.simulation.event_queue import Events
from scheduler.simulation.nodes import DecodeNode
from scheduler.simulation.traces import Request
from tests.scheduler.conductor.test_deferred_requests import COSTS as DEFERRED_COSTS
from tests.support.conductors import Clock, conductor, instance
from tests.support.trace_families import diurnal

COSTS = table_costs().slowed_decode(2.0)
SLO = Slo(20.0, 0.1)
RULES = Rules()


class Change(NamedTuple):
    at_s: float
    name: str
    role: Role


class Engines:
    """Engines that do what the Conductor decides. A request that is refused is sent again until its TTFT is over."""

    def __init__(self, prefill: int, decode: int, rules: Rules | None) -> None:
        self.events = Events()
        roles: list[Role] = ["prefill" if n < prefill else "decode" for n in range(prefill + decode)]
        self.conductor = conductor(
            lambda: self.events.now_s,  # type: ignore[arg-type]
            *(instance(f"i{n}", role=role) for n, role in enumerate(roles)),
            costs=COSTS,
            slo=SLO,
            admission=Mode.DEFAULT,
            fitted=False,
            relabels=rules,
        )
        self._nodes = [DecodeNode(COSTS, SLO.tbt_s, self._decoded) for _ in roles]
        self._waiting: list[deque[tuple[int, Routed]]] = [deque() for _ in roles]
        self._busy = [False] * len(roles)
        self._live: dict[int, tuple[Request, Routed]] = {}
        self._requests: Sequence[Request] = ()
        self.outcomes: Counter[str] = Counter()
        self.changes: list[Change] = []
        self._roles = self.roles()

    def roles(self) -> dict[str, Role]:
        return {each.instance.name: each.role for _, each in self.conductor.registry.members()}

    def replay(self, requests: Sequence[Request]) -> Engines:
        self._requests = requests
        for number, request in enumerate(requests):
            self.events.at(request.arrival_s, self._arrive, number)
        self.events.at(CONDUCTOR_TICK_S, self._tick)
        while sum(self.outcomes.values()) < len(requests):
            self.events.step()
        return self

    def _tick(self) -> None:
        now_s = self.events.now_s
        for node in self._nodes:
            node.advance(now_s)
        self.conductor.tick()
        roles = self.roles()
        self.changes += [Change(now_s, n, role) for n, role in roles.items() if role != self._roles[n]]
        self._roles = roles
        self.events.at(now_s + 0.5, self._tick)

    def _arrive(self, number: int, deferred_id: str = "") -> None:
        request, now_s = self._requests[number], self.events.now_s
        waited_s = now_s - request.arrival_s
        asked = RouteRequest(
            model="m", length=request.input_tokens, waited_s=waited_s, deferred_id=deferred_id
        )
        found = self.conductor.route(asked)
        if not isinstance(found, Routed):
            if waited_s + found.retry_after_s < SLO.ttft_s:
                again = found.id if found.deferred else ""
                self.events.at(now_s + found.retry_after_s, self._arrive, number, again)
            else:
                self.outcomes["refused"] += 1
            return
        self._live[number] = request, found
        engine = int((found.prefill or found.decode)[1:])
        self._waiting[engine].append((number, found))
        self._start(engine)

    def _start(self, engine: int) -> None:
        if self._waiting[engine] and not self._busy[engine]:
            number, found = self._waiting[engine].popleft()
            self._busy[engine] = True
            took_s = COSTS.prefill_s(self._requests[number].input_tokens, 0)
            self.events.at(self.events.now_s + took_s, self._prefilled, engine, number, found)

    def _prefilled(self, engine: int, number: int, found: Routed) -> None:
        request, now_s = self._requests[number], self.events.now_s
        if found.prefill is not None:
            self.conductor.prefilled(found.id)
        self.conductor.first_token(found.id)
        self._busy[engine] = False
        node = self._nodes[int(found.decode[1:])]
        node.advance(now_s)
        node.join(number, request.input_tokens, request.output_tokens, now_s)
        self._start(engine)

    def _decoded(self, number: int, now_s: float, tbt_s: float) -> None:
        request, found = self._live.pop(number)
        self.conductor.done(found.id, Usage(cached_tokens=0, output_tokens=request.output_tokens))
        self.outcomes["done" if tbt_s <= SLO.tbt_s else "late tokens"] += 1


def test_a_diurnal_load_relabels_and_does_not_flap() -> None:
    trace = diurnal(2, 9_000, rate=6.0)
    found = Engines(11, 5, RULES).replay(trace)
    never = Engines(11, 5, None).replay(trace)
    assert found.outcomes["done"] > 2 * never.outcomes["done"]
    assert found.outcomes["refused"] < never.outcomes["refused"] / 10
    assert never.changes == []
    assert 4 <= len(found.changes) <= 2 * 16
    assert {change.role for change in found.changes} == {"prefill", "decode"}
    orders = found.conductor.status()["roles"]["orders"]
    assert [each["instance"] for each in orders if each["outcome"] == "relabelled"] == [
        change.name for change in found.changes
    ]
    by_name: dict[str, list[float]] = {}
    for change in found.changes:
        by_name.setdefault(change.name, []).append(change.at_s)
    for times in by_name.values():
        # An order comes a window after the one before; the time that the earlier one drained is not in it.
        assert all(after - before > RULES.window_s / 2 for before, after in pairwise(times))


# --- orders by hand --------------------------------------------------------------------------------------------
def loaded(clock: Clock, *roles: Role) -> Any:
    """Return a Conductor whose prefill side has more than it may, and its decode side nothing."""
    made = conductor(
        clock,
        *(instance(f"i{n}", role=role) for n, role in enumerate(roles)),
        slo=SLO,
        admission=Mode.NONE,
        fitted=False,
        relabels=RULES,
    )
    for _ in range(60):
        made.route(RouteRequest(model="m", length=100_000, ttft_slo_s=1e9))
    return made


def look(made: Any, clock: Clock, times: int) -> None:
    for _ in range(times):
        clock.now_s += RULES.look_s
        made.tick()


def roles_of(made: Any) -> list[tuple[Role, bool]]:
    return [(each["role"], each["draining"]) for each in made.status()["instances"]]


def test_an_instance_drains_gets_its_label_and_is_explained() -> None:
    clock = Clock()
    made = loaded(clock, "prefill", "decode", "decode")
    look(made, clock, RULES.looks - 1)
    assert roles_of(made)[1:] == [("decode", False)] * 2
    look(made, clock, 1)
    [order] = made.status()["roles"]["orders"]
    assert order["outcome"] == "draining"
    drains = int(order["instance"][1:])
    assert roles_of(made)[drains] == ("decode", True)
    why = made.explain(order["id"])
    assert (why["role"], f"{order['instance']} goes from decode to prefill" in why["words"]) == (
        "prefill",
        True,
    )
    made.tick()
    assert roles_of(made)[drains] == ("decode", True), "it has requests"
    other = f"i{3 - drains}"
    for _ in range(3):
        answer = made.route(RouteRequest(model="m", length=10))
        assert answer.decode == other, "what drains takes nothing"
    for found in [each for each in made._reservations if each.decode.instance.name == order["instance"]]:
        made.cancel(found.id)
    made.tick()
    assert roles_of(made)[drains] == ("prefill", False)
    assert made.status()["roles"]["counts"] == {"ordered": 1, "relabelled": 1}
    shown = {row[0]: row for row in decision_panel(made).rows}[order["id"]]
    assert (shown[4], shown[6]) == ("to prefill: relabelled", order["instance"])
    look(made, clock, 1)
    panels = {panel.title: panel for panel in conductor_snapshot(made, Window()).panels}
    assert [row[1:3] for row in panels["Roles"].rows] == [("prefill", 2), ("decode", 1)]


WAITS = {
    "who is asked for again waits": lambda made, ids: [route(made, 3_000, id) for id in ids],
    "who is heard of waits": lambda made, ids: made.heard((), ids),
    "who is neither may have gone": lambda made, ids: None,
    "who is cancelled has gone": lambda made, ids: [made.cancel(id) for id in ids],
}


@pytest.mark.parametrize(("say", "is_ordered"), [*zip(WAITS.values(), (1, 1, 0, 0), strict=True)], ids=WAITS)
def test_who_waits_for_room_is_load_of_the_side_that_decodes(
    say: Callable[[Conductor, list[str]], object], is_ordered: int
) -> None:
    """A batch that has room, though for none of them, is no reason to change; who waits for it is."""
    clock = Clock()
    made = conductor(
        clock,
        *(instance(f"i{n}", role=role) for n, role in enumerate(("prefill", "prefill", "decode"))),
        costs=DEFERRED_COSTS,
        admission=Mode.DEFAULT,
        fitted=False,
        relabels=RULES,
    )
    held = route(made, 2_000)
    assert isinstance(held, Routed)
    made.first_token(held.id)
    ids = [route(made, 3_000).id for _ in range(2)]
    for _ in range(RULES.looks):
        clock.now_s += RULES.look_s
        say(made, ids)
        made.tick()
    orders = made.status()["roles"]["orders"]
    assert [each["role"] for each in orders] == ["decode"] * is_ordered


def route(made: Conductor, length: int, deferred_id: str = "") -> Routed | Refused:
    found = made.route(RouteRequest(model="m", length=length, deferred_id=deferred_id))
    assert isinstance(found, Routed) or found.deferred
    return found


@pytest.mark.parametrize("act", ["label", "remove"])
def test_an_operator_ends_an_order(act: str) -> None:
    clock = Clock()
    made = loaded(clock, "prefill", "decode", "decode")
    look(made, clock, RULES.looks)
    [order] = made.status()["roles"]["orders"]
    if act == "label":
        made.registry.set_role(order["instance"], "both")
    else:
        made.remove(order["instance"])
    made.tick()
    assert made.status()["roles"]["orders"][0]["outcome"] == "ended"
    assert not any(draining for _, draining in roles_of(made))
    if act == "label":
        assert roles_of(made)[int(order["instance"][1:])] == ("both", False)


def test_who_is_not_labelled_or_does_not_work_changes_nothing() -> None:
    clock = Clock()
    alike = loaded(clock, "both", "both", "decode")
    look(alike, clock, 20)
    assert alike.status()["roles"]["orders"] == []
    drained = loaded(clock, "prefill", "decode", "decode")
    drained.registry.drain("i2")
    look(drained, clock, 20)
    assert drained.status()["roles"]["orders"] == [], "the last instance that decodes stays"
    plain = conductor(clock, instance("a"))
    plain.tick()
    assert plain.status()["roles"] is None
    with pytest.raises(NotFound):
        plain.explain("x")
