"""Requests that their router defers: they wait here for room in a batch, and are asked for again in order of arrival.

Responsibility: a bounded line. A router that defers a request is asked again every DEFER_S, until it routes or refuses
it, or the client goes, or its time is up: that of the limit of its first token, as the router says, and
limits.PROXY_DEFERRED_S.

Invariants:
- At most limits.MAX_PROXY_WAITERS wait; one more is refused.
- Of requests of one model and with the same engines left out none goes before one that came earlier and is no longer:
  it waits behind it, and once it was deferred is passed over in each round in which that is deferred again. A shorter
  one may fit where a longer one does not; so that longer ones get their turn, a router keeps room for who waits
  longest, and that one is asked for in each round.
- In the last DEFER_S of its time each is asked for: the router is to say that it is over.
- A request that leaves is cancelled at its router, also where that has routed it meanwhile.

Concurrency: one trio thread; one task asks for all that wait.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

import trio

from kvfs import limits
from scheduler.conductor.values import Refused, Routed, RouteRequest
from scheduler.proxy.proxy_metrics import Counts
from scheduler.proxy.routers.fallback import RequestRouter
from scheduler.routing.admission import DEFER_S

Ask = Callable[[str], RouteRequest]
"""Makes a request's question as it is now; its argument: the id of the answer that deferred it."""
_Found = Routed | Refused | Exception


@dataclass(slots=True, eq=False)
class _Waiter:
    ask: Ask
    question: RouteRequest
    """As it was asked last, or is to be asked first."""
    joined_s: float
    arrived_s: float
    give_up_s: float
    id: str = ""
    """Of the answer that deferred it; empty: it was not asked yet."""
    waits: bool = True
    found: _Found | None = None
    done: trio.Event = field(default_factory=trio.Event)

    def defer(self, refused: Refused, now_s: float) -> None:
        """Wait on, as long as the router says and no longer than limits.PROXY_DEFERRED_S in all."""
        self.id = refused.id
        self.give_up_s = self.joined_s + limits.PROXY_DEFERRED_S
        if refused.give_up_s is not None:
            self.give_up_s = min(self.give_up_s, now_s + refused.give_up_s)

    def end(self, found: _Found) -> None:
        self.found, self.waits = found, False
        self.done.set()


class WaitingLine:
    """See the module's header."""

    def __init__(self, router: RequestRouter, counts: Counts) -> None:
        self._router, self._counts = router, counts
        self._line: list[_Waiter] = []
        """In order of arrival."""

    def __len__(self) -> int:
        return len(self._line)

    @property
    def ids(self) -> list[str]:
        """Return the ids that the router knows those by which wait."""
        return [each.id for each in self._line if each.id]

    async def run(self) -> None:
        """Ask again for who waits, until cancelled."""
        while True:
            await trio.sleep(DEFER_S)
            await self.look()

    async def route(self, ask: Ask) -> Routed | Refused:
        """Choose engines for a request, when there is room for it. Raises what its router does."""
        question = ask("")
        found: Routed | Refused | None = None
        if not self._line or not self._would_overtake(question):
            found = await self._router.route(question)
            if not _is_deferred(found):
                return found
        self._counts.events["deferred"] += 1
        if len(self._line) >= limits.MAX_PROXY_WAITERS:
            self._counts.events["line_full"] += 1
            self._forget(found)
            return Refused(reason=f"{limits.MAX_PROXY_WAITERS} requests wait already", retry_after_s=DEFER_S)
        now_s = trio.current_time()
        waiter = _Waiter(ask, question, now_s, now_s - question.waited_s, now_s + limits.PROXY_DEFERRED_S)
        if isinstance(found, Refused):
            waiter.defer(found, now_s)
        return await self._wait(waiter)

    def _would_overtake(self, question: RouteRequest) -> bool:
        alike, tokens = _alike(question), _tokens(question)
        return any(_alike(each.question) == alike and _tokens(each.question) <= tokens for each in self._line)

    async def _wait(self, waiter: _Waiter) -> Routed | Refused:
        insort(self._line, waiter, key=lambda each: each.arrived_s)
        outcome = "gone"
        try:
            await waiter.done.wait()
            outcome = "routed" if isinstance(waiter.found, Routed) else "refused"
        finally:
            self._line.remove(waiter)
            waiter.waits = False
            self._counts.waits.observe(outcome, trio.current_time() - waiter.joined_s)
            if outcome == "gone":
                self._leave(waiter)
        if isinstance(waiter.found, Exception):
            raise waiter.found
        assert waiter.found is not None
        return waiter.found

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.found is not None:
            self._forget(waiter.found)
        elif waiter.id:
            self._router.cancel(waiter.id)

    def _forget(self, found: _Found | None) -> None:
        """Have a router forget what it routed, or defers, for a request that waits no more."""
        if isinstance(found, Routed) or _is_deferred(found):
            self._router.cancel(found.id)

    # --- asking again ---------------------------------------------------------------------------------------
    async def look(self) -> None:
        """Ask once for all that wait and may find room."""
        shortest: dict[tuple[str, ...], int] = {}
        for waiter in tuple(self._line):
            if not waiter.waits:
                continue
            waiter.question = question = waiter.ask(waiter.id)
            alike, tokens = _alike(question), _tokens(question)
            is_late = trio.current_time() + DEFER_S >= waiter.give_up_s
            if waiter.id and not is_late and tokens >= shortest.get(alike, tokens + 1):
                continue
            if await self._waits_on(waiter):
                shortest[alike] = min(tokens, shortest.get(alike, tokens))

    async def _waits_on(self, waiter: _Waiter) -> bool:
        """Ask for a request again; return whether it is deferred again."""
        found: _Found
        try:
            found = await self._router.route(waiter.question)
        except Exception as error:
            found = error
        if not waiter.waits:
            self._forget(found)
            return False
        now_s = trio.current_time()
        if _is_deferred(found):
            waiter.defer(found, now_s)
            if now_s < waiter.give_up_s:
                return True
            self._forget(found)
        waiter.end(found)
        return False


def _is_deferred(found: _Found | None) -> TypeGuard[Refused]:
    return isinstance(found, Refused) and found.deferred


def _alike(question: RouteRequest) -> tuple[str, ...]:
    """Return what requests share that have room in the same batches: the model, and the engines left out."""
    return (question.model, *question.exclude)


def _tokens(question: RouteRequest) -> int:
    return len(question.tokens) if question.tokens else question.length or 0
