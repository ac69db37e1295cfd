"""A queue's promises against a plain model of an instance, with jobs that wait for transfers or producers elsewhere."""

from __future__ import annotations

import heapq
import random
from typing import NamedTuple

import pytest

from scheduler.routing.queues import Discipline, Job, PrefillQueue, start_s

PROMISED_S = 30.0


class Arrival(NamedTuple):
    """A request that comes `after_s` after the one before it."""

    after_s: float
    service_s: float
    wait_s: float
    """Until its blocks are there."""
    made_s: float
    """How long the prefill elsewhere takes that makes its blocks, the last part of `wait_s`; 0 where they are sent."""


class Instance:
    """An instance that does what its queue says; a producer elsewhere starts and ends when it was predicted to."""

    def __init__(self, discipline: Discipline) -> None:
        self.queue = PrefillQueue(discipline)
        self.now_s = self.free_s = 0.0
        self.late_s: dict[int, float] = {}
        """By how much each admitted request that is done came after its promise; below 0 in time."""
        self._producers: list[tuple[float, int, Job]] = []
        self._wakes_s: list[float] = []

    def arrive(self, number: int, arrival: Arrival) -> None:
        """Admit a request if it would be in time."""
        self.run_until(self.now_s + arrival.after_s)
        now_s, free_s = self.now_s, max(self.free_s, self.now_s)
        ready_s, producers = now_s + arrival.wait_s, set()
        if 0.0 < arrival.made_s <= arrival.wait_s:
            producers = {_job(-number, 1, arrival.made_s, ready_s, now_s)}
        rank = self.queue.discipline.rank(now_s, arrival.service_s)
        openings = self.queue.openings(free_s)
        place = self.queue.place(rank, arrival.service_s, ready_s, openings)
        finish_s = max(start_s(openings[place], arrival.service_s, ready_s), ready_s) + arrival.service_s
        if finish_s > now_s + PROMISED_S:
            return
        job = _job(number, 0, arrival.service_s, finish_s, now_s, producers)
        job.loaded_s, job.rank = now_s if producers else ready_s, rank
        job.slack_s = now_s + PROMISED_S - finish_s
        self.queue.add(job, free_s)
        for producer in producers:
            heapq.heappush(self._producers, (ready_s, number, producer))
            heapq.heappush(self._wakes_s, ready_s - producer.service_s)
        heapq.heappush(self._wakes_s, ready_s)
        self._start()

    def run_until(self, then_s: float) -> None:
        while self._wakes_s and self._wakes_s[0] <= then_s:
            self.now_s = heapq.heappop(self._wakes_s)
            self._start()
        self.now_s = then_s

    def _start(self) -> None:
        for finish_s, _, producer in self._producers:
            if producer.started_s is None and finish_s - producer.service_s <= self.now_s:
                producer.started_s = finish_s - producer.service_s
        while self._producers and self._producers[0][0] <= self.now_s:
            heapq.heappop(self._producers)[2].finished()
        if self.free_s > self.now_s:
            return
        job = self.queue.next(self.now_s)
        if job is not None:
            self.free_s = self.now_s + job.service_s
            heapq.heappush(self._wakes_s, self.free_s)
            self.late_s[job.number] = self.free_s - job.arrival_s - PROMISED_S


def _job(
    number: int, instance: int, service_s: float, finish_s: float, now_s: float, after: set[Job] | None = None
) -> Job:
    return Job(
        number,
        instance,
        arrival_s=now_s,
        service_s=service_s,
        loaded_s=now_s,
        finish_s=finish_s,
        rank=0.0,
        after=after or set(),
    )


def late_s(discipline: Discipline, arrivals: list[Arrival]) -> float:
    """Return how late the latest of the admitted requests was."""
    instance = Instance(discipline)
    for number, arrival in enumerate(arrivals, 1):
        instance.arrive(number, arrival)
    instance.run_until(float("inf"))
    assert not len(instance.queue)
    return max(instance.late_s.values(), default=-PROMISED_S)


def drawn(seed: int) -> list[Arrival]:
    """Draw requests of all lengths, one of which waits for blocks that another instance begins to make later."""
    rng = random.Random(seed)
    count, load = rng.randint(3, 60), rng.choice((0.7, 1.0, 1.5, 2.5))
    waits = rng.randrange(count)
    arrivals = []
    for number in range(count):
        service_s = rng.uniform(*rng.choice(((0.05, 1), (0.05, 1), (1, 5), (5, 25))))
        wait_s = rng.uniform(0, 20) if number == waits else 0.0
        arrivals.append(Arrival(rng.expovariate(load / 4.5), service_s, wait_s, rng.uniform(0, wait_s)))
    return arrivals


@pytest.mark.parametrize("discipline", Discipline)
def test_no_promise_is_broken_whoever_waits_for_blocks_that_are_made_elsewhere(
    discipline: Discipline,
) -> None:
    late = {seed: found_s for seed in range(400) if (found_s := late_s(discipline, drawn(seed))) > 1e-6}
    assert late == {}


AHEAD = Arrival(20.0, 7.0, 16.0, 2.0)
"""It waits for 16 s, and its blocks begin to be made after 14."""


def test_what_would_break_the_promise_of_one_that_waits_does_not_pass_it() -> None:
    """It has to start by 23 s; a prefill of 22 s that comes after 2 s would end at 24."""
    instance = Instance(Discipline.FCFS)
    instance.arrive(1, AHEAD)
    instance.arrive(2, Arrival(2.0, 22.0, 0.0, 0.0))
    assert list(instance.late_s) == []
    instance.arrive(3, Arrival(0.0, 20.0, 0.0, 0.0))
    assert list(instance.late_s) == [3]


def test_who_is_passed_twice_bounds_the_second_by_what_the_first_took() -> None:
    """The first one passes at 7 s and ends at 20. One that waits until 25 would let the job that waits end at 32."""
    instance = Instance(Discipline.LENGTH_AWARE)
    for number, arrival in enumerate((AHEAD, Arrival(7.0, 13.0, 0.0, 0.0), Arrival(6.0, 0.1, 12.0, 0.0)), 1):
        instance.arrive(number, arrival)
    instance.run_until(float("inf"))
    assert list(instance.late_s) == [2, 1, 3]
    assert max(instance.late_s.values()) < 0.0


def test_everyone_behind_a_place_bounds_who_takes_it() -> None:
    """The last one would delay whom it passes first by its service, and then by its wait as well."""
    arrivals = [
        Arrival(42.67, 10.96, 6.7, 0.0),
        Arrival(4.83, 0.21, 8.92, 0.0),
        Arrival(1.77, 4.93, 0.0, 0.0),
        Arrival(2.19, 4.13, 0.0, 0.0),
        Arrival(0.49, 0.56, 6.74, 0.0),
    ]
    assert late_s(Discipline.LENGTH_AWARE, arrivals) < 0.0


def test_one_whose_own_blocks_come_late_starts_when_they_are_there() -> None:
    """It would pass the one before it if it started at once; it starts 1.5 s later."""
    arrivals = [Arrival(183.1, 4.53, 10.57, 4.09), Arrival(1.35, 24.09, 1.46, 0.0)]
    assert late_s(Discipline.FCFS, arrivals) < 0.0
