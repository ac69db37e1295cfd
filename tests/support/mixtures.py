"""Random mixtures of traffic: request traces whose every parameter is drawn, for promises that hold on any traffic.

Each trace mixes a few populations (chats of some length and pace, documents, scans, loops) at random rates, alike from
beginning to end or drifting from one mixture to another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

from tests.support.workloads import Blocks, Clockwork, Step, arrivals, talk

Population = Callable[[Clockwork], None]


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _chats(work: Clockwork, rate: float) -> None:
    """Sessions of one mean length and pace; long ones too, whose every turn reads all turns before it."""
    rng = work.rng
    prompts = [work.fresh(rng.randint(1, 12)) for _ in range(rng.randint(1, 6))]
    turns, first = _log_uniform(rng, 1.2, 40), _log_uniform(rng, 1, 24)
    grow, think = _log_uniform(rng, 0.5, 8), _log_uniform(rng, 10, 600)
    most = rng.choice([60, 250, 400])

    def session() -> Callable[[float], Step]:
        return talk(
            work, rng.choice(prompts), turns=turns, first=first, grow=grow, think=think, most_blocks=most
        )

    arrivals(work, rate / (turns * (first + turns * grow / 2)), session)


def _documents(work: Clockwork, rate: float) -> None:
    """Questions about documents of Zipf popularity."""
    rng = work.rng
    system = work.fresh(rng.randint(1, 4))
    size = _log_uniform(rng, 3, 40)
    shelf = [
        system + work.fresh(size * rng.lognormvariate(0, 0.7))
        for _ in range(int(_log_uniform(rng, 50, 2000)))
    ]
    exponent = rng.uniform(0.4, 1.2)
    weights = [(rank + 1) ** -exponent for rank in range(len(shelf))]

    def ask(now: float) -> Step:
        (document,) = rng.choices(shelf, weights)
        return document + work.fresh(rng.randint(1, 3)), rng.expovariate(rate / size)

    work.start(0.0, ask)


def _scans(work: Clockwork, rate: float) -> None:
    """Long prompts that nobody reads again, in phases."""
    rng = work.rng
    length, period, busy = int(_log_uniform(rng, 10, 150)), _log_uniform(rng, 200, 4000), rng.uniform(0.1, 1)

    def scan(now: float) -> Step:
        quiet = now % period > busy * period
        return (() if quiet else work.fresh(length)), rng.expovariate(rate / length)

    work.start(0.0, scan)


def _loop(work: Clockwork, rate: float) -> None:
    """Prompts read round and round."""
    rng = work.rng
    known = [work.fresh(rng.randint(5, 30)) for _ in range(int(_log_uniform(rng, 10, 300)))]
    turn = count()

    def ask(now: float) -> Step:
        return known[next(turn) % len(known)], rng.expovariate(rate / 17)

    work.start(0.0, ask)


POPULATIONS: tuple[Callable[[Clockwork, float], None], ...] = (
    _chats,
    _chats,
    _chats,
    _documents,
    _scans,
    _loop,
)


def mixture(seed: int, references: int = 60_000, *, phases: int = 1) -> list[Blocks]:
    """Return a trace of `phases` mixtures, one after the other, each of one to three populations."""
    trace: list[Blocks] = []
    rng = random.Random(seed)
    work = Clockwork(seed)
    for _ in range(phases):
        work.stop()
        for population in rng.choices(POPULATIONS, k=rng.randint(1, 3)):
            population(work, _log_uniform(rng, 1, 8))
        trace += work.run(references // phases)
    return trace


def long_chats(seed: int, references: int = 100_000) -> list[Blocks]:
    """Return chats of many turns on long contexts, the same mix from beginning to end."""
    work = Clockwork(seed)
    for _ in range(random.Random(seed).randint(1, 3)):
        _long(work)
    return work.run(references)


def _long(work: Clockwork) -> None:
    rng = work.rng
    system = work.fresh(rng.randint(1, 8))
    turns, first = _log_uniform(rng, 4, 30), _log_uniform(rng, 4, 60)
    grow, think = _log_uniform(rng, 1, 6), _log_uniform(rng, 20, 300)

    def session() -> Callable[[float], Step]:
        return talk(work, system, turns=turns, first=first, grow=grow, think=think, most_blocks=400)

    arrivals(work, _log_uniform(rng, 0.02, 0.3) / turns, session)
