"""A Conductor and its engines as processes, in real time, while things go wrong: what is believed is never more than
what was announced, and agrees with what the engines hold soon after the fault is over.

KVFS_TEST_SEED repeats a run, KVFS_TEST_ROUNDS says how many faults there are (default: each once). The Conductor looks
at instances ten times as often as in service (`tests.support.quick_conductor`). Engines 0 and 2 answer for replays, 1
and 3 do not, as vLLM by default.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.support.fleet import Fleet, FleetEngine
from tests.support.seeds import SEED
from tests.support.waits import WAIT_S

CLIENTS: Final = 4
FAULT_S: Final = 0.4
Fault = Callable[[Fleet, FleetEngine], Coroutine[Any, Any, None]]


def drawn_prompts(rng: random.Random, count: int = 30) -> list[list[int]]:
    """Prompts of which half begin with one system prompt of four blocks; more blocks than one engine has room for."""
    system = [rng.randrange(30_000) for _ in range(64)]
    return [
        [*(system if n % 2 else ()), *(rng.randrange(30_000) for _ in range(16 * rng.randint(1, 6) + 3))]
        for n in range(count)
    ]


@asynccontextmanager
async def traffic(fleet: Fleet, prompts: list[list[int]], rng: random.Random) -> AsyncIterator[None]:
    """Ask all the time; requests in flight end."""
    goes_on = True

    async def client(number: int) -> None:
        while goes_on:
            await fleet.ask(rng.choice(prompts), number % len(fleet.conductors))

    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(client, number)
        try:
            yield
        finally:
            goes_on = False


# --- what goes wrong -----------------------------------------------------------------------------------------
async def engine_killed(fleet: Fleet, engine: FleetEngine) -> None:
    await engine.restart(FAULT_S)


async def engine_restarted_at_once(fleet: Fleet, engine: FleetEngine) -> None:
    await engine.restart()


async def engine_without_replays_restarted(fleet: Fleet, engine: FleetEngine) -> None:
    """Whatever it held is gone, and nobody can be asked for what it announced before."""
    silent = next(each for each in fleet.engines if not each.replays)
    await silent.restart(FAULT_S)


async def engine_stopped(fleet: Fleet, engine: FleetEngine) -> None:
    engine.process.stop()
    await trio.sleep(2 * FAULT_S)
    engine.process.go_on()


async def conductor_killed(fleet: Fleet, engine: FleetEngine) -> None:
    before = fleet.counts["unanswered"]
    fleet.conductors[0].kill()
    with trio.fail_after(WAIT_S):
        while fleet.counts["unanswered"] < before + 10:  # noqa: ASYNC110 it notifies nobody
            await trio.sleep(0.01)
    fleet.conductors[0].start()
    await fleet.conductors[0].ready()


async def conductor_stopped(fleet: Fleet, engine: FleetEngine) -> None:
    fleet.conductors[0].stop()
    await trio.sleep(FAULT_S)
    fleet.conductors[0].go_on()


def publishing(**faults: object) -> Fault:
    """Make a fault of what an engine publishes, or of how late it answers."""

    async def fault(fleet: Fleet, engine: FleetEngine) -> None:
        await fleet.fault(engine, **faults)
        await trio.sleep(FAULT_S)
        await fleet.fault(engine)

    return fault


FAULTS: Final[dict[str, Fault]] = {
    "an engine is killed": engine_killed,
    "an engine restarts at once": engine_restarted_at_once,
    "an engine without replays restarts": engine_without_replays_restarted,
    "an engine is stopped": engine_stopped,
    "the Conductor is killed": conductor_killed,
    "the Conductor is stopped": conductor_stopped,
    "batches are dropped": publishing(drop=3),
    "all batches are dropped": publishing(drop=1 << 30),
    "batches are doubled": publishing(double=5),
    "batches are swapped": publishing(swap=5),
    "batches are late": publishing(hold=True),
    "heartbeats are late": publishing(metrics_s=1.0),
    "the cache is cleared": publishing(clear=True),
}
ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", len(FAULTS)))


async def heartbeat(fleet: Fleet, rng: random.Random) -> None:
    """Have each engine publish once more: a gap shows with the batch after it."""
    for engine in fleet.engines:
        prompt = [rng.randrange(30_000) for _ in range(16)]
        await fleet.call(engine.port, "POST", "/v1/completions", {"prompt": prompt})


@pytest.mark.seeded
async def test_what_is_believed_agrees_with_the_truth_after_every_fault(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    prompts = drawn_prompts(rng)
    names = [name for _ in range(-(-ROUNDS // len(FAULTS))) for name in rng.sample(list(FAULTS), len(FAULTS))]
    with Fleet(tmp_path) as fleet:
        await fleet.start()
        for number, name in enumerate(names[:ROUNDS]):
            engine = rng.choice(fleet.engines)
            where = f"KVFS_TEST_SEED={SEED}, round {number}: {name} ({engine.name})"
            try:
                async with traffic(fleet, prompts, rng):
                    await trio.sleep(FAULT_S / 2)
                    await FAULTS[name](fleet, engine)
                    await trio.sleep(FAULT_S / 2)
                await heartbeat(fleet, rng)
                took_s = await fleet.settled(prompts)
            except BaseException as error:
                error.add_note(where)
                raise
            print(f"{where}: agreed after {took_s:.2f} s")
        assert fleet.counts["failed"] == 0, fleet.counts
        assert fleet.counts["routed"] > 0


@pytest.mark.seeded
async def test_two_conductors_follow_the_same_engines_and_one_goes_on_alone(tmp_path: Path) -> None:
    """Publishers connect to both; each hears of all blocks, and knows the other's requests by their numbers alone."""
    rng = random.Random(SEED)
    prompts = drawn_prompts(rng)
    with Fleet(tmp_path, conductors=2) as fleet:
        await fleet.start()
        async with traffic(fleet, prompts, rng):
            await trio.sleep(2 * FAULT_S)
        await heartbeat(fleet, rng)
        for number in range(2):
            await fleet.settled(prompts, number)
        fleet.conductors[1].kill()
        fleet.ports.pop()
        fleet.conductors.pop()
        routed = fleet.counts["routed"]
        async with traffic(fleet, prompts, rng):
            await trio.sleep(FAULT_S)
        await heartbeat(fleet, rng)
        await fleet.settled(prompts)
        assert fleet.counts["unanswered"] == fleet.counts["failed"] == 0, fleet.counts
        assert fleet.counts["routed"] > routed
