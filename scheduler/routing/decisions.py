"""Routing decisions: the candidates that were weighed, the choice, and where each range of blocks comes from.

Responsibility: values without behaviour beyond their own sums. A decision carries every candidate with its predicted
figures, so it explains itself: the choice is the considered candidate of the smallest score, the first of equals.

Concurrency: none; values never change.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from scheduler.routing.prefix_index import Run
from scheduler.routing.queues import Job


class Prompt(NamedTuple):
    """A prompt that is to be routed."""

    arrival_s: float
    tokens: int
    runs: tuple[Run, ...]
    """The longest prefix of it that the cluster holds (PrefixIndex.runs)."""
    block_tokens: int
    holds_reservation: bool = False
    """Whether the reserved decode instance is reserved for it (admission.reserve)."""


class Load(NamedTuple):
    """A range of blocks that a source sends to the instance."""

    source: int
    first_block: int
    blocks: int
    size_bytes: int
    busy_s: float
    """How long it occupies `source`."""


class PrefillCandidate(NamedTuple):
    """One instance, as predicted. Times count from the decision."""

    instance: int
    queue_s: float
    """Until the prefill could start."""
    ready_s: float
    """Until all reused blocks are there."""
    prefill_s: float
    reused_blocks: int
    loads: tuple[Load, ...]
    after: tuple[Job, ...]
    """Prefills whose blocks it reuses."""
    rank: float
    """Its place in the instance's queue."""
    delay_s: float
    """Waiting that it adds to the jobs behind it, summed over those."""
    score: float

    @property
    def ttft_s(self) -> float:
        """Return the predicted time to the first token: the longer of queue and loads, then the prefill."""
        return max(self.queue_s, self.ready_s) + self.prefill_s


class DecodeCandidate(NamedTuple):
    """One decode instance, as predicted once the request is in its batch."""

    instance: int
    tbt_now_s: float
    """The step with the batch of this moment."""
    tbt_s: float
    """The step with all that is committed to it as well, and half an answer to come for each request."""
    context_tokens: int
    """The context of `tbt_s`."""
    alone_s: float
    """The step of this request alone, which no waiting makes shorter; infinite where its context has no room."""
    reserved: bool
    """Whether it is kept for another request."""

    @property
    def score(self) -> tuple[bool, float]:
        """Rank an instance; one that is kept for another request comes last."""
        return self.reserved, self.tbt_s


class Action(Enum):
    """Says how an instance gets blocks: it has them, loads them, or computes them."""

    USE = "use"
    LOAD = "load"
    RECOMPUTE = "recompute"


class Range(NamedTuple):
    """A range of blocks and how the instance gets it."""

    first_block: int
    blocks: int
    action: Action
    source: int | None


class Decision(NamedTuple):
    """The instances that a prompt goes to, and all that were weighed."""

    policy: str
    waited_s: float
    """Between arrival and decision."""
    prefill: PrefillCandidate | None
    """None when no instance takes work."""
    decode: DecodeCandidate | None
    considered: tuple[PrefillCandidate, ...]
    considered_decode: tuple[DecodeCandidate, ...]

    @property
    def ttft_s(self) -> float:
        """Return the predicted TTFT, from the arrival on; infinite without an instance."""
        return self.waited_s + self.prefill.ttft_s if self.prefill is not None else float("inf")

    def ranges(self, blocks: int) -> tuple[Range, ...]:
        """Return how the instance gets each range of a prompt of so many blocks, in order."""
        if self.prefill is None:
            return ()
        found: list[Range] = []
        place = 0
        for load in self.prefill.loads:
            if load.first_block > place:
                found.append(Range(place, load.first_block - place, Action.USE, self.prefill.instance))
            found.append(Range(load.first_block, load.blocks, Action.LOAD, load.source))
            place = load.first_block + load.blocks
        if self.prefill.reused_blocks > place:
            found.append(Range(place, self.prefill.reused_blocks - place, Action.USE, self.prefill.instance))
        if blocks > self.prefill.reused_blocks:
            reused = self.prefill.reused_blocks
            found.append(Range(reused, blocks - reused, Action.RECOMPUTE, None))
        return tuple(found)
