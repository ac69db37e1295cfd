"""What holds at the end of every simulated run, whatever its options; and options drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

from scheduler.routing.admission import Mode, Slo
from scheduler.routing.policies import POLICIES
from scheduler.routing.queues import Discipline
from scheduler.routing.roles import Rules
from scheduler.simulation.options import Failure, LowerTier, Options
from scheduler.simulation.results import Outcome
from scheduler.simulation.simulate import Simulation
from tests.support.routing_runs import Pooled
from tests.support.trace_families import FAMILIES

_NVME = LowerTier("nvme", 500, 12e9, 1e-4)
_COLD = LowerTier("cold", 20_000, 10e9, 0.03, depth=64, shared=True)


def drawn_run(seed: int, requests: int = 300) -> tuple[Simulation, str]:
    """A simulation of a drawn family with drawn options, and what these are."""
    rng = random.Random(seed)
    family, load = rng.choice(list(FAMILIES)), rng.choice((0.5, 0.85, 1.0, 1.3))
    options = _drawn_options(rng)
    pooled = Pooled(FAMILIES[family](seed, requests), options["cache_blocks"], options["prefill"])
    found = Options(**options, speed=pooled.speed(load))
    return Simulation(pooled.trace, found), f"{family}, load {load}, {found}"


def _drawn_options(rng: random.Random) -> dict[str, Any]:
    prefill, decode = rng.choice((1, 2, 4, 8)), rng.choice((0, 0, 2, 4))
    options: dict[str, Any] = {
        "policy": rng.choice([*POLICIES, *["default"] * 4]),
        "discipline": rng.choice(list(Discipline)),
        "admission": rng.choice(list(Mode)),
        "prefill": prefill,
        "decode": decode,
        "slo": Slo(rng.choice((10.0, 30.0, 300.0)), rng.choice((0.05, 0.1, 0.3))),
        "cache_blocks": rng.choice((300, 1500, 5859)),
        "decode_factor": rng.choice((1.0, 1.9)),
        "fitted": rng.random() < 0.2,
        "replicates": rng.random() < 0.3,
        "tiers": rng.choice(((), (), (_NVME,), (_NVME, _COLD))),
        "handover_bytes_s": rng.choice((float("inf"), 10e9)),
    }
    match rng.randrange(5):
        case 0:
            options |= {"group": rng.choice((1, 2, 4)), "relay": True}
        case 1:
            options |= {"coupled": True, "decode": 0, "chunk_tokens": rng.choice((0, 256, 2048))}
        case 2:
            options |= {"decode": decode or 2, "relabels": Rules()}
        case 3:
            options |= {"failures": _drawn_failures(rng, prefill, decode)}
    return options


def _drawn_failures(rng: random.Random, prefill: int, decode: int) -> tuple[Failure, ...]:
    """Failures of each instance now and then, none before it is back from the one before."""
    failures = []
    for is_decode, count in ((False, prefill), (True, decode)):
        for instance in range(count):
            at_s = rng.uniform(0, 400)
            while at_s < 400:
                down_s = rng.uniform(1, 200)
                failures.append(Failure(instance, at_s, down_s, is_decode))
                at_s += down_s + rng.uniform(0, 400)
    return tuple(failures)


def check_end(simulation: Simulation) -> None:
    """Check that all requests have ended, and that the index is what the caches hold."""
    assert not simulation._running
    assert len(simulation._ledger) == 0
    for decode in simulation._cluster.decode:
        assert (decode.committed_requests, decode.committed_tokens) == (0, 0)
    for prefill in simulation._cluster.prefill:
        assert (len(prefill.queue), prefill.running) == (0, None)
    for record in simulation._records:
        assert record.outcome is not None
        if record.outcome is Outcome.REJECTED and not record.retries:
            assert record.prefill_s == 0
        if record.outcome is Outcome.DONE:
            assert record.ttft_s >= 0
    held: dict[int, int] = {}
    for source, cache in enumerate(simulation._caches.of_source):
        assert len(cache) <= cache.capacity
        for block in cache.blocks():
            held[block] = held.get(block, 0) | 1 << source
    assert simulation._caches.index._holders == held
    assert not simulation._caches.index._producers
