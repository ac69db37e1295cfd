"""Native decisions against those of the Python policy: two Conductors that are asked and reported the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvfs import limits
from kvfs.events.kv_events import CPU, GPU, STORAGE
from kvfs.keys import prefix_hashes
from scheduler.conductor import pool
from scheduler.conductor.conductor import DEGRADED, Conductor
from scheduler.conductor.planning.native_planner import NativePlanner
from scheduler.conductor.planning.python_planner import PythonPlanner
from scheduler.conductor.sources import Knowledge, Place, StreamName
from scheduler.conductor.values import EngineMetrics, Instance, Refused, Routed, RouteRequest, Usage
from scheduler.routing.queues import Discipline
from tests.support.conductors import BLOCK_TOKENS, NAMESPACE, Clock, conductor, instance

RUNS = int(os.environ.get("KVFS_TEST_CLUSTERS", "60"))
STEPS = 80
ROLES = ("both", "both", "prefill", "decode")
MEDIA = (GPU, GPU, CPU, STORAGE)


class Twins:
    """Two Conductors on one clock, one with the planner of Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *instances: Instance, **options: Any) -> None:
        self.clock, self.monkeypatch = Clock(), monkeypatch
        self.native, self.python = conductor(self.clock, **options), conductor(self.clock, **options)
        for each in instances:
            self.add(each)
        self.live: list[tuple[str, str, Routed, int]] = []
        """Ids of both, what was answered, and the prompt's number."""
        self.seen = {"routed": 0, "refused": 0, "legs": 0, "reused": 0, "loaded": 0, "degraded": 0}

    def add(self, instance: Instance) -> None:
        self.native.registry.add(instance)
        with self.monkeypatch.context() as patch:
            patch.setattr(pool, "NativePlanner", PythonPlanner)
            self.python.registry.add(instance)

    def both(self, does: Callable[[Conductor], object]) -> None:
        does(self.native)
        does(self.python)

    def hears(self, topic: str, medium: str, hashes: bytes, *, removed: bool = False) -> None:
        def tell(made: Conductor) -> None:
            stream = made.registry.stream(StreamName(topic, 0))
            if stream is None:
                return
            stream.knowledge = Knowledge.CURRENT
            if removed:
                made.registry.removed(stream, Place(medium), hashes)
            else:
                made.registry.stored(stream, Place(medium), hashes, None)

        self.both(tell)

    def route(self, request: RouteRequest, session: int = 0) -> Routed | Refused:
        found, wanted = self.native.route(request), self.python.route(request)
        assert anonymous(found) == anonymous(wanted)
        assert explained(self.native, found.id) == explained(self.python, wanted.id)
        if isinstance(found, Routed):
            assert isinstance(wanted, Routed)
            self.live.append((found.id, wanted.id, found, session))
            self.seen["legs"] += found.prefill is not None
            self.seen["reused"] += found.cached_tokens > 0
            self.seen["loaded"] += any(each.action == "load" for each in found.ranges)
            self.seen["degraded"] += found.degraded == DEGRADED
        self.seen["routed" if isinstance(found, Routed) else "refused"] += 1
        return found

    def report(self, at: int, name: str, *usage: Usage) -> None:
        one, other, _, _ = self.live[at]
        getattr(self.native, name)(one, *usage)
        getattr(self.python, name)(other, *usage)
        if name in ("done", "cancel"):
            del self.live[at]

    def check(self) -> None:
        for made in (self.native, self.python):
            while made._index.sweep():
                pass
        assert self.native.status() == self.python.status()
        kept = [one for one in self.live if self.native.is_live(one[0])]
        assert kept == [one for one in self.live if self.python.is_live(one[1])]
        self.live = kept
        for mine, other in zip(self.native.registry.pools(), self.python.registry.pools(), strict=True):
            assert isinstance(mine.planner, NativePlanner)
            assert isinstance(other.planner, PythonPlanner)
            assert len(mine.planner) == len(other.planner)
            for slot in range(len(mine.slots)):
                now_s = self.clock.now_s
                assert mine.planner.load(slot, now_s) == other.planner.load(slot, now_s)


def anonymous(found: Routed | Refused) -> dict[str, Any]:
    """Leave out the id, which begins with a random part."""
    values: dict[str, Any] = msgspec.to_builtins(found)
    return {name: value for name, value in values.items() if name != "id"}


def explained(made: Conductor, id: str) -> dict[str, Any]:
    return {name: value for name, value in made.explain(id).items() if name != "id"}


class Drawn:
    """A life of a cluster, step by step."""

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = rng
        self.names = [f"i{n}" for n in range(rng.choice((1, 2, 3, 6)))]
        self.twins = Twins(
            monkeypatch,
            *map(self.instance, self.names),
            transfers=rng.random() < 0.5,
            fitted=rng.random() < 0.5,
            discipline=rng.choice(list(Discipline)),
        )
        self.sessions = [
            [rng.randrange(100) for _ in range(rng.choice((40, 900, 6000, 20_000)))] for _ in range(6)
        ]
        self.mixed = rng.random() < 0.5
        """Whether instances get roles."""

    def instance(self, name: str) -> Instance:
        node = f"node-{int(name[1:]) // 2}"
        return instance(name, store_topic=node, role=self.rng.choice(("both", *ROLES)))

    def prompt(self, session: int) -> list[int]:
        own = self.sessions[session]
        return own[: self.rng.randint(1, len(own))] + [
            self.rng.randrange(100) for _ in range(self.rng.choice((0, 1, 50)))
        ]

    # --- steps --------------------------------------------------------------------------------------------
    def route(self) -> None:
        rng, session = self.rng, self.rng.randrange(len(self.sessions))
        slos: dict[str, Any] = {"ttft_slo_s": rng.choice((0.2, 5.0)), "tbt_slo_s": rng.choice((0.005, 0.02))}
        prompt = self.prompt(session)
        request = RouteRequest(
            model="m",
            tokens=prompt,
            waited_s=rng.choice((0.0, 0.0, 1.5)),
            streamed=rng.random() < 0.7,
            exclude=rng.sample([*self.names, "nobody"], rng.choice((0, 0, 0, 1, 2)) % (len(self.names) + 1)),
            both_legs=len(prompt) % 5 == 0,
            **(slos if rng.random() < 0.3 else {}),
        )
        self.twins.route(request, session)

    def hear(self) -> None:
        name = self.rng.choice(self.names)
        topic = self.rng.choice((f"engine-{name}", f"node-{int(name[1:]) // 2}"))
        hashes = prefix_hashes(NAMESPACE, self.prompt(self.rng.randrange(len(self.sessions))))
        self.twins.hears(topic, self.rng.choice(MEDIA), hashes, removed=self.rng.random() < 0.2)

    def report(self) -> None:
        if not self.twins.live:
            return
        at, rng = self.rng.randrange(len(self.twins.live)), self.rng
        step = rng.choice(
            ("prefilled", "prefill_failed", "first_token", "first_token", "done", "done", "cancel")
        )
        usage = Usage(rng.choice((0, 0, 4000)), rng.randint(0, 900))
        self.twins.report(at, step, *([usage] if step == "done" else []))

    def wait(self) -> None:
        self.twins.clock.now_s += self.rng.choice((0.01, 0.3, 2.0, 30.0))
        self.twins.both(lambda made: made.tick())

    def change(self) -> None:
        name, rng = self.rng.choice(self.names), self.rng
        match rng.choice(("drain", "unreachable", "role", "foreign", "clear", "again")):
            case "drain":
                draining = rng.random() < 0.3
                self.twins.both(lambda made: made.registry.drain(name, draining=draining))
            case "unreachable":
                self.twins.both(lambda made: made.unreachable(name))
            case "role" if self.mixed:
                role = rng.choice(ROLES)
                self.twins.both(lambda made: made.registry.set_role(name, role))  # type: ignore[arg-type]
            case "foreign":
                metrics = EngineMetrics(requests=rng.randrange(9))
                self.twins.both(lambda made: made.registry.observed(name, metrics))
            case "clear":
                topic = StreamName(f"engine-{name}", 0)
                self.twins.both(
                    lambda made: made.registry.cleared(made.registry._streams[topic], Knowledge.CURRENT)
                )
            case "again":
                anew = self.instance(name)
                self.twins.both(lambda made: made.remove(name))
                self.twins.add(anew)


@pytest.mark.parametrize("part", range(3))
def test_native_decisions_equal_the_python_ones_in_every_state(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}
    distrusted = 0
    for seed in range(part, RUNS, 3):
        drawn = Drawn(random.Random(seed), monkeypatch)
        steps = [drawn.route, drawn.hear, drawn.report, drawn.wait, drawn.change]
        for _ in range(STEPS):
            try:
                drawn.rng.choices(steps, (8, 4, 6, 3, 1))[0]()
                drawn.twins.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}") from error
            distrusted += any(each["distrusted"] for each in drawn.twins.native.status()["instances"])
        for name, count in drawn.twins.seen.items():
            seen[name] = seen.get(name, 0) + count
    assert min(seen.values()) > 0, seen
    assert distrusted > 0


@pytest.mark.parametrize("roles", ["both", "apart"])
def test_native_decisions_equal_the_python_ones_over_a_generated_trace(
    roles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 instances, 600 requests with shared prefixes, on some of which answers fall short."""
    rng = random.Random(7)
    labels = ["both"] * 16 if roles == "both" else ["prefill"] * 8 + ["decode"] * 8
    twins = Twins(monkeypatch, *(instance(f"i{n}", role=role) for n, role in enumerate(labels)))
    sessions = [[rng.randrange(30_000) for _ in range(rng.randrange(200, 6000))] for _ in range(60)]
    ends: list[tuple[float, str, list[int]]] = []
    for _ in range(600):
        twins.clock.now_s += rng.expovariate(20)
        twins.both(lambda made: made.tick())
        while ends and ends[0][0] <= twins.clock.now_s:
            _, id, prompt = ends.pop(0)
            at = next(n for n, one in enumerate(twins.live) if one[0] == id)
            held = twins.live[at][2]
            twins.hears(f"engine-{held.decode}", GPU, prefix_hashes(NAMESPACE, prompt))
            twins.report(at, "first_token")
            short = held.decode == "i9" and rng.random() < 0.5
            twins.report(at, "done", Usage(0 if short else len(prompt), rng.randrange(300)))
        prompt = rng.choice(sessions) + [rng.randrange(30_000) for _ in range(rng.randrange(10, 200))]
        found = twins.route(RouteRequest(model="m", tokens=prompt))
        assert isinstance(found, Routed)
        ends.append((twins.clock.now_s + found.ttft_s + rng.random(), found.id, prompt))
        ends.sort()
        twins.check()
    assert twins.seen["reused"] > 200
    assert (twins.seen["legs"] > 50) is (roles == "apart")
    for _ in range(len(twins.live)):
        twins.report(0, "cancel")
    twins.clock.now_s += limits.EXPECTED_BLOCKS_S
    twins.both(lambda made: made.tick())
    twins.check()
    assert twins.native.status()["reservations"] == 0


def test_another_policy_is_decided_in_python() -> None:
    made = conductor(Clock(), instance("a"), instance("b"), policy="round-robin")
    [found] = made.registry.pools()
    assert isinstance(found.planner, PythonPlanner)
    request = RouteRequest(model="m", tokens=[1] * 5 * BLOCK_TOKENS)
    routed = [made.route(request) for _ in range(4)]
    assert [each.decode for each in routed if isinstance(each, Routed)] == ["a", "b", "a", "b"]


def test_an_explanation_has_the_figures_of_its_decision_whatever_came_after() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"), instance("b"))
    prompt = [7] * 4000
    found = made.route(RouteRequest(model="m", tokens=prompt))
    before = made.explain(found.id)
    for _ in range(5):
        made.route(RouteRequest(model="m", tokens=[9] * 8000))
    made.registry.drain("a")
    clock.now_s += 9
    made.tick()
    assert made.explain(found.id) == before
    assert {each["queue_s"] for each in before["prefill"]} == {0.0}


def test_where_both_legs_are_needed_an_instance_for_one_side_does_nothing_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor with one that does both; that one goes on to do both alone."""
    prompt = [7] * 4 * BLOCK_TOKENS
    short = RouteRequest(model="m", tokens=prompt, both_legs=True)
    twins = Twins(monkeypatch, instance("p", role="prefill"), instance("d", role="decode"))
    twins.hears("engine-d", GPU, prefix_hashes(NAMESPACE, prompt))
    alone = twins.route(RouteRequest(model="m", tokens=prompt))
    assert isinstance(alone, Routed)
    assert (alone.prefill, alone.decode) == (None, "d")
    found = twins.route(short)
    assert isinstance(found, Routed)
    assert (found.prefill, found.decode) == ("p", "d")
    for name, missing in (("p", "d"), ("d", "p")):
        found = twins.route(RouteRequest(model="m", tokens=prompt, exclude=[missing], both_legs=True))
        assert isinstance(found, Refused), name
        assert found.reason == "no instance takes work"
    twins.add(instance("b"))
    for name in ("p", "d"):
        found = twins.route(RouteRequest(model="m", tokens=prompt, exclude=[name], both_legs=True))
        assert isinstance(found, Routed)
        assert (found.prefill, found.decode) == (None, "b")
