"""How late the latest request was that had been admitted for 30 s: `python -m tests.support.promise_runs`.

Each line: the traffic, then for each discipline of the queues how many were served, how many of them late, by how many
seconds the latest, and the mean TTFT.
"""

from __future__ import annotations

from statistics import fmean

from scheduler.routing.admission import Mode, Slo
from scheduler.routing.queues import Discipline
from scheduler.simulation.options import Options
from scheduler.simulation.results import Outcome
from scheduler.simulation.simulate import simulate
from scheduler.simulation.traces import Request
from tests.support.routing_runs import Pooled
from tests.support.trace_families import FAMILIES, long_agents

TTFT_S = 30.0
INSTANCES, BLOCKS = 4, 1500
SEEDS = (5, 6, 7)


def line(trace: list[Request], speed: float) -> str:
    """Run both disciplines and return their figures."""
    figures = []
    for discipline in Discipline:
        options = Options(
            discipline=discipline,
            admission=Mode.DEFAULT,
            slo=Slo(ttft_s=TTFT_S),
            prefill=INSTANCES,
            cache_blocks=BLOCKS,
            speed=speed,
        )
        records = simulate(trace, options).records
        ttfts_s = [record.ttft_s for record in records if record.outcome is Outcome.DONE]
        late_s = [ttft_s - TTFT_S for ttft_s in ttfts_s if ttft_s > TTFT_S + 1e-6]
        latest_s = max(late_s, default=0.0)
        figures.append(f"{discipline.value} {len(ttfts_s)} {len(late_s)} {latest_s:.2f} {fmean(ttfts_s):.2f}")
    return "; ".join(figures)


def main() -> None:
    for family in ("documents", "chat", "forks", "long agents"):
        for seed in SEEDS:
            print(f"{family}, seed {seed}, x2: {line(FAMILIES[family](seed, 1500), 2.0)}", flush=True)
    for seed in SEEDS:
        trace = long_agents(seed, 500)
        pooled = Pooled(trace, BLOCKS, INSTANCES)
        for load in (0.85, 1.0, 1.3):
            print(f"long agents, seed {seed}, load {load}: {line(trace, pooled.speed(load))}", flush=True)


if __name__ == "__main__":
    main()
