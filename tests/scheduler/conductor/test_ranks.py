"""Data-parallel ranks behind one address: each is an instance of its own, and they share keys and fate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

from kvfs import limits
from kvfs.errors import InvalidRequest, LimitExceeded
from scheduler.conductor.door.conductor_service import ConductorService
from scheduler.conductor.feeds import listener
from scheduler.conductor.feeds.probes import parse_metrics, probe
from scheduler.conductor.values import EngineMetrics, Instance, RouteRequest
from tests.scheduler.conductor.test_feed import PROMPT, message, stored
from tests.support.asked_engines import AskedEngine
from tests.support.conductors import (
    BLOCK_TOKENS,
    NAMESPACE,
    Clock,
    conductor,
    hears,
    instance,
    routed,
    serving,
    tokens,
)
from tests.support.held_ports import held_neighbours
from tests.support.waits import until

URL = "http://e.test:8000"
METRICS = """vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{model_name="m",engine="1"} 1.0
vllm:num_requests_running{engine="11",model_name="engine=1"} 50.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0.0
process_start_time_seconds 1.7e+09
"""


def rank_of(number: int, **changes: Any) -> Instance:
    return instance(f"e@{number}", **{"url": URL, "data_parallel_rank": number, **changes})


def reachable(made: Any) -> dict[str, bool]:
    return {each["name"]: each["reachable"] for each in made.status()["instances"]}


def test_each_rank_has_blocks_of_its_own_and_the_answer_says_which_it_is() -> None:
    made = conductor(Clock(), rank_of(0), rank_of(1), instance("f"))
    prompt = tokens(1, 1605)
    hears(made, "engine-e@1", prompt[:1600])
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"e@0": 0, "e@1": 1600, "f": 0}
    found = routed(made, prompt)
    assert (found.decode, found.decode_url, found.decode_rank, found.prefill_rank) == ("e@1", URL, 1, None)
    assert [each["data_parallel_rank"] for each in made.status()["instances"]] == [0, 1, None]


def test_the_rank_of_a_prefill_leg_is_said_too() -> None:
    made = conductor(Clock(), rank_of(0, role="prefill"), rank_of(1, role="decode"))
    found = routed(made, tokens(1, 1605))
    assert (found.prefill_rank, found.decode_rank) == (0, 1)


def test_the_metrics_of_a_rank_are_those_with_its_label() -> None:
    found = [parse_metrics(METRICS, rank) for rank in (0, 1, 2, None)]
    assert found == [
        EngineMetrics(started_s=1.7e9, requests=5, is_asleep=False),
        EngineMetrics(started_s=1.7e9, requests=1, is_asleep=True),
        EngineMetrics(started_s=1.7e9),
        EngineMetrics(started_s=1.7e9, requests=56, is_asleep=True),
    ]


async def test_an_address_is_asked_once_for_the_metrics_of_all_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, looks = AskedEngine(metrics=METRICS), []

    async def look(url: str, ranks: Sequence[int | None], authorities: Path | None) -> list[EngineMetrics]:
        looks.append((url, ranks))
        return await probe(url, ranks, authorities)

    monkeypatch.setattr(listener, "probe", look)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        async with serving(health=True) as (service, _):
            for number in (0, 1):
                service.add(rank_of(number, url=engine.url))
            members = [member for _, member in service.conductor.registry.members()]
            await until(lambda: all(member.seen.started_s for member in members))
            assert [member.seen.requests for member in members] == [5, 1]
            engine.die()
            await until(lambda: not any(reachable(service.conductor).values()))
        nursery.cancel_scope.cancel()
    assert [each for each in looks if each != (engine.url, [0, 1])] == []


def test_what_fails_one_rank_fails_all_behind_its_address_until_they_answer() -> None:
    clock = Clock()
    made = conductor(clock, rank_of(0), rank_of(1), instance("f"), instance("g", url=URL))
    made.unreachable("e@1")
    assert reachable(made) == {"e@0": False, "e@1": False, "f": True, "g": True}
    assert made.counts["unreachable"] == 1
    made.registry.observed("e@0", EngineMetrics())
    assert reachable(made) == {"e@0": True, "e@1": False, "f": True, "g": True}
    clock.now_s += limits.UNREACHABLE_S
    made.unreachable("g")
    assert reachable(made) == {"e@0": True, "e@1": True, "f": True, "g": False}


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "other"}, "model is 'other', but 'm' in rank 0 behind the same address"),
    "block size": (
        {"namespace": NAMESPACE.as_mapping() | {"block_tokens": 32}},
        "block_tokens is 32, but in the pool of 'm' 16",
    ),
    "weights": ({"weights": "others"}, "weights is 'others', but in the pool of 'm' ''"),
    "the same rank": ({"data_parallel_rank": 0}, "'e@0' is rank 0 of http://e.test:8000 already"),
}


@pytest.mark.parametrize(("changes", "error"), DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_differ_are_refused_by_what_differs(changes: dict[str, Any], error: str) -> None:
    made = conductor(Clock(), rank_of(0))
    with pytest.raises(InvalidRequest, match=f"instance 'e@1': {error}"):
        made.registry.add(rank_of(1, **changes))
    assert [each.name for each in made.registry.instances()] == ["e@0"]
    made.registry.add(rank_of(1))


@pytest.mark.parametrize("number", [-1, limits.MAX_ENGINE_STREAMS])
def test_a_rank_has_a_number_that_an_engine_may_have(number: int) -> None:
    made = conductor(Clock())
    with pytest.raises(LimitExceeded, match=f"data_parallel_rank is {number}: must be from 0 to"):
        made.registry.add(rank_of(number))


# --- events --------------------------------------------------------------------------------------------------
@contextmanager
def publishers(*endpoints: str, binds: bool) -> Iterator[list[zmq.Socket[bytes]]]:
    """Open a socket for each endpoint, as vLLM's publishers do."""
    with zmq.Context() as context:
        sockets = [context.socket(zmq.PUB) for _ in endpoints]
        try:
            for each, endpoint in zip(sockets, endpoints, strict=True):
                (each.bind if binds else each.connect)(endpoint)
            yield sockets
        finally:
            for each in sockets:
                each.close(linger=0)


async def blocks_come(service: ConductorService, sockets: list[zmq.Socket[bytes]]) -> None:
    """Publish one block of rank 0 and two of rank 1, until they are known of these ranks."""
    numbers = count()

    def are_known() -> bool:
        sequence = next(numbers)
        for rank, each in enumerate(sockets):
            event = stored(list(range(1 + rank)), PROMPT[: (1 + rank) * BLOCK_TOKENS])
            each.send_multipart(message("vllm", sequence, event, rank=rank))
        found = service.conductor.match(RouteRequest(model="m", tokens=PROMPT))
        return found == {"e@0": BLOCK_TOKENS, "e@1": 2 * BLOCK_TOKENS}

    await until(are_known)


async def test_the_events_of_a_rank_that_connects_come_at_its_own_port() -> None:
    zero, one = held_neighbours()
    endpoints = [f"tcp://127.0.0.1:{each.number}" for each in (zero, one)]
    with zero, one:
        async with serving(events=endpoints[0]) as (service, _):
            for number in (0, 1):
                service.add(rank_of(number, engine_topic="vllm", engine_rank=number))
            with publishers(*endpoints, binds=False) as sockets:
                await blocks_come(service, sockets)


async def test_a_rank_whose_port_is_taken_is_there_without_its_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zero, one = held_neighbours()
    with zero, one, publishers(f"tcp://127.0.0.1:{one.number}", binds=True):
        async with serving(events=f"tcp://127.0.0.1:{zero.number}") as (service, _):
            service.add(rank_of(1, engine_topic="vllm", engine_rank=1))
            assert [each.name for each in service.conductor.registry.instances()] == ["e@1"]
    assert f"instance e@1: [events] endpoint 'tcp://127.0.0.1:{one.number}'" in caplog.text


async def test_ranks_that_bind_are_connected_to_each_at_its_own_port() -> None:
    zero, one = held_neighbours()
    endpoints = [f"tcp://127.0.0.1:{each.number}" for each in (zero, one)]
    with zero, one, publishers(*endpoints, binds=True) as sockets:
        async with serving() as (service, _):
            for number, endpoint in enumerate(endpoints):
                service.add(rank_of(number, engine_topic=f"e@{number}", engine_endpoint=endpoint))
            await blocks_come(service, sockets)
