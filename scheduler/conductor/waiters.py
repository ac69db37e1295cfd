"""Requests that were deferred, and the instance that is kept for who waits longest.

Responsibility: who was asked for again or heard of, so that it still waits, and the contexts of all who do; and in each
pool a decode instance that takes no other request once one has waited for RESERVE_AFTER_S. Without it short prompts
that come later fill each gap in the batches, and long ones wait for ever.

Invariants:
- At most limits.MAX_DEFERRED_REQUESTS wait: one that nobody asks for gives its place to another after
  limits.DEFERRED_SILENT_S, and loses it after limits.DEFERRED_FORGOTTEN_S.
- A pool keeps one instance at most, for one request, until that is routed or refused, leaves or falls silent; another
  one where the instance takes no more work. Then it is kept for whoever has waited longest and is asked for by its
  id: who asks each time as for a new request would never get what is kept.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from kvfs.limits import DEFERRED_FORGOTTEN_S, DEFERRED_SILENT_S, MAX_DEFERRED_REQUESTS
from scheduler.conductor.pool import Pool
from scheduler.conductor.values import Refused
from scheduler.routing.admission import RESERVE_AFTER_S, Admission, Slo
from scheduler.routing.roles import Contexts


@dataclass(slots=True)
class _Waiter:
    pool: Pool
    tokens: int
    arrival_s: float
    asked_s: float
    heard_s: float
    """When somebody said last that it waits: those that could not be routed yet are not asked for."""
    comes_back: bool = False
    """Whether it was asked for again."""

    def is_silent(self, now_s: float) -> bool:
        return now_s - self.asked_s > DEFERRED_SILENT_S


class Waiters:
    """See the module's header."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, _Waiter] = OrderedDict()
        """Who was asked for last comes last."""
        self._kept: dict[Pool, str] = {}
        """For whom a pool keeps an instance."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id: object) -> bool:
        return id in self._by_id

    def holds(self, id: str, pool: Pool) -> bool:
        """Return whether the kept instance of a pool is this request's."""
        return bool(id) and self._kept.get(pool) == id

    def add(self, id: str, pool: Pool, tokens: int, arrival_s: float, now_s: float) -> bool:
        """Let a request wait; return False where too many do."""
        if len(self._by_id) >= MAX_DEFERRED_REQUESTS:
            first = self._first()
            if not self._by_id[first].is_silent(now_s):
                return False
            self.end(first)
        self._by_id[id] = _Waiter(pool, tokens, arrival_s, now_s, now_s)
        return True

    def ask_again(self, id: str, pool: Pool, now_s: float) -> bool:
        """Note that a request waits on; return False where it is not known to wait in this pool."""
        found = self._by_id.get(id)
        if found is None or found.pool is not pool:
            return False
        found.asked_s = found.heard_s = now_s
        found.comes_back = True
        self._by_id.move_to_end(id)
        return True

    def heard(self, ids: Iterable[str], now_s: float) -> None:
        """Note that requests wait on which nobody asks for now; ids of others are passed over."""
        for id in ids:
            found = self._by_id.get(id)
            if found is not None:
                found.heard_s = now_s

    def contexts(self, pool: Pool, now_s: float) -> Contexts:
        """Return what waits for room in a pool's batches: who is neither asked for nor heard of may have gone."""
        tokens = [
            each.tokens
            for each in self._by_id.values()
            if each.pool is pool and now_s - each.heard_s <= DEFERRED_SILENT_S
        ]
        return Contexts(sum(tokens), len(tokens))

    def end(self, id: str, pool: Pool | None = None) -> bool:
        """Let a request wait no more; return whether it did, in this pool where one is given."""
        found = self._by_id.get(id)
        if found is None or pool not in (None, found.pool):
            return False
        del self._by_id[id]
        self._release(id, found.pool)
        return True

    def _first(self) -> str:
        return next(iter(self._by_id))

    def _release(self, id: str, pool: Pool) -> None:
        """Keep an instance for a request no more."""
        if self._kept.get(pool) == id:
            del self._kept[pool]
            pool.keep(None)

    def look(self, now_s: float) -> None:
        """Forget who fell silent, and keep an instance of each pool for who has waited longest."""
        while self._by_id and now_s - self._by_id[self._first()].asked_s > DEFERRED_FORGOTTEN_S:
            self.end(self._first())
        for pool, id in tuple(self._kept.items()):
            if self._by_id[id].is_silent(now_s):
                self._release(id, pool)
        oldest: dict[Pool, tuple[float, str]] = {}
        for id, each in reversed(self._by_id.items()):
            if each.is_silent(now_s):
                break  # and so are those before
            if each.comes_back and now_s - each.arrival_s >= RESERVE_AFTER_S:
                oldest[each.pool] = min(oldest.get(each.pool, (now_s, id)), (each.arrival_s, id))
        for pool, (_, id) in oldest.items():
            self._kept.setdefault(pool, id)
        for pool in self._kept:
            pool.keep_one(now_s)


def turned_down(id: str, admission: Admission, slo: Slo, *, deferred: bool) -> Refused:
    """Return the answer to a request that is given no instance now."""
    waits_s = slo.ttft_s - admission.ttft_s
    return Refused(
        id=id,
        reason=admission.reason.value,
        retry_after_s=admission.retry_after_s,
        deferred=deferred,
        give_up_s=waits_s if deferred and isfinite(waits_s) else None,
    )
