"""Results of a simulation: a record of each request, samples over time, and the figures of the whole.

Responsibility: definitions of the figures. Concurrency: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from scheduler.routing.roles import Role
from scheduler.simulation.options import Options


class Outcome(Enum):
    """Says how a request ended."""

    DONE = "done"
    REJECTED = "rejected"
    """Refused before its prefill."""
    REFUSED = "refused"
    """Refused by its decode instance, after its prefill."""


@dataclass(slots=True)
class Record:
    """One request. TTFT and TBT are those of requests that are done."""

    input_tokens: int
    output_tokens: int
    outcome: Outcome | None = None
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    prefill_s: float = 0.0
    """On all instances, repeated ones included."""
    retries: int = 0
    """How often it was routed again since an instance failed."""


class Sample(NamedTuple):
    """The cluster at one moment; the last two count from the start."""

    time_s: float
    queued: int
    cached_blocks: int
    distinct_blocks: int
    reused_blocks: int
    references: int


class Change(NamedTuple):
    """An instance that was relabelled."""

    at_s: float
    instance: int
    role: Role


class Counts(NamedTuple):
    """What a run counts beside its requests."""

    reused_blocks: int
    references: int
    spread: int = 0
    """Prompts that several instances prefilled."""
    copied_blocks: int = 0
    """Copies that were made ahead of demand."""
    thinned_blocks: int = 0
    """Copies that were demoted since they were cold."""


class Result:
    """Records and their sums."""

    def __init__(
        self,
        options: Options,
        records: Sequence[Record],
        samples: Sequence[Sample],
        counts: Counts,
        changes: Sequence[Change] = (),
    ) -> None:
        self.options = options
        self.records = records
        self.samples = samples
        self.changes = changes
        self.counts = counts
        self.done = [record for record in records if record.outcome is Outcome.DONE]
        self.ttft_s = sorted(record.ttft_s for record in self.done)
        self.tbt_s = sorted(record.tbt_s for record in self.done if record.tbt_s)
        """TBT of the requests that were decoded for more than one token."""
        self.reused_share = counts.reused_blocks / counts.references if counts.references else 0.0

    @property
    def rejected(self) -> int:
        """Return how many requests got no answer, before or after their prefill."""
        return len(self.records) - len(self.done)

    @property
    def wasted_prefill_s(self) -> float:
        """Return the prefill time of requests that their decode instance refused."""
        return sum(record.prefill_s for record in self.records if record.outcome is Outcome.REFUSED)

    def within(self, ttft_s: float, tbt_s: float) -> list[Record]:
        """Return the requests that are done in time."""
        return [record for record in self.done if record.ttft_s <= ttft_s and record.tbt_s <= tbt_s]

    def figures(self) -> dict[str, Any]:
        """Return the figures by name. A rejected request misses its SLO; goodput counts input and output tokens."""
        slo = self.options.slo
        good = self.within(slo.ttft_s, slo.tbt_s)
        return {
            "policy": self.options.policy,
            "queue": self.options.discipline.value,
            "admission": self.options.admission.value,
            "prefill": self.options.prefill,
            "decode": self.options.decode,
            "speed": self.options.speed,
            "seed": self.options.seed,
            "ttft_slo_s": finite(slo.ttft_s),
            "tbt_slo_s": finite(slo.tbt_s),
            "requests": len(self.records),
            "rejected": self.rejected,
            "changed_roles": len(self.changes),
            "spread": self.counts.spread,
            "copied_blocks": self.counts.copied_blocks,
            "thinned_blocks": self.counts.thinned_blocks,
            "retries": sum(record.retries for record in self.records),
            "ttft_mean_s": mean(self.ttft_s),
            "ttft_p50_s": quantile(self.ttft_s, 0.5),
            "ttft_p90_s": quantile(self.ttft_s, 0.9),
            "ttft_p99_s": quantile(self.ttft_s, 0.99),
            "ttft_max_s": quantile(self.ttft_s, 1.0),
            "tbt_p90_s": quantile(self.tbt_s, 0.9),
            "slo_attainment": len(good) / len(self.records) if self.records else 0.0,
            "goodput_tokens": sum(record.input_tokens + record.output_tokens for record in good),
            "wasted_prefill_s": self.wasted_prefill_s,
            "prefill_s": sum(record.prefill_s for record in self.records),
            "reused_share": self.reused_share,
        }


def finite(value: float) -> float | None:
    """Replace infinity by None: JSON has none."""
    return value if value < float("inf") else None


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 of no values."""
    return sum(values) / len(values) if values else 0.0


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest of the values that is not below `share` of them."""
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)] if ascending else 0.0
