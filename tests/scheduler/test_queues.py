"""Queues: their orders, which starve no one, promises that are kept, and when a job may go before one that waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing.queues import AGEING, Discipline, Job, PrefillQueue, start_s, wait_added_s
from tests.support.clusters import ready_job


def run_queue(discipline: Discipline, arrivals: list[tuple[float, float]]) -> list[Job]:
    """Serve (arrival, service) one at a time; the jobs in the order of their starts."""
    queue, waiting = PrefillQueue(discipline), sorted(arrivals)
    now_s, started = 0.0, []
    while waiting or len(queue):
        while waiting and waiting[0][0] <= now_s:
            arrival_s, service_s = waiting.pop(0)
            came = ready_job(len(waiting), service_s=service_s, arrival_s=arrival_s, discipline=discipline)
            queue.add(came, now_s)
        job = queue.next(now_s)
        if job is None:
            now_s = waiting[0][0]
            continue
        job.started_s = now_s
        started.append(job)
        now_s += job.service_s
    return started


loads = st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 30)), min_size=1, max_size=60)


@given(loads)
def test_first_come_is_first_served(arrivals: list[tuple[float, float]]) -> None:
    served = [job.arrival_s for job in run_queue(Discipline.FCFS, arrivals)]
    assert served == sorted(served)


@given(loads)
def test_length_aware_starves_no_one(arrivals: list[tuple[float, float]]) -> None:
    """A job is overtaken only by jobs that came before its arrival + AGEING x its service."""
    started = run_queue(Discipline.LENGTH_AWARE, arrivals)
    for place, job in enumerate(started):
        for earlier in started[:place]:
            assert earlier.arrival_s <= job.arrival_s + AGEING * job.service_s


def test_endless_short_jobs_let_a_long_one_through() -> None:
    short = [(n * 1.0, 1.0) for n in range(500)]
    started = run_queue(Discipline.LENGTH_AWARE, [*short, (0.0, 30.0)])
    [long] = [job for job in started if job.service_s == 30.0]
    assert long.started_s is not None
    assert long.started_s <= AGEING * 30.0 + 2.0


@given(loads, st.floats(1, 60), st.sampled_from(Discipline))
def test_a_promise_is_kept_whoever_comes_later(
    arrivals: list[tuple[float, float]], promised_s: float, discipline: Discipline
) -> None:
    """A job that was admitted for a time to its end ends by then; one that is removed makes nobody later."""
    queue, free_s, removed = PrefillQueue(discipline), 0.0, random.Random(len(arrivals))

    def serve_until(now_s: float) -> None:
        nonlocal free_s
        while len(queue) and free_s <= now_s:
            job = queue.next(free_s)
            assert job is not None
            free_s += job.service_s
            assert free_s <= job.arrival_s + promised_s + 1e-6

    for number, (arrival_s, service_s) in enumerate(sorted(arrivals)):
        serve_until(arrival_s)
        free_s = max(free_s, arrival_s)
        job = ready_job(number, service_s=service_s, arrival_s=arrival_s, discipline=discipline)
        openings = queue.openings(free_s)
        place = queue.place(job.rank, service_s, arrival_s, openings)
        job.slack_s = promised_s - (start_s(openings[place], service_s, arrival_s) + service_s - arrival_s)
        if job.slack_s >= 0:
            queue.add(job, free_s)
        if len(queue) and removed.random() < 0.2:
            queue.remove(removed.choice(queue.jobs()))
    serve_until(float("inf"))


@given(loads)
def test_an_opening_is_the_service_of_what_goes_first(arrivals: list[tuple[float, float]]) -> None:
    queue = PrefillQueue(Discipline.LENGTH_AWARE)
    for number, (arrival_s, service_s) in enumerate(arrivals[1:]):
        job = ready_job(number, service_s=service_s, arrival_s=arrival_s, discipline=queue.discipline)
        queue.add(job, 100.0)
    rank = queue.discipline.rank(*arrivals[0])
    openings = queue.openings(100.0)
    place = queue.place(rank, arrivals[0][1], 0.0, openings)
    ahead_s = sum(job.service_s for job in queue.jobs() if job.rank <= rank)
    assert start_s(openings[place], 1.0, 0.0) == pytest.approx(100.0 + ahead_s)
    assert len(openings) - 1 - place == sum(job.rank > rank for job in queue.jobs())


@given(loads, st.floats(0.01, 30), st.floats(0, 100), st.sampled_from(Discipline))
def test_the_waiting_that_a_job_adds_is_how_much_later_those_behind_it_end(
    arrivals: list[tuple[float, float]], service_s: float, ready_s: float, discipline: Discipline
) -> None:
    """Nobody else waits for blocks; the job was deferred, so it has some behind it in both orders."""
    queue = PrefillQueue(discipline)
    for number, (arrival_s, each_s) in enumerate(arrivals):
        queue.add(ready_job(number, service_s=each_s, arrival_s=arrival_s, discipline=discipline), 100.0)
    job = ready_job(99, service_s=service_s, arrival_s=50.0, discipline=discipline)
    job.loaded_s = 100.0 + ready_s
    openings = queue.openings(100.0)
    place = queue.place(job.rank, service_s, job.loaded_s, openings)
    behind, before_s = queue.jobs()[place:], [each.finish_s for each in queue.jobs()[place:]]
    queue.add(job, 100.0)
    later_s = sum(each.finish_s - end_s for each, end_s in zip(behind, before_s, strict=True))
    assert wait_added_s(openings, place, service_s, job.loaded_s) == pytest.approx(later_s, abs=1e-6)


def test_the_waiting_that_a_job_adds_where_others_hold_it_up() -> None:
    """Openings are (free, held, later, slack): who ends by `held` goes at `free`, who does not at `later`."""
    inf = float("inf")
    later = [(0.0, 5.0, 12.0, inf), (1.0, 5.0, 12.0, inf), (20.0, inf, 20.0, inf), (21.0, inf, 21.0, inf)]
    assert wait_added_s(later, 0, 8.0, 0.0) == 16.0, "it begins at 12, and one has ended by then"
    held = [(0.0, inf, 0.0, inf), (0.0, 20.0, 30.0, inf), (2.0, 20.0, 30.0, inf), (35.0, inf, 35.0, inf)]
    assert wait_added_s(held, 0, 8.0, 3.0) == 9.0, "one that fits in before 20 stands still from 2 to 3"
    assert wait_added_s(held, 0, 18.0, 3.0) == 18.0, "one that does not, for nothing"


jobs_that_wait = st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 10)), max_size=8)


@given(jobs_that_wait, st.floats(0.01, 10), st.integers(0, 8), st.booleans())
def test_an_opening_behind_all_is_when_a_job_starts(
    waiting: list[tuple[float, float]], service_s: float, loading: int, ascending: bool
) -> None:
    """One of the jobs waits for a transfer: the others pass it as far as they end before its blocks are there. Where
    one is shorter than one ahead of it, what is left of that time may be put to better use."""
    if ascending:
        waiting, service_s = sorted(waiting, key=lambda job: job[1]), 10.0
    queue = PrefillQueue()
    for number, (loaded_s, job_s) in enumerate(waiting):
        job = ready_job(number, service_s=job_s)
        job.loaded_s = loaded_s if number == loading else 0.0
        queue.add(job, 1.0)
    expected_s = start_s(queue.openings(1.0)[-1], service_s, 1.0)
    last = ready_job(99, service_s=service_s)
    queue.add(last, 1.0)
    now_s = 1.0
    while last.started_s is None:
        found = queue.next(now_s)
        if found is None:
            now_s = min(job.loaded_s for job in queue.jobs() if job.loaded_s > now_s)
        else:
            found.started_s = now_s
            now_s += found.service_s
    assert last.started_s <= expected_s + 1e-6
    if ascending:
        assert last.started_s == pytest.approx(expected_s)


def test_a_job_whose_producer_is_elsewhere_is_waited_for_once_that_runs() -> None:
    """Blocks are there at 10, made from 7 on: what starts before 7 passes; later ones wait or end by 10."""
    producer = ready_job(9, service_s=3.0)
    producer.instance, producer.finish_s = 1, 10.0
    queue = PrefillQueue()
    queue.add(Job(0, 0, arrival_s=0, service_s=1, loaded_s=0, finish_s=11, rank=0, after={producer}), 0.0)
    queue.add(ready_job(1, service_s=8.0), 0.0)
    openings = queue.openings(0.0)
    assert [start_s(opening, 1.5, 0.0) for opening in openings] == [0.0, 0.0, 8.0]
    assert [start_s(opening, 2.5, 0.0) for opening in openings] == [0.0, 0.0, 11.0]


def test_a_job_behind_becomes_later_by_what_the_one_before_it_waits_for() -> None:
    queue = PrefillQueue(Discipline.LENGTH_AWARE)
    behind = ready_job(0, service_s=9.0, discipline=queue.discipline)
    behind.slack_s = 4.0
    queue.add(behind, 0.0)
    for loaded_s, passes in ((4.5, False), (2.5, True)):
        job = ready_job(1, service_s=1.0, discipline=queue.discipline)
        job.loaded_s = loaded_s
        queue.add(job, 0.0)
        assert (queue.jobs()[0] is job) == passes
        queue.remove(job)
    assert behind.slack_s == pytest.approx(1.5)


def test_a_job_that_waits_for_blocks_is_passed_only_by_what_ends_in_time() -> None:
    queue = PrefillQueue()
    waiting = ready_job(0, service_s=1.0)
    waiting.loaded_s = 0.5
    queue.add(waiting, 0.0)
    queue.add(ready_job(1, service_s=2.0, arrival_s=0.1), 0.0)
    queue.add(ready_job(2, service_s=0.3, arrival_s=0.2), 0.0)
    first = queue.next(0.2)
    assert first is not None
    assert first.number == 2
    assert queue.next(0.2) is None
    assert queue.next(0.5) is waiting


def test_a_job_whose_producer_has_not_started_holds_nobody_up() -> None:
    queue, producer = PrefillQueue(), ready_job(9, service_s=5.0)
    follower = Job(0, 0, arrival_s=0, service_s=1, loaded_s=0, finish_s=1, rank=0, after={producer})
    queue.add(follower, 0.0)
    queue.add(ready_job(1, service_s=2.0, arrival_s=0.1), 0.0)
    passing = queue.next(1.0)
    assert passing is not None
    assert passing.number == 1
    assert queue.next(1.0) is None
    assert producer.finished() == [follower]
    assert queue.next(1.0) is follower
