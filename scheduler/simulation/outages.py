"""Simulated failures: the requests and the DRAM of an instance are gone, and it comes back empty.

Responsibility: which requests a failure interrupts, and their way back to routing. A prefill instance's failure
interrupts what was committed to it, what waits for blocks that it was to make, and what still loads from it; they are
routed again as they arrived. A decode instance's failure interrupts its batch: those requests are prefilled again with
the tokens that are out, and their TBT has the gap.

Invariants: a request that is interrupted is in no queue, batch or flight until it is routed again.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from scheduler.routing.cluster import Cluster
from scheduler.routing.commitments import Ledger
from scheduler.routing.decisions import Load
from scheduler.routing.queues import Job
from scheduler.simulation.caches import Caches
from scheduler.simulation.event_queue import Events
from scheduler.simulation.nodes import DecodeNode
from scheduler.simulation.options import Failure


class Running(NamedTuple):
    """A prefill that was committed."""

    blocks: tuple[int, ...]
    lengths: tuple[int, int]
    """Tokens of the prompt, and how many of them are reused."""
    loads: tuple[Load, ...] = ()


class Outages:
    """The failures of a run. `again(number, tokens_out)` routes a request again, of which so many tokens are out."""

    def __init__(
        self,
        events: Events,
        cluster: Cluster,
        ledger: Ledger,
        caches: Caches,
        decodes: list[DecodeNode],
        running: Mapping[int, Running],
        again: Callable[[int, int], None],
    ) -> None:
        self._events = events
        self._cluster = cluster
        self._ledger = ledger
        self._caches = caches
        self._decodes = decodes
        self._running = running
        self._again = again
        self.pending = 0
        """Failures and returns to come."""
        self.down_decodes: set[int] = set()

    def schedule(self, failures: Iterable[Failure]) -> None:
        """Have the failures happen."""
        for failure in failures:
            self.pending += 2
            self._events.at(
                failure.at_s, self._decode_fails if failure.decode else self._prefill_fails, failure
            )
            self._events.at(failure.at_s + failure.down_s, self._back, failure)

    def _back(self, failure: Failure) -> None:
        self.pending -= 1
        if failure.decode:
            self.down_decodes.discard(failure.instance)
            self._cluster.decode[failure.instance].draining = False
        else:
            self._cluster.prefill[failure.instance].draining = False
            self._caches.back(failure.instance)

    def _decode_fails(self, failure: Failure) -> None:
        self.pending -= 1
        self.down_decodes.add(failure.instance)
        self._cluster.decode[failure.instance].draining = True
        node = self._decodes[failure.instance]
        node.advance(self._events.now_s)
        for number, tokens_out in node.fail():
            self._again(number, tokens_out)

    def _prefill_fails(self, failure: Failure) -> None:
        self.pending -= 1
        self._cluster.prefill[failure.instance].draining = True
        interrupted = self._interrupted(failure.instance)
        self._caches.fail(failure.instance)
        for job in interrupted:
            loads = self._running[job.number].loads
            loaded = {
                place
                for load in loads
                if load.source == failure.instance
                for place in range(load.first_block, load.first_block + load.blocks)
            }
            self._caches.cancel(self._running[job.number].blocks, job, loaded)
            self._ledger.dropped(job.number)
        for job in interrupted:
            self._again(job.number, 0)

    def _interrupted(self, instance: int) -> list[Job]:
        """Return the prefills that end with an instance, in the order of their commitment."""
        jobs, now_s = self._ledger.jobs(), self._events.now_s
        found = {
            job
            for job in jobs
            if job.instance == instance
            or (
                job.loaded_s > now_s
                and any(load.source == instance for load in self._running[job.number].loads)
            )
        }
        behind = list(found)
        while behind:
            for follower in behind.pop().followers:
                if follower not in found:
                    found.add(follower)
                    behind.append(follower)
        return [job for job in jobs if job in found]
