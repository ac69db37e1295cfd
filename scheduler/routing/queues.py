"""The order in which an instance prefills what was committed to it.

Responsibility: two disciplines over one queue. First come, first served ranks a job by its arrival. The
length-aware discipline ranks it by arrival + AGEING x predicted prefill time: short jobs overtake long ones, and
waiting counts as being short.

Invariants:
- No job starves. A rank never changes, so a job of service s that arrived at t is overtaken only by jobs that
  arrive before t + AGEING x s: finitely many, however long the overload lasts.
- Nobody overtakes a job whose promised TTFT that would break, nor one behind which that is. A job's slack is what its
  predicted finish leaves of the promise, or the gap that it starts in where that is less. Who goes before it takes its
  service time of that, and what it waits itself for its blocks. Without this rule, at 3 x the arrivals of the public
  conversation trace, requests admitted for 30 s waited for up to 82 s. Each job that is added is followed by new
  predictions of when all end.
- A job whose blocks nobody has begun to make is passed as long as its promise, and those of the jobs before it that
  wait too, stay possible. So a queue that has work may stand still, until such a promise can be kept no more at most.
- Both bound what was predicted, not what happens: a promise may break where a prefill elsewhere starts later than
  predicted, and where several jobs of a queue wait for their blocks at a time.
- A job may start when its blocks are there: its transfers are over (`loaded_s`), and the prefills whose blocks
  it reads are done (`after`).
- A job that comes next in order and waits for a transfer or for a prefill that runs is not pushed back: a
  later one goes ahead only if it ends before that (backfill, as batch schedulers do). Starting whatever is ready
  instead cost 8 % of the mean TTFT of the public conversation trace: a job 5 ms away from its blocks waited
  for a whole prefill.

Costs: adding and `openings` are a walk over the queue, whose length admission bounds.

Concurrency: none; the caller says what time it is.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

AGEING = 2.0
"""Seconds of waiting that weigh as much as one second of service. At 2 x the arrivals of the public conversation trace
1 gives a mean TTFT of 2.40 s and a longest of 58 s, 2 gives 1.88 and 80, 4 gives 1.77 and 96."""


INFINITY = float("inf")

Opening = tuple[float, float, float, float]
"""When an instance is free, by when a job has to end that starts then, when the instance is free for those that
end later, and how much later the job at this place may become."""
_Waiting = tuple[float, float, float, float, int]
"""A job that waits for its blocks: when they are there, from when on it holds others up, its service, when it has to
end at the latest, and its place."""


class Discipline(Enum):
    """Says in which order jobs go: of arrival, or short ones earlier."""

    FCFS = "fcfs"
    LENGTH_AWARE = "length-aware"

    def rank(self, arrival_s: float, service_s: float) -> float:
        """Return a job's rank; the smaller one goes first."""
        return arrival_s + AGEING * service_s if self is Discipline.LENGTH_AWARE else arrival_s


@dataclass(slots=True, eq=False)
class Job:
    """A prefill that was committed to an instance; once `done` it is in no queue."""

    number: int
    instance: int
    _: KW_ONLY
    arrival_s: float
    service_s: float
    loaded_s: float
    finish_s: float
    """When the prefill ends: predicted at the commitment, and exact from its start on."""
    rank: float
    slack_s: float = float("inf")
    """How much later than predicted the prefill may end."""
    after: set[Job] = field(default_factory=set)
    """Jobs whose blocks it waits for; those that are done are left out."""
    started_s: float | None = None
    done: bool = False
    followers: list[Job] = field(default_factory=list)
    """Jobs that wait for its blocks."""

    def __post_init__(self) -> None:
        self.after = {job for job in self.after if not job.done}
        for job in self.after:
            job.followers.append(self)

    def blocks_s(self) -> tuple[float, float]:
        """Return when its blocks are there, as predicted, and from when on it holds others up for them: when all the
        prefills that make them have started. What its own instance makes is there in turn."""
        ready_s, holds_s = self.loaded_s, 0.0
        for job in self.after:
            if job.instance != self.instance:
                ready_s = max(ready_s, job.finish_s)
                if job.started_s is None:
                    holds_s = max(holds_s, job.finish_s - job.service_s)
        return ready_s, holds_s

    def finished(self) -> list[Job]:
        """Mark the job done, and return the jobs that waited for its blocks."""
        self.done = True
        followers, self.followers = self.followers, []
        for job in followers:
            job.after.discard(self)
        return followers


class PrefillQueue:
    """Jobs of one instance that have not started."""

    __slots__ = ("_jobs", "_ranks", "discipline")

    def __init__(self, discipline: Discipline = Discipline.FCFS) -> None:
        self.discipline = discipline
        self._ranks: list[float] = []
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def jobs(self) -> tuple[Job, ...]:
        """Return the jobs in order of rank."""
        return tuple(self._jobs)

    def last_rank(self) -> float:
        """Return the rank of the last job; minus infinity without one."""
        return self._ranks[-1] if self._ranks else -INFINITY

    def openings(self, free_s: float) -> list[Opening]:
        """Return the opening at each place of an instance that is free then, the last one behind all jobs."""
        return self._walk(free_s)[0]

    def place(self, rank: float, service_s: float, ready_s: float, openings: list[Opening]) -> int:
        """Return where such a job would go: by rank, but behind each job that, or one behind it, cannot let it pass.

        `ready_s`: when its blocks are there.
        """
        place, first, slack_s = len(self._jobs), bisect_right(self._ranks, rank), INFINITY
        while place > first:
            opening = openings[place - 1]
            wait_s = ready_s - start_s(opening, service_s, ready_s)
            slack_s = min(slack_s, opening[3])
            if slack_s < (service_s + wait_s if wait_s > 0.0 else service_s):
                break
            place -= 1
        return place

    def service_s(self, place: int) -> float:
        """Return the service of all jobs before a place."""
        return sum(job.service_s for job in self._jobs[:place])

    def add(self, job: Job, free_s: float) -> None:
        """Put a job into its place in an instance that is free then, and predict anew when each job ends."""
        place = self.place(job.rank, job.service_s, job.blocks_s()[0], self.openings(free_s))
        if place:
            job.rank = max(job.rank, self._ranks[place - 1])
        self._ranks.insert(place, job.rank)
        self._jobs.insert(place, job)
        for each, end_s in zip(self._jobs, self._walk(free_s)[1], strict=True):
            each.slack_s -= end_s - each.finish_s
            each.finish_s = end_s

    def remove(self, job: Job) -> None:
        """Remove a job that will not run. Raises ValueError for one that is not here."""
        place = self._jobs.index(job)
        self._pop(place)
        for behind in self._jobs[place:]:
            behind.slack_s += job.service_s
            behind.finish_s -= job.service_s

    def next(self, now_s: float) -> Job | None:
        """Remove and return the job to start now; None where none may."""
        held_s, passed_s, is_held = INFINITY, 0.0, False
        for place, job in enumerate(self._jobs):
            is_ready = job.loaded_s <= now_s and not job.after
            if is_ready and now_s + job.service_s <= held_s:
                return self._pop(place)
            if is_held:
                continue
            if not is_ready and all(other.started_s is not None for other in job.after):
                held_s = min(held_s, max([job.loaded_s, *(other.finish_s for other in job.after)]))
                is_held = True
                continue
            passed_s += job.service_s
            latest_s = job.finish_s + job.slack_s - passed_s
            if latest_s >= max(now_s, job.blocks_s()[0]):
                held_s = min(held_s, latest_s)
        return None

    def _walk(self, free_s: float) -> tuple[list[Opening], list[float]]:
        """Return the opening at each place of an instance that is free then, and when each job ends.

        A job that waits for its blocks is passed as `next` does it.
        """
        in_turn = self._in_turn(free_s)
        if in_turn is not None:
            return in_turn
        gaps: list[tuple[float, float, float]] = []
        ends_s, margins_s = [0.0] * len(self._jobs), [INFINITY] * len(self._jobs)
        waiting: list[_Waiting] = []
        for place, job in enumerate(self._jobs):
            gaps.append(_gap(waiting, free_s, ends_s) if waiting else (free_s, INFINITY, free_s))
            free_s = gaps[-1][0]
            ready_s, holds_s = job.blocks_s() if job.after else (job.loaded_s, 0.0)
            if ready_s > free_s:
                waiting.append((ready_s, holds_s, job.service_s, job.finish_s + job.slack_s, place))
                continue
            if waiting:
                free_s = _advance(waiting, free_s, job.service_s, ends_s)
                if job.slack_s < INFINITY:
                    margins_s[place] = _margin_s(waiting, free_s, job.service_s)
            free_s += job.service_s
            ends_s[place] = free_s
        gaps.append(_gap(waiting, free_s, ends_s))
        free_s = _advance(waiting, gaps[-1][0], INFINITY, ends_s)
        for ready_s, _, service_s, _, place in waiting:
            free_s = max(ready_s, free_s) + service_s
            ends_s[place] = free_s
        openings = [
            (*gap, min(margin_s, job.slack_s - (end_s - job.finish_s)))
            for gap, margin_s, job, end_s in zip(gaps, margins_s, self._jobs, ends_s, strict=False)
        ]
        openings.append((*gaps[-1], INFINITY))
        return openings, ends_s

    def _in_turn(self, free_s: float) -> tuple[list[Opening], list[float]] | None:
        """Return what `_walk` does where no job waits for its blocks in its turn, as in most queues; None elsewhere."""
        openings: list[Opening] = []
        ends_s: list[float] = []
        for job in self._jobs:
            if (job.blocks_s()[0] if job.after else job.loaded_s) > free_s:
                return None
            end_s = free_s + job.service_s
            openings.append((free_s, INFINITY, free_s, job.slack_s - (end_s - job.finish_s)))
            ends_s.append(end_s)
            free_s = end_s
        openings.append((free_s, INFINITY, free_s, INFINITY))
        return openings, ends_s

    def _pop(self, place: int) -> Job:
        del self._ranks[place]
        return self._jobs.pop(place)


def start_s(opening: Opening, service_s: float, ready_s: float) -> float:
    """Return when an instance is free for a job of this service whose blocks are there at `ready_s`."""
    free_s, held_s, later_s, _ = opening
    return free_s if max(free_s, ready_s) + service_s <= held_s else later_s


def wait_added_s(openings: list[Opening], place: int, service_s: float, ready_s: float) -> float:
    """Return the waiting that a job which takes this place adds to all those behind it.

    What is predicted to end before it begins is not held up. The others wait for its service, and for as long as the
    instance stands still for its blocks. One that waits for blocks itself counts as ended where the instance is free
    for what is behind it: left out is how that wait and this job's fall together.
    """
    last = len(openings) - 1
    begin_s = max(start_s(openings[place], service_s, ready_s), ready_s)
    while place < last and openings[place + 1][0] <= begin_s:
        place += 1
    still_s = max(begin_s - start_s(openings[place], service_s, ready_s), 0.0)
    return (last - place) * (still_s + service_s)


def _gap(waiting: list[_Waiting], free_s: float, ends_s: list[float]) -> tuple[float, float, float]:
    free_s = _advance(waiting, free_s, 0.0, ends_s)
    held_s = _held_s(waiting, free_s)
    later_s = free_s if held_s == INFINITY else _advance(waiting.copy(), free_s, INFINITY, ends_s.copy())
    return free_s, held_s, later_s


def _held_s(waiting: list[_Waiting], free_s: float) -> float:
    """Return by when a job has to end that goes before those that wait; infinity where it may take any time."""
    held_s, passed_s = INFINITY, 0.0
    for ready_s, holds_s, service_s, due_s, _ in waiting:
        if holds_s <= free_s:
            return min(held_s, ready_s)
        passed_s += service_s
        if due_s - passed_s >= ready_s:
            held_s = min(held_s, due_s - passed_s)
    return held_s


def _advance(waiting: list[_Waiting], free_s: float, service_s: float, ends_s: list[float]) -> float:
    """Start the jobs that go before one of this service, removing them, and return when it starts itself."""
    place, passed_s = 0, 0.0
    while place < len(waiting):
        ready_s, holds_s, waiting_service_s, due_s, at = waiting[place]
        passed_s += waiting_service_s
        latest_s = ready_s if holds_s <= free_s else due_s - passed_s
        if ready_s <= free_s or free_s + service_s > latest_s >= ready_s:
            free_s = max(ready_s, free_s) + waiting_service_s
            ends_s[at] = free_s
            del waiting[place]
            place, passed_s = 0, 0.0
        else:
            place += 1
    return free_s


def _margin_s(waiting: list[_Waiting], free_s: float, service_s: float) -> float:
    """Return how much later a job of this service may start and still go before those that wait."""
    margin_s, passed_s, end_s = INFINITY, 0.0, free_s + service_s
    for ready_s, holds_s, waiting_service_s, due_s, _ in waiting:
        if holds_s <= free_s:
            return min(margin_s, ready_s - end_s)
        passed_s += waiting_service_s
        if due_s - passed_s >= ready_s:
            margin_s = min(margin_s, due_s - passed_s - end_s)
        margin_s = min(margin_s, max(ready_s - end_s, holds_s - free_s))
    return margin_s
