"""Requests that were committed and are not over: the one place that turns decisions into state.

Responsibility: `Ledger` applies a decision to the cluster (queue, sources, decode instance) and reverts it when the
request joins its batch, is refused there, or is given up. So policies see everything in flight, not only what instances
report: a prefill under way is load on a decode instance that does not know of it yet.

Invariants: a request is in flight from `commit` to `joined` or `dropped`, once; for each decode instance the committed
requests and tokens are the sums over its flights.

Concurrency: one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.errors import Exists, InvalidRequest, NotFound
from scheduler.routing.cluster import Cluster
from scheduler.routing.decisions import Decision, Prompt
from scheduler.routing.queues import Job


@dataclass(slots=True)
class Flight:
    """A request between its commitment and its place in a batch."""

    job: Job
    decode: int | None
    tokens: int


class Ledger:
    """All flights of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._flights: dict[int, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def jobs(self) -> list[Job]:
        """Return the prefills that are committed and not done."""
        return [flight.job for flight in self._flights.values() if not flight.job.done]

    def decode_of(self, number: int) -> int | None:
        """Return the decode instance that the request goes to. Raises NotFound."""
        return self._flight(number).decode

    def commit(
        self,
        number: int,
        prompt: Prompt,
        decision: Decision,
        now_s: float,
        *,
        promised_s: float = float("inf"),
    ) -> Job:
        """Put the request into its queue, occupy the sources that it loads from, and count it on its decode instance.

        `promised_s`: the TTFT that the request was admitted for.

        Raises Exists for a number in flight, InvalidRequest for a decision without an instance.
        """
        if number in self._flights:
            raise Exists(f"request {number} is in flight")
        chosen = decision.prefill
        if chosen is None:
            raise InvalidRequest(f"request {number}: no instance takes work")
        loaded_s = now_s
        for load in chosen.loads:
            source = self._cluster.sources[load.source]
            source.free_at_s = max(source.free_at_s, now_s) + load.busy_s
            loaded_s = now_s + chosen.ready_s
        job = Job(
            number,
            chosen.instance,
            arrival_s=prompt.arrival_s,
            service_s=chosen.prefill_s,
            loaded_s=loaded_s,
            finish_s=now_s + chosen.ttft_s,
            rank=chosen.rank,
            slack_s=promised_s - decision.ttft_s,
            after=set(chosen.after),
        )
        instance = self._cluster.prefill[chosen.instance]
        instance.queue.add(job, instance.free_s(now_s))
        decode = None if decision.decode is None else decision.decode.instance
        self._flights[number] = Flight(job, decode, prompt.tokens)
        self._count(decode, 1, prompt.tokens)
        return job

    def start(self, instance: int, now_s: float) -> Job | None:
        """Return the job that an idle instance starts now, if any may."""
        prefill = self._cluster.prefill[instance]
        if prefill.running is not None:
            return None
        job = prefill.queue.next(now_s)
        if job is not None:
            job.started_s = now_s
            job.finish_s = now_s + job.service_s
            prefill.running = job
        return job

    def prefilled(self, job: Job) -> list[Job]:
        """End a prefill that its instance has done, and return the jobs that waited for its blocks."""
        self._cluster.prefill[job.instance].running = None
        return job.finished()

    def joined(self, number: int) -> None:
        """End a flight whose request is in its batch: the instance reports it from here on. Raises NotFound."""
        self._end(number)

    def dropped(self, number: int) -> list[Job]:
        """Drop a request that was refused or given up, and return the jobs that waited for its blocks. Raises
        NotFound."""
        job = self._end(number).job
        if job.done:
            return []
        instance = self._cluster.prefill[job.instance]
        if job.started_s is None:
            instance.queue.remove(job)
        else:
            instance.running = None
        return job.finished()

    def _end(self, number: int) -> Flight:
        flight = self._flight(number)
        del self._flights[number]
        self._count(flight.decode, -1, -flight.tokens)
        return flight

    def _flight(self, number: int) -> Flight:
        try:
            return self._flights[number]
        except KeyError:
            raise NotFound(f"request {number} is not in flight") from None

    def _count(self, decode: int | None, requests: int, tokens: int) -> None:
        if decode is not None:
            instance = self._cluster.decode[decode]
            instance.committed_requests += requests
            instance.committed_tokens += tokens
