"""The last decisions and what became of them: predictions against what engines report, latencies against limits.

Responsibility: a row for each of the last limits.MAX_REMEMBERED_DECISIONS decisions, kept up to date while its request
runs; counters of tokens by where they were cached, refusals by reason, TTFT and TBT.

Invariants: every call takes the same time, whoever watches. Reports of requests that are over change nothing. What
changed is kept for one reader, limits.MAX_STREAMED_DECISIONS at most: of more, the last.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from kvfs.limits import MAX_REMEMBERED_DECISIONS, MAX_STREAMED_DECISIONS
from kvfs.system.latencies import Latencies
from scheduler.conductor.values import Refused, Routed, Usage
from scheduler.routing.admission import Slo

REMOTE: Final = "remote"
"""Where blocks were that another node sends."""


class Logged(msgspec.Struct, eq=False):
    """One decision. Times are those of the Conductor's clock."""

    id: str
    at_s: float
    model: str
    tokens: int
    slo: Slo
    outcome: str = "routed"
    """What became of it so far: `routed`, `answering`, `done`, ..., or `refused: REASON`, `deferred: REASON`."""
    waited_s: float = 0.0
    """Before the decision."""
    prefill: str = ""
    """The instance of a leg of its own."""
    decode: str = ""
    predicted_tokens: int | None = None
    """Cached tokens that the engine which prefills should find; once it is over, the engine that said so."""
    cached_tokens: int | None = None
    """Cached tokens that it says."""
    predicted_ttft_s: float | None = None
    ttft_s: float | None = None
    """From the arrival to the report of the first token."""
    tbt_s: float | None = None
    """Mean time between the tokens of the answer."""
    first_token_s: float | None = None


class DecisionLog:
    """See the module's header."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Logged] = OrderedDict()
        self._next = 0
        self._live: dict[str, Logged] = {}
        self._changed: dict[str, Logged] = {}
        self._latencies = Latencies()
        self._late: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._reused: Counter[str] = Counter()
        self._prompt_tokens = 0
        self.omitted = 0
        """Changes that were too many to keep for the reader."""

    # --- decisions ----------------------------------------------------------------------------------------
    def routed(
        self,
        routed: Routed,
        logged: Logged,
        predicted_tokens: int,
        reused: Iterable[tuple[str, int]],
    ) -> None:
        """Note a request that was given instances; `reused`: the tokens that it does not compute, by medium."""
        logged.id, logged.decode, logged.prefill = routed.id, routed.decode, routed.prefill or ""
        logged.predicted_tokens, logged.predicted_ttft_s = predicted_tokens, routed.ttft_s
        self._prompt_tokens += logged.tokens
        for medium, tokens in reused:
            self._reused[medium] += tokens
        self._live[routed.id] = logged
        self._keep(logged)

    def refused(self, refused: Refused, logged: Logged) -> None:
        """Note a request that was given none, or none yet; without an id there was no decision."""
        logged.id = refused.id
        logged.outcome = f"{'deferred' if refused.deferred else 'refused'}: {refused.reason}"
        self._refused[refused.reason] += not refused.deferred
        if refused.id:
            self._keep(logged)

    def ordered(self, logged: Logged) -> None:
        """Note an order to an instance."""
        self._live[logged.id] = logged
        self._keep(logged)

    def _keep(self, logged: Logged) -> None:
        self._kept[self._next] = logged
        self._next += 1
        if len(self._kept) > MAX_REMEMBERED_DECISIONS:
            self._kept.popitem(last=False)
        self._change(logged)

    # --- what becomes of them -----------------------------------------------------------------------------
    def first_token(self, id: str, now_s: float) -> None:
        """Note when an answer began, and how that compares with its limit; ignored after the first time."""
        found = self._live.get(id)
        if found is None or found.first_token_s is not None:
            return
        found.first_token_s, found.outcome = now_s, "answering"
        found.ttft_s = now_s - found.at_s + found.waited_s
        self._latencies.observe("ttft", found.ttft_s)
        self._late["ttft"] += found.ttft_s > found.slo.ttft_s
        self._change(found)

    def done(self, id: str, predicted_tokens: int, usage: Usage, now_s: float) -> None:
        """Note a request's end; `predicted_tokens`: of the engine that says `usage.cached_tokens`."""
        found = self._live.get(id)
        if found is None:
            return
        found.predicted_tokens, found.cached_tokens = predicted_tokens, usage.cached_tokens
        output_tokens = usage.output_tokens
        if found.first_token_s is not None and output_tokens is not None and output_tokens > 1:
            found.tbt_s = (now_s - found.first_token_s) / (output_tokens - 1)
            self._latencies.observe("tbt", found.tbt_s)
            self._late["tbt"] += found.tbt_s > found.slo.tbt_s
        self.ended(id, "done")

    def ended(self, id: str, outcome: str) -> None:
        """Note the end of a request: `done`, `cancelled`, `expired`, `orphaned`."""
        found = self._live.pop(id, None)
        if found is not None:
            found.outcome = outcome
            self._change(found)

    def _change(self, logged: Logged) -> None:
        self._changed.pop(logged.id, None)
        self._changed[logged.id] = logged
        if len(self._changed) > MAX_STREAMED_DECISIONS:
            del self._changed[next(iter(self._changed))]
            self.omitted += 1

    # --- questions ----------------------------------------------------------------------------------------
    def all(self) -> Sequence[Logged]:
        """Return the kept decisions, the first one first."""
        return tuple(self._kept.values())

    def take_changed(self) -> tuple[Sequence[Logged], int]:
        """Return the decisions that changed since the last call, and how many changes are not among them."""
        found, omitted = tuple(self._changed.values()), self.omitted
        self._changed.clear()
        self.omitted = 0
        return found, omitted

    def status(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "reused_tokens": dict(self._reused),
            "refused": dict(self._refused),
            "late": {limit: self._late[limit] for limit in ("ttft", "tbt")},
            "latencies": self._latencies.status(),
        }


def by_medium(depths: Iterable[tuple[str, int]], reused_blocks: int) -> list[tuple[str, int]]:
    """Return how many of the reused blocks each medium gives.

    `depths`: in the order in which an instance prefers its media, how many blocks that medium and those before it hold.
    """
    found, before = [], 0
    for medium, depth in depths:
        upto = min(depth, reused_blocks)
        found.append((medium, upto - before))
        before = upto
    return [*found, (REMOTE, reused_blocks - before)]
