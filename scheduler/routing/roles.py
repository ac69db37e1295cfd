"""Roles: which instances prefill and which decode, as the load asks for.

Responsibility: `rebalance`, a pure function from what each side carries to an order to relabel one instance. A role is
a label: who carries the order out drains the instance (it takes no more work in its role, and ends what it has), and
relabels it; its cache stays.

The pressure of a side is 1 where it is as loaded as it may be. A side gets an instance when at so many looks in a row
its pressure was above `high`, and the other side's would be below `low` with one instance less, or below that share of
its own where both are overloaded. That is the hysteresis: the side that gave is not above `high` then, or is less
loaded than the one that got it.

Invariants, at any load:
- At most one order a look, none while an instance drains, none within `pause_s` of the last one.
- An instance changes once in `window_s` at most, and a side keeps one instance.
- At constant load changes go one way and end.

Concurrency: none; functions over explicit state and the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from kvfs.errors import InvalidRequest
from scheduler.routing.admission import Slo
from scheduler.routing.cost import CostModel

BUSY_SHARE = 0.8
"""The share of its time at which prefill is as loaded as it may be: queues grow fast beyond."""
DEMAND_HALF_LIFE_S = 30.0
"""How fast the demand for prefill follows arrivals: several times what one long prompt takes."""


class Role(Enum):
    """Says which work an instance is labelled for."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """Return the other role."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True, slots=True)
class Rules:
    """When an instance changes sides."""

    high: float = 0.85
    low: float = 0.8
    looks: int = 3
    look_s: float = 5.0
    """Between two looks."""
    pause_s: float = 20.0
    """Between two orders."""
    window_s: float = 120.0
    """Between two orders for one instance."""

    def check(self) -> None:
        """Check the bounds. Raises InvalidRequest."""
        if not (0 < self.low < self.high and self.looks >= 1 and self.look_s > 0):
            raise InvalidRequest("rules of roles: 0 < low < high, at least one look, look_s above 0")


class Member(NamedTuple):
    """An instance, as seen at a look."""

    role: Role
    work: float
    """What it would have to drain, comparable among instances of its role."""
    draining: bool = False


class Side(NamedTuple):
    """The instances of one role."""

    instances: int
    pressure: float
    without_one: float
    """The pressure with one instance less."""


class Contexts(NamedTuple):
    """Requests, with the tokens of their contexts."""

    tokens: int = 0
    requests: int = 0


class Relabel(NamedTuple):
    """An order to drain an instance and give it another role."""

    instance: int
    role: Role


@dataclass(frozen=True, slots=True)
class Balance:
    """What is remembered from look to look."""

    wanted: tuple[Role, int] | None = None
    """The side that needs an instance, and at how many looks in a row it did."""
    ordered_s: float = float("-inf")
    changed_s: Mapping[int, float] = field(default_factory=dict)
    """When each instance was last ordered to change, in the last window."""


def rebalance(
    state: Balance, members: Mapping[int, Member], sides: Mapping[Role, Side], rules: Rules, now_s: float
) -> tuple[Balance, Relabel | None]:
    """Return the state after a look, and an order if an instance is to change its role. `members`: by their numbers."""
    role = _needy(sides, rules)
    if role is None:
        return replace(state, wanted=None), None
    looks = state.wanted[1] + 1 if state.wanted is not None and state.wanted[0] is role else 1
    state = replace(state, wanted=(role, looks))
    draining = any(member.draining for member in members.values())
    if looks < rules.looks or draining or now_s - state.ordered_s < rules.pause_s:
        return state, None
    changed_s = {n: at_s for n, at_s in state.changed_s.items() if now_s - at_s < rules.window_s}
    free = [
        (member.work, n) for n, member in members.items() if member.role is role.other and n not in changed_s
    ]
    if not free:
        return state, None
    chosen = min(free)[1]
    return Balance(None, now_s, {**changed_s, chosen: now_s}), Relabel(chosen, role)


def _needy(sides: Mapping[Role, Side], rules: Rules) -> Role | None:
    """Return the side that needs an instance which the other one can spare."""
    for role in Role:
        pressure, giver = sides[role].pressure, sides[role.other]
        spared = giver.instances > 1 and giver.without_one < rules.low * max(pressure, 1.0)
        if pressure > rules.high and spared:
            return role
    return None


# --- what the sides carry --------------------------------------------------------------------------------
def prefill_side(instances: int, demand: float, queued_s: float, ttft_slo_s: float) -> Side:
    """Return the prefill side: so many instances' worth of prompts arrive, and `queued_s` of prefill waits.

    The queue may take half of the TTFT.
    """

    def pressure(count: int) -> float:
        return max(demand / BUSY_SHARE, queued_s / (ttft_slo_s / 2)) / count if count else float("inf")

    return Side(instances, pressure(instances), pressure(instances - 1))


def decode_side(
    instances: int, held: Contexts, waiting: Contexts, growth_tokens: float, costs: CostModel, slo: Slo
) -> Side:
    """Return the decode side: `held` is in its batches or on the way there, `waiting` deferred until they have room.

    Each context grows by `growth_tokens`. The side may be loaded until a step takes what the limit leaves beyond an
    empty batch, or the contexts are full.
    """
    requests = held.requests + waiting.requests
    tokens = held.tokens + waiting.tokens + int(requests * growth_tokens)
    room_s = slo.tbt_s - costs.step_fixed_s
    load_s = tokens * costs.step_context_s + requests * costs.step_request_s

    def pressure(count: int) -> float:
        if not count or room_s <= 0:
            return float("inf")
        return max(load_s / room_s, tokens / costs.kv_capacity_tokens) / count

    return Side(instances, pressure(instances), pressure(instances - 1))


@dataclass(frozen=True, slots=True)
class Demand:
    """How many instances the arriving prompts keep busy: seconds of prefill for each second, halved as time passes."""

    seconds: float = 0.0
    at_s: float = 0.0
    since_s: float = 0.0
    """When the first prompt was seen."""

    def added(self, prefill_s: Iterable[float], now_s: float) -> Demand:
        """Return the demand with prompts of so much prefill."""
        return Demand(self._faded_s(now_s) + sum(prefill_s), now_s, self.since_s if self.at_s else now_s)

    def instances(self, now_s: float) -> float:
        """Return the demand at this moment."""
        seen = 1.0 - 0.5 ** ((now_s - self.since_s) / DEMAND_HALF_LIFE_S)
        per_s = self._faded_s(now_s) * _LN_2 / DEMAND_HALF_LIFE_S
        return float(per_s / max(seen, 0.1))

    def _faded_s(self, now_s: float) -> float:
        return float(self.seconds * 0.5 ** ((now_s - self.at_s) / DEMAND_HALF_LIFE_S))


_LN_2 = 0.6931471805599453
