"""Families of generated request traces, against which eviction policies are judged beside the public ones.

Each function gives the block ids of every request, in order of arrival, the same for equal seeds. They differ in
what decides reuse: think time, steps of an agent, popularity, phases, or a loop.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count

Blocks = tuple[int, ...]
Event = tuple[float, int, Callable[[float], "Step"]]
Step = tuple[Blocks, float | None]
"""A request, and the time until the same session's next one, if there is one."""


class Clockwork:
    """Sessions that take turns by their own clocks; `fresh(n)` makes blocks never seen before."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._ids = count(1)
        self._order = count()
        self._events: list[Event] = []

    def fresh(self, blocks: float) -> Blocks:
        return tuple(next(self._ids) for _ in range(max(int(blocks), 1)))

    def start(self, at: float, step: Callable[[float], Step]) -> None:
        heapq.heappush(self._events, (at, next(self._order), step))

    def stop(self) -> None:
        """End all sessions and arrivals."""
        self._events.clear()

    def run(self, references: int) -> list[Blocks]:
        trace: list[Blocks] = []
        while references > 0 and self._events:
            now, _, step = heapq.heappop(self._events)
            blocks, pause = step(now)
            if pause is not None:
                self.start(now + pause, step)
            if blocks:
                trace.append(blocks)
                references -= len(blocks)
        return trace


def talk(
    work: Clockwork,
    prefix: Blocks,
    *,
    turns: float,
    first: float,
    grow: float,
    think: float,
    spread: float = 1.0,
    most_blocks: int = 250,
) -> Callable[[float], Step]:
    """A session: each request is the full blocks of the one before, then new ones and a partial tail."""
    rng = work.rng
    known = prefix

    def step(now: float) -> Step:
        nonlocal known
        more = first if known is prefix else grow
        known += work.fresh(rng.lognormvariate(0, spread) * more)
        request = known + work.fresh(1)
        if rng.random() < 1 / turns or len(known) > most_blocks:
            return request, None
        return request, rng.lognormvariate(0, 1.0) * think

    return step


def arrivals(work: Clockwork, rate: float, make: Callable[[], Callable[[float], Step]]) -> None:
    def arrive(now: float) -> Step:
        work.start(now, make())
        return (), work.rng.expovariate(rate)

    work.start(0.0, arrive)


def chat(seed: int = 1, references: int = 150_000) -> list[Blocks]:
    """Short sessions behind three system prompts; most end after a turn or two."""
    work = Clockwork(seed)
    prompts = [work.fresh(n) for n in (1, 2, 6)]
    arrivals(
        work,
        2.0,
        lambda: talk(
            work,
            work.rng.choice(prompts),
            turns=work.rng.choice([1.1, 1.5, 6]),
            first=8,
            grow=3,
            think=90,
        ),
    )
    return work.run(references)


def agents(seed: int = 2, references: int = 300_000) -> list[Blocks]:
    """Coding agents: a long context that grows by a little at every step, read again within seconds."""
    work = Clockwork(seed)
    tools = work.fresh(20)
    repositories = [tools + work.fresh(30) for _ in range(12)]
    arrivals(
        work,
        0.05,
        lambda: talk(
            work,
            work.rng.choice(repositories),
            turns=40,
            first=6,
            grow=1.5,
            think=12,
            most_blocks=320,
        ),
    )
    return work.run(references)


def agents_resumed(seed: int = 3, references: int = 300_000) -> list[Blocks]:
    """Agents whose bursts of steps are cut by their users' long pauses, and that start over from a summary."""
    work = Clockwork(seed)
    tools = work.fresh(16)

    def agent() -> Callable[[float], Step]:
        rng = work.rng
        root = tools + work.fresh(rng.randint(5, 40))
        known = root
        budget = rng.randint(2, 6)

        def step(now: float) -> Step:
            nonlocal known, budget
            known += work.fresh(rng.expovariate(0.5))
            request = known + work.fresh(1)
            if len(known) > 200:
                known = root + work.fresh(4)
                budget -= 1
            if budget == 0:
                return request, None
            return request, rng.expovariate(1 / 8) if rng.random() < 0.93 else rng.lognormvariate(6, 1)

        return step

    arrivals(work, 0.03, agent)
    return work.run(references)


def retrieval(seed: int = 4, references: int = 150_000) -> list[Blocks]:
    """Questions about shared documents of Zipf popularity: the document is read again, the question is not."""
    work = Clockwork(seed)
    system = work.fresh(2)
    documents = [system + work.fresh(work.rng.lognormvariate(2.5, 0.8)) for _ in range(3000)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(len(documents))]

    def ask(now: float) -> Step:
        (document,) = work.rng.choices(documents, weights)
        return document + work.fresh(work.rng.randint(1, 3)), 1.0

    work.start(0.0, ask)
    return work.run(references)


def scans(seed: int = 5, references: int = 200_000) -> list[Blocks]:
    """Chat, beside batches of long prompts that nobody reads again."""
    work = Clockwork(seed)
    system, batch = work.fresh(2), work.fresh(1)
    arrivals(work, 1.0, lambda: talk(work, system, turns=3, first=6, grow=3, think=60))

    def scan(now: float) -> Step:
        quiet = now % 600 > 200
        return (() if quiet else batch + work.fresh(60)), 1.0

    work.start(0.0, scan)
    return work.run(references)


def phases(seed: int = 6, references: int = 240_000) -> list[Blocks]:
    """Chat, agents and retrieval by turns, each phase with blocks of its own or those of an earlier one."""
    parts: list[Iterator[Blocks]] = [
        iter([tuple(key * 4 + kind for key in blocks) for blocks in make(seed + kind, references)])
        for kind, make in enumerate((chat, agents, retrieval))
    ]
    rng = random.Random(seed)
    trace: list[Blocks] = []
    while references > 0:
        part = rng.choice(parts)
        left = rng.randint(5_000, 20_000)
        for blocks in part:
            trace.append(blocks)
            references -= len(blocks)
            left -= len(blocks)
            if left <= 0:
                break
    return trace


def loops(seed: int = 7, references: int = 200_000) -> list[Blocks]:
    """Documents read round and round, in loops a little over a tenth and over a half of all blocks."""
    work = Clockwork(seed)
    small = [work.fresh(20) for _ in range(40)]
    large = [work.fresh(20) for _ in range(200)]
    turn = count()

    def ask(now: float) -> Step:
        at = next(turn)
        known = small[at // 2 % len(small)] if at % 2 else large[at // 2 % len(large)]
        return known + (work.fresh(1) if work.rng.random() < 0.1 else ()), 1.0

    work.start(0.0, ask)
    return work.run(references)


def popularity(seed: int = 8, references: int = 150_000) -> list[Blocks]:
    """Prompts drawn by Zipf popularity alone, which drifts: what frequency predicts best."""
    rng = random.Random(seed)
    ids = count(1)
    prompts = [tuple(next(ids) for _ in range(rng.randint(2, 20))) for _ in range(4000)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    trace: list[Blocks] = []
    while references > 0:
        if rng.random() < 0.01:
            prompts[rng.randrange(len(prompts))] = tuple(next(ids) for _ in range(rng.randint(2, 20)))
        (blocks,) = rng.choices(prompts, weights)
        trace.append(blocks)
        references -= len(blocks)
    return trace


def branches(seed: int = 9, references: int = 150_000) -> list[Blocks]:
    """Searches over trees of thoughts: many samples from one prefix within a moment, then most branches die."""
    work = Clockwork(seed)

    def search() -> Callable[[float], Step]:
        rng = work.rng
        beam = [work.fresh(rng.randint(4, 30))]
        left = rng.randint(3, 30)

        def step(now: float) -> Step:
            nonlocal left
            grown = rng.choice(beam) + work.fresh(rng.randint(1, 3))
            beam.append(grown)
            del beam[:-4]
            left -= 1
            return grown, rng.expovariate(1 / 5) if left else None

        return step

    arrivals(work, 0.4, search)
    return work.run(references)


def fleet(seed: int = 10, references: int = 400_000) -> list[Blocks]:
    """Agents that send several helpers at once from their own context; the helpers' work comes back as a summary."""
    work = Clockwork(seed)
    rng = work.rng
    tools = work.fresh(24)

    def helper(context: Blocks) -> Callable[[float], Step]:
        return talk(work, context, turns=12, first=3, grow=2, think=6)

    def lead() -> Callable[[float], Step]:
        known = tools + work.fresh(rng.lognormvariate(2.5, 1))

        def step(now: float) -> Step:
            nonlocal known
            known += work.fresh(rng.lognormvariate(0, 1.2))
            if rng.random() < 0.05:
                for _ in range(rng.randint(1, 5)):
                    work.start(now + rng.expovariate(1), helper(tools if rng.random() < 0.5 else known))
            if len(known) > 400:
                return known + work.fresh(1), None
            slow = rng.random() < 0.1
            return known + work.fresh(1), rng.lognormvariate(5 if slow else 2, 1)

        return step

    arrivals(work, 0.02, lead)
    return work.run(references)


def tools(seed: int = 11, references: int = 200_000) -> list[Blocks]:
    """Calls of fixed tools behind a few dozen long prompts, mostly answered in one turn, in bursts for each tool."""
    work = Clockwork(seed)
    rng = work.rng
    prompts = [work.fresh(rng.randint(4, 16)) for _ in range(60)]
    hot = rng.sample(prompts, 8)

    def session() -> Callable[[float], Step]:
        if rng.random() < 0.01:
            hot[rng.randrange(len(hot))] = rng.choice(prompts)
        prompt = rng.choice(hot if rng.random() < 0.8 else prompts)
        return talk(work, prompt, turns=rng.choice([1, 1, 1, 4]), first=4, grow=2, think=20)

    arrivals(work, 4.0, session)
    return work.run(references)


def flips(seed: int = 12, references: int = 240_000) -> list[Blocks]:
    """Short prompts go on and long ones end, until it turns round, again and again: the past misleads."""
    work = Clockwork(seed)
    rng = work.rng
    system = work.fresh(1)

    def session_at(now: float) -> Callable[[float], Step]:
        is_long = rng.random() < 0.5
        goes_on = is_long == (int(now / 900) % 2 == 0)
        return talk(
            work,
            system,
            turns=6 if goes_on else 1,
            first=24 if is_long else 4,
            grow=2,
            think=60,
            spread=0.3,
        )

    def arrive(now: float) -> Step:
        work.start(now, session_at(now))
        return (), rng.expovariate(1.0)

    work.start(0.0, arrive)
    return work.run(references)


FAMILIES: dict[str, Callable[[], list[Blocks]]] = {
    make.__name__: make
    for make in (
        chat,
        agents,
        agents_resumed,
        fleet,
        tools,
        retrieval,
        scans,
        phases,
        flips,
        loops,
        popularity,
        branches,
    )
}
