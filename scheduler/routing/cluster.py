"""The cluster as the scheduler knows it: the explicit state that policies read.

Responsibility: instances, their sources of blocks, and what was committed to them. The Conductor keeps it from
the nodes' reports, the simulator from its own events. Policies only read it; `scheduler.routing.commitments` changes
it.

Concurrency: one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.routing.queues import Discipline, Job, PrefillQueue

DEFAULT_ANSWER_TOKENS = 300.0
"""The mean length of answers before any was seen: chat answers of the public traces are about that long."""
ANSWERS_REMEMBERED = 1000
"""The mean length of answers follows about the last so many."""


@dataclass(slots=True)
class Source:
    """One tier of one node, read by one transfer after the other."""

    node: int | None
    """The prefill instance on its node; None for a tier of no node, such as an S3 bucket."""
    tier: str
    bytes_s: float
    latency_s: float = 0.0
    free_at_s: float = 0.0
    """When the committed transfers from it are over."""

    def send_s(self, size_bytes: int) -> float:
        """Return how long so many bytes occupy it."""
        return self.latency_s + size_bytes / self.bytes_s


@dataclass(slots=True)
class PrefillInstance:
    """One engine that prefills, one prompt at a time."""

    name: str
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    running: Job | None = None
    draining: bool = False
    """Whether it takes no more requests; its blocks may still be read."""

    def free_s(self, now_s: float) -> float:
        """Return when the prefill that runs is over; now where none runs."""
        return max(self.running.finish_s, now_s) if self.running is not None else now_s


@dataclass(slots=True)
class DecodeInstance:
    """One engine that decodes. Active requests are in its batch, committed ones are on their way to it."""

    name: str
    draining: bool = False
    active_requests: int = 0
    active_tokens: int = 0
    """Context of the active requests, as the instance reports it."""
    committed_requests: int = 0
    committed_tokens: int = 0


@dataclass(slots=True)
class Cluster:
    """All that a decision depends on besides the prompt, the clock and the cost model."""

    prefill: list[PrefillInstance]
    decode: list[DecodeInstance]
    sources: list[Source]
    """The first ones are the DRAM of the prefill instances, in their order."""

    reserved_decode: int | None = None
    """A decode instance that takes only the request that it was reserved for (admission.reserve)."""
    answer_tokens: float = DEFAULT_ANSWER_TOKENS
    """Mean length of the answers that were seen."""

    @property
    def growth_tokens(self) -> float:
        """Return the context that a request in a batch still gains, on average."""
        return self.answer_tokens / 2

    def answered(self, output_tokens: int) -> None:
        """Update the mean length of answers with one that is finished."""
        self.answer_tokens += (output_tokens - self.answer_tokens) / ANSWERS_REMEMBERED


def uniform_cluster(
    prefill: int, decode: int, *, network_bytes_s: float, discipline: Discipline = Discipline.FCFS
) -> Cluster:
    """Make equal instances, each prefill instance with its DRAM as a source."""
    return Cluster(
        prefill=[PrefillInstance(f"prefill-{n}", PrefillQueue(discipline)) for n in range(prefill)],
        decode=[DecodeInstance(f"decode-{n}") for n in range(decode)],
        sources=[Source(n, "dram", network_bytes_s) for n in range(prefill)],
    )
