"""What a pool asks of who decides for it, and what a decision is.

Responsibility: the port. `native_planner` is behind it for the policy `default`, `python_planner` for the others and as
what tests compare the native one with.

Invariants: queues, batches, sources and what was committed are kept by the planner alone, once. Prefill instance n and
decode instance n are the instance in slot n of the pool.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from scheduler.routing.admission import Slo
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, DecodeCandidate

Role = Literal["both", "prefill", "decode"]


class Question(msgspec.Struct, frozen=True):
    """A prompt that is to be routed."""

    hashes: bytes
    """Of the blocks that may be reused."""
    tokens: int
    block_tokens: int
    arrival_s: float
    now_s: float
    slo: Slo
    excluded: Sequence[int] = ()
    """Slots that must not be chosen."""
    both_legs: bool = False
    """Whether an instance for one side can do nothing alone."""
    holds_kept: bool = False
    """Whether the batch that is kept is this prompt's; to others it is full."""


class PrefillFigures(NamedTuple):
    """One instance as it was predicted to prefill; times count from the decision."""

    instance: int
    queue_s: float
    ready_s: float
    prefill_s: float
    reused_blocks: int
    loaded_blocks: int
    delay_s: float
    score: float

    @property
    def ttft_s(self) -> float:
        """Return the predicted time to the first token: the longer of queue and loads, then the prefill."""
        return max(self.queue_s, self.ready_s) + self.prefill_s


class Plan(Protocol):
    """A decision, to be committed once or not at all, and its reasons."""

    @property
    def decision(self) -> Decision:
        """Return what was chosen. Its candidates may be left out: `considered` has them."""
        ...

    @property
    def held_blocks(self) -> int:
        """Return how many blocks of the prompt, from the first on, are in place or being made somewhere."""
        ...

    def considered(self) -> tuple[PrefillFigures, ...]:
        """Return what every instance was predicted to need, at the moment of the decision."""
        ...

    def considered_decode(self) -> tuple[DecodeCandidate, ...]:
        """Return the decode instances that were weighed."""


class Load(NamedTuple):
    """What is under way on an instance."""

    queued: int
    """Prefills that wait."""
    is_prefilling: bool
    queue_s: float
    """The predicted time of what runs and waits."""
    active_requests: int
    """In the batch."""
    active_tokens: int
    committed_requests: int
    """On their way to the batch."""
    committed_tokens: int


class Planner(Protocol):
    """Decide for a pool, and keep what is committed in it."""

    def __len__(self) -> int:
        """Count the requests that are committed and in no batch yet."""
        ...

    # --- the pool -----------------------------------------------------------------------------------------
    def join(self, slot: int) -> None:
        """Begin with an idle instance in a slot. REQUIRES that nothing is committed to it."""
        ...

    def take_work(self, slot: int, *, takes: bool) -> None:
        """Let an instance be chosen, or be chosen no more; its blocks count either way."""
        ...

    def set_role(self, slot: int, role: Role) -> None:
        """Label an instance; decisions follow labels."""

    def keep(self, slot: int | None) -> None:
        """Keep the batch of an instance for the one question that `holds_kept`; None: keep none."""
        ...

    def set_source(self, source: int, bytes_s: float) -> None:
        """Begin with an idle source of blocks; source n is what is in place at slot n."""
        ...

    def map_sources(self, places: Mapping[int, Collection[int]]) -> None:
        """Say which sources each source of the index counts as; others count for nobody."""
        ...

    def set_costs(self, costs: CostModel) -> None:
        """Predict by this cost model from now on."""

    def add_active(self, slot: int, requests: int, tokens: int) -> None:
        """Add to an instance's batch; negative numbers take from it."""
        ...

    def answered(self, output_tokens: int) -> None:
        """Note the length of an answer."""
        ...

    @property
    def growth_tokens(self) -> float:
        """Return the context that a request in a batch still gains, on average."""
        ...

    def load(self, slot: int, now_s: float) -> Load:
        """Return what an instance has in its queue and in its batch."""

    # --- decisions ----------------------------------------------------------------------------------------
    def plan(self, question: Question) -> Plan:
        """Choose instances for a prompt, by policy and roles; nothing is changed."""
        ...

    # --- commitments, by the numbers of requests -----------------------------------------------------------
    def commit(self, number: int, plan: Plan, now_s: float, *, promised_s: float) -> None:
        """Put a request into its queue, and count it on its way to its batch."""
        ...

    def start(self, slot: int, now_s: float) -> int | None:
        """Return the request that an idle instance starts to prefill now, if any may."""
        ...

    def start_idle(self, now_s: float) -> list[int]:
        """Start what idle instances may start now, and return those requests."""
        ...

    def overdue(self, now_s: float, late_s: float) -> list[int]:
        """Return the requests whose prefill is late by its own length and `late_s`, where others wait behind it."""
        ...

    def prefilled(self, number: int) -> None:
        """End a prefill, in its turn or out of it. REQUIRES that it has not ended."""
        ...

    def joined(self, number: int) -> None:
        """End what was committed of a request that is in its batch."""
        ...

    def dropped(self, number: int) -> None:
        """Drop a request that is in no batch, wherever it is."""
        ...
