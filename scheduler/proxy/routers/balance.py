"""Routing by load: what the proxy does without a Conductor, and when its Conductor fails.

Responsibility: choose the prefill engine with the fewest tokens to prefill and the decode engine with the fewest
requests, which prefills under limits.PREFILL_LEG_TOKENS itself where it can; nothing is known of caches.

Invariants: models count here too, and so do a Conductor's labels; what it has for prefill decodes only where no other
engine answers.

Concurrency: one trio thread.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import msgspec

from kvfs import limits
from scheduler.conductor.values import NOTHING_SAID, Refused, Routed, RouteRequest, Usage
from scheduler.proxy.upstream.engines import Engine, Engines

BY_LOAD = "by load"
"""Why a route predicts no cached tokens."""
_RETRY_AFTER_S = 1.0


class _Reserved(msgspec.Struct):
    decode: str
    prefill: str
    tokens: int
    """Of them, how many are still to prefill."""


class LoadRouter:
    """Implement `Router`: choose the least busy engines."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._reserved: dict[str, _Reserved] = {}
        self._tokens: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._numbers = count(1)

    def route(self, request: RouteRequest) -> Routed | Refused:
        """Choose engines. Raises NotFound for a model that none serves."""
        alive = self._engines.alive(request.exclude, request.model)
        if not alive:
            self._engines.check_model(request.model)
        number = next(self._numbers)
        id = f"load-{number}"
        tokens = len(request.tokens) if request.tokens else request.length or 0
        choose = self._joined_pair if request.both_legs else self._pair
        decode, prefill = choose(alive, number, tokens)
        if decode is None or prefill is None:
            return Refused(reason="no engine answers", retry_after_s=_RETRY_AFTER_S)
        self._reserved[id] = _Reserved(decode.name, prefill.name, tokens)
        self._requests[decode.name] += 1
        self._tokens[prefill.name] += tokens
        alone = prefill is decode
        return Routed(
            id=id,
            decode=decode.name,
            decode_url=decode.address.url,
            prefill=None if alone else prefill.name,
            prefill_url=None if alone else prefill.address.url,
            decode_rank=decode.address.rank,
            prefill_rank=None if alone else prefill.address.rank,
            degraded=BY_LOAD,
        )

    def _pair(self, alive: list[Engine], number: int, tokens: int) -> tuple[Engine | None, Engine | None]:
        """Return the engine that decodes and the one that prefills; None where there is none."""
        decodes = [each for each in alive if each.decodes] or alive  # any engine is better than none
        decode = self._least(decodes, self._requests, number)
        prefills = [each for each in alive if each.prefills]
        has_leg = decode is None or not decode.prefills or any(not each.decodes for each in prefills)
        if not has_leg or tokens < limits.PREFILL_LEG_TOKENS:
            return decode, decode
        return decode, self._least(prefills, self._tokens, number) or decode

    def _joined_pair(self, alive: list[Engine], number: int, _: int) -> tuple[Engine | None, Engine | None]:
        """Return the same where an engine for one side does nothing alone."""
        decode = self._least([each for each in alive if each.decodes], self._requests, number)
        if decode is None or decode.prefills:
            return decode, decode
        prefills = [each for each in alive if not each.decodes]
        return decode, self._least(prefills, self._tokens, number)

    def _least(self, among: list[Engine], load: Counter[str], number: int) -> Engine | None:
        """Return the least busy engine, of equals another each time."""
        if len(among) < 2:
            return among[0] if among else None
        first = number % len(among)
        return min(among[first:] + among[:first], key=lambda engine: load[engine.name])

    def prefilled(self, id: str) -> None:
        reserved = self._reserved.get(id)
        if reserved is not None and reserved.tokens:
            self._tokens[reserved.prefill] -= reserved.tokens
            reserved.tokens = 0

    prefill_failed = first_token = prefilled

    def done(self, id: str, usage: Usage = NOTHING_SAID) -> None:
        self.cancel(id)

    def cancel(self, id: str) -> None:
        self.prefilled(id)
        reserved = self._reserved.pop(id, None)
        if reserved is not None:
            self._requests[reserved.decode] -= 1

    def unreachable(self, instance: str) -> None:
        """Do nothing: the engines themselves know which of them are down."""
