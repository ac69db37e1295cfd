"""Clusters in any state, and prompts for them: by hypothesis, or drawn from a seed for golden decisions."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import strategies as st

from scheduler.routing.cluster import Cluster, uniform_cluster
from scheduler.routing.cost import CostModel, table_costs
from scheduler.routing.decisions import Prompt
from scheduler.routing.prefix_index import Run
from scheduler.routing.queues import Discipline, Job
from scheduler.simulation.traces import BLOCK_TOKENS

COSTS = table_costs()


class Scene(NamedTuple):
    """One routing question."""

    prompt: Prompt
    cluster: Cluster
    costs: CostModel
    now_s: float


def scene(rng: random.Random) -> Scene:
    """A question drawn from `rng`; every part of the state varies."""
    now_s = rng.uniform(0, 100)
    discipline = rng.choice(list(Discipline))
    cluster = uniform_cluster(
        rng.randint(1, 5),
        rng.randint(0, 4),
        network_bytes_s=rng.choice((87e9, 5e9, 1e9)),
        discipline=discipline,
    )
    jobs = _fill_queues(rng, cluster, now_s)
    for source in cluster.sources:
        source.free_at_s = now_s + rng.choice((-1.0, 0.0, 0.3, 3.0))
        source.latency_s = rng.choice((0.0, 0.001))
    for decode in cluster.decode:
        decode.draining = rng.random() < 0.2
        decode.active_requests = rng.randint(0, 30)
        decode.active_tokens = decode.active_requests * rng.randint(100, 20_000)
        decode.committed_requests = rng.randint(0, 5)
        decode.committed_tokens = decode.committed_requests * rng.randint(100, 20_000)
    if cluster.decode and rng.random() < 0.2:
        cluster.reserved_decode = rng.randrange(len(cluster.decode))
    runs = tuple(_run(rng, cluster, jobs) for _ in range(rng.randint(0, 4)))
    blocks = sum(run.blocks for run in runs) + rng.randint(0, 60)
    tokens = max(blocks * BLOCK_TOKENS - rng.randint(0, BLOCK_TOKENS - 1), 1)
    holds = cluster.reserved_decode is not None and rng.random() < 0.3
    prompt = Prompt(now_s - rng.choice((0.0, 2.0)), tokens, runs, BLOCK_TOKENS, holds)
    return Scene(prompt, cluster, COSTS, now_s)


def _fill_queues(rng: random.Random, cluster: Cluster, now_s: float) -> list[Job]:
    jobs: list[Job] = []
    for n, instance in enumerate(cluster.prefill):
        instance.draining = rng.random() < 0.2
        for place in range(rng.choice((0, 0, 1, 2, 6))):
            service_s = rng.uniform(0.02, 8)
            arrival_s = now_s - rng.uniform(0, 10)
            job = Job(
                len(jobs),
                n,
                arrival_s=arrival_s,
                service_s=service_s,
                loaded_s=now_s,
                finish_s=now_s + rng.uniform(0, 20),
                rank=instance.queue.discipline.rank(arrival_s, service_s),
            )
            jobs.append(job)
            if place == 0:
                job.started_s = now_s - 1
                instance.running = job
            else:
                instance.queue.add(job, now_s)
    return jobs


def _run(rng: random.Random, cluster: Cluster, jobs: list[Job]) -> Run:
    if jobs and rng.random() < 0.3:
        producer = rng.choice(jobs)
        return Run(1 << producer.instance, rng.randint(1, 30), producer)
    return Run(rng.randrange(1, 1 << len(cluster.prefill)), rng.randint(1, 60), None)


scenes = st.integers(0, 1 << 64).map(lambda seed: scene(random.Random(seed)))


def ready_job(
    number: int, *, service_s: float, arrival_s: float = 0.0, discipline: Discipline = Discipline.FCFS
) -> Job:
    """A job of instance 0 whose blocks are there when it arrives."""
    return Job(
        number,
        0,
        arrival_s=arrival_s,
        service_s=service_s,
        loaded_s=arrival_s,
        finish_s=arrival_s + service_s,
        rank=discipline.rank(arrival_s, service_s),
    )
