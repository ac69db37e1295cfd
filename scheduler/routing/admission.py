"""Admission: whether a request starts now, waits, or is refused before any work is spent on it.

Responsibility: `admit`, a pure function of a routing decision, the limits and the clock. A request that cannot be
decoded in time is refused before its prefill, not after (early rejection, section 5 of the Mooncake paper). What counts
as load on a decode instance differs:

- NONE admits all; a decode instance that cannot take the request refuses it after the prefill.
- EARLY counts the batches of this moment. Prefills under way are not in them, so it admits too many, and
  then too few.
- DEFAULT counts everything committed: the batch, and every request on its way to it. A request that does
  not fit is deferred while its TTFT budget lasts, for batches drain all the time; it is refused when it cannot
  make its TTFT any more, or would not fit an empty batch.

Concurrency: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from scheduler.routing.cluster import Cluster
from scheduler.routing.cost import CostModel
from scheduler.routing.decisions import Decision, Prompt
from scheduler.routing.route import decode_candidates

DEFER_S = 0.25
"""A deferred request is routed again after this long at the latest."""
RESERVE_AFTER_S = 5.0
"""The request that was deferred first gets a decode instance kept for it once it has waited so long."""
MAX_RETRY_AFTER_S = 60.0
"""The longest that a client is asked to wait before it retries: by then the load is another."""


class Mode(Enum):
    """Says when requests are refused: never, by the load of this moment, or by the load that they will meet."""

    NONE = "none"
    EARLY = "early"
    DEFAULT = "default"


class Verdict(Enum):
    """Says what becomes of a request now."""

    ADMIT = "admit"
    DEFER = "defer"
    REJECT = "reject"


class Reason(Enum):
    """Says why a request does not start now."""

    FITS = "fits"
    NO_INSTANCE = "no instance takes work"
    TTFT = "the first token would be late"
    TBT = "decoding would be too slow"
    RESERVED = "every decode instance is kept for a request that waits for longer"
    MEMORY = "the decode instance has no room for its context"


DEFERRABLE = (Reason.TBT, Reason.RESERVED, Reason.MEMORY)
"""Reasons that end while batches drain."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a request. Infinity: none."""

    ttft_s: float = float("inf")
    tbt_s: float = float("inf")


class Admission(NamedTuple):
    """The verdict and the figures that it follows from."""

    verdict: Verdict
    reason: Reason
    retry_after_s: float
    """When to route a deferred request again, or what to answer the client of a refused one; else 0."""
    ttft_s: float
    tbt_s: float
    context_tokens: int


def admit(decision: Decision, costs: CostModel, slo: Slo, mode: Mode, *, decodes: bool = True) -> Admission:
    """Judge a routing decision at this moment; `decodes`: whether the cluster has decode instances."""
    ttft_s = decision.ttft_s
    tbt_s, context = _decode_load(decision, mode)
    reason = _reason(decision, costs, slo, mode, tbt_s, context, decodes)
    verdict, retry_after_s = Verdict.ADMIT, 0.0
    if reason is not Reason.FITS:
        verdict, retry_after_s = Verdict.REJECT, _retry_after_s(decision, slo, reason)
        if mode is Mode.DEFAULT and _waiting_helps(decision, slo, reason):
            verdict, retry_after_s = Verdict.DEFER, DEFER_S
    return Admission(verdict, reason, retry_after_s, ttft_s, tbt_s, context)


def decodable(cluster: Cluster, prompt: Prompt, costs: CostModel, slo: Slo) -> bool:
    """Return whether some decode instance could take the context by the rule of DEFAULT, so that routing again pays."""
    return any(
        not candidate.reserved
        and candidate.tbt_s <= slo.tbt_s
        and candidate.context_tokens <= costs.kv_capacity_tokens
        for candidate in decode_candidates(cluster, prompt, costs)
    )


def reserve(cluster: Cluster) -> int | None:
    """Return the decode instance to keep for a request that others would pass for ever: the one that drains first.

    Without it small requests fill every gap, and in the end admission refuses all long prompts.
    """
    free = [
        (instance.active_tokens + instance.committed_tokens, n)
        for n, instance in enumerate(cluster.decode)
        if not instance.draining
    ]
    return min(free)[1] if free else None


def _decode_load(decision: Decision, mode: Mode) -> tuple[float, int]:
    decode = decision.decode
    if decode is None:
        return 0.0, 0
    return (decode.tbt_s if mode is Mode.DEFAULT else decode.tbt_now_s), decode.context_tokens


def _reason(
    decision: Decision, costs: CostModel, slo: Slo, mode: Mode, tbt_s: float, context: int, decodes: bool
) -> Reason:
    if decision.prefill is None or (decodes and decision.decode is None):
        return Reason.NO_INSTANCE
    if mode is Mode.NONE:
        return Reason.FITS
    if decision.ttft_s > slo.ttft_s:
        return Reason.TTFT
    if decision.decode is not None and decision.decode.reserved:
        return Reason.RESERVED
    if tbt_s > slo.tbt_s:
        return Reason.TBT
    if mode is Mode.DEFAULT and context > costs.kv_capacity_tokens:
        return Reason.MEMORY
    return Reason.FITS


def _waiting_helps(decision: Decision, slo: Slo, reason: Reason) -> bool:
    """Return whether the request could be decoded once batches have drained, and there is time for that."""
    return (
        reason in DEFERRABLE
        and decision.decode is not None
        and decision.decode.alone_s < float("inf")
        and decision.decode.alone_s <= slo.tbt_s
        and decision.ttft_s + DEFER_S <= slo.ttft_s
    )


def _retry_after_s(decision: Decision, slo: Slo, reason: Reason) -> float:
    """Return when a queue that is too long will have drained to the limit; DEFER_S where no queue is in the way."""
    if reason is not Reason.TTFT or decision.prefill is None:
        return DEFER_S
    excess_s = decision.ttft_s - decision.waited_s - slo.ttft_s
    return min(max(excess_s, DEFER_S), MAX_RETRY_AFTER_S)
