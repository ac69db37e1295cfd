"""Labels of instances that follow the load, as `routing.roles` orders it.

Responsibility: what each side of a pool carries, looked at every `Rules.look_s`; an order carried out, in which the
instance takes no more requests and gets its label once it has none; and the last orders with their reasons.

Invariants:
- What waits for room in a batch is load of the side that decodes, as in the simulation: where nothing of it fits, the
  batches alone look as if there were room.
- An instance that is labelled `both`, is drained by its operator or does not answer gets no order, and counts for no
  side. A pool in which a side has no instance of its own gets none.
- At most one instance of a pool drains for a label. Whoever sets its label, or removes it, ends the order.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfs.limits import MAX_ROLE_ORDERS, PREFILL_LEG_TOKENS
from scheduler.conductor.decision_log import DecisionLog, Logged
from scheduler.conductor.pool import Member, Pool
from scheduler.conductor.registry import Registry
from scheduler.routing.roles import (
    Balance,
    Contexts,
    Demand,
    Role,
    Rules,
    Side,
    decode_side,
    prefill_side,
    rebalance,
)
from scheduler.routing.roles import Member as Looked

log = logging.getLogger("kvfs.conductor")

ROLES = {role.value: role for role in Role}


@dataclass(slots=True, eq=False)
class RoleOrder:
    """An order to relabel an instance, and what was seen when it was given."""

    id: str
    pool: Pool
    member: Member
    before: Role
    role: Role
    sides: Mapping[Role, Side]
    outcome: str = "draining"

    @property
    def name(self) -> str:
        """Return the name of the instance."""
        return self.member.instance.name

    def as_json(self) -> dict[str, Any]:
        """Return the order with its reason as JSON values."""
        needy, giver = self.sides[self.role], self.sides[self.before]
        return {
            "id": self.id,
            "model": self.pool.model,
            "words": f"{self.name} goes from {self.before.value} to {self.role.value}: {needy.instances} instances "
            f"carry {needy.pressure:.2f} of what they may there, and the other {giver.instances} "
            f"{giver.pressure:.2f}, {giver.without_one:.2f} with one less.",
            "policy": "roles",
            "instance": self.name,
            "role": self.role.value,
            "outcome": self.outcome,
            "sides": [
                {"role": role.value, "instances": side.instances, "pressure": side.pressure}
                for role, side in self.sides.items()
            ],
        }


@dataclass(slots=True)
class _Watched:
    """What is remembered of a pool from look to look."""

    balance: Balance = field(default_factory=Balance)
    demand: Demand = field(default_factory=Demand)
    order: RoleOrder | None = None
    sides: Mapping[Role, Side] = field(default_factory=dict)


class RoleOrders:
    """See the module's header."""

    def __init__(
        self,
        registry: Registry,
        decisions: DecisionLog,
        rules: Rules,
        next_id: Callable[[], str],
        waiting: Callable[[Pool, float], Contexts],
    ) -> None:
        """`next_id` names a decision; `waiting` returns what waits for room in a pool's batches at a time."""
        self._registry, self._decisions, self._rules, self._next_id = registry, decisions, rules, next_id
        self._waiting = waiting
        self._watched: dict[str, _Watched] = {}
        self._look_s = float("-inf")
        self._orders: dict[str, RoleOrder] = {}
        self.counts: Counter[str] = Counter()

    def committed(self, pool: Pool, tokens: int, cached: int, prefill_s: float, now_s: float) -> None:
        """Count a prompt as demand for prefill, unless a decode instance computes as little itself."""
        if tokens - cached >= PREFILL_LEG_TOKENS:
            watched = self._watched.setdefault(pool.model, _Watched())
            watched.demand = watched.demand.added((prefill_s,), now_s)

    def explain(self, id: str) -> dict[str, Any] | None:
        """Return an order of the last ones as JSON values."""
        found = self._orders.get(id)
        return None if found is None else found.as_json()

    def status(self) -> dict[str, Any]:
        """Return sides and orders as JSON values."""
        return {
            "sides": [
                {
                    "model": model,
                    "role": role.value,
                    "instances": side.instances,
                    "pressure": min(side.pressure, 1e9),
                }
                for model, watched in self._watched.items()
                for role, side in watched.sides.items()
            ],
            "orders": [
                {"id": each.id, "instance": each.name, "role": each.role.value, "outcome": each.outcome}
                for each in self._orders.values()
            ],
            "counts": dict(self.counts),
        }

    # --- time ---------------------------------------------------------------------------------------------
    def tick(self, now_s: float) -> None:
        """Relabel what has drained, and look at all pools when it is time."""
        for watched in self._watched.values():
            if watched.order is not None:
                self._carry_out(watched, watched.order, now_s)
        if now_s - self._look_s < self._rules.look_s:
            return
        self._look_s = now_s
        pools = {pool.model: pool for pool in self._registry.pools()}
        self._watched = {model: self._watched.get(model, _Watched()) for model in pools}
        for model, pool in pools.items():
            self._look(pool, self._watched[model], now_s)

    def _carry_out(self, watched: _Watched, order: RoleOrder, now_s: float) -> None:
        member = order.member
        if member.relabels_to is None or order.pool.members.get(order.name) is not member:
            self._end(watched, order, "ended", now_s)
        elif _is_drained(order.pool, member, now_s):
            self._registry.set_role(order.name, order.role.value)
            self._end(watched, order, "relabelled", now_s)

    def _end(self, watched: _Watched, order: RoleOrder, outcome: str, now_s: float) -> None:
        watched.order = None
        order.outcome = outcome
        self.counts[outcome] += 1
        self._decisions.ended(order.id, f"to {order.role.value}: {outcome}")
        log.info("instance %s to %s: %s", order.name, order.role.value, outcome)

    def _look(self, pool: Pool, watched: _Watched, now_s: float) -> None:
        drains = None if watched.order is None else watched.order.member
        members = {
            member.slot: Looked(ROLES[member.role], _work(pool, member, now_s), member is drains)
            for member in pool.members.values()
            if member.role in ROLES and (member is drains or member.takes_work(now_s))
        }
        watched.sides = self._sides(pool, watched, members, now_s)
        if not all(side.instances for side in watched.sides.values()):
            return
        watched.balance, found = rebalance(watched.balance, members, watched.sides, self._rules, now_s)
        if found is None:
            return
        member = pool.slots[found.instance]
        assert member is not None
        order = RoleOrder(self._next_id(), pool, member, found.role.other, found.role, watched.sides)
        watched.order = self._orders[order.id] = order
        if len(self._orders) > MAX_ROLE_ORDERS:
            del self._orders[next(iter(self._orders))]
        self._begin(order, now_s)

    def _begin(self, order: RoleOrder, now_s: float) -> None:
        order.member.relabels_to = order.role.value
        order.pool.refresh(now_s)
        self.counts["ordered"] += 1
        logged = Logged(order.id, now_s, order.pool.model, 0, order.pool.options.slo)
        logged.outcome = f"to {order.role.value}: draining"
        setattr(logged, order.role.value, order.name)
        self._decisions.ordered(logged)
        log.info("%s", order.as_json()["words"])

    def _sides(
        self, pool: Pool, watched: _Watched, members: Mapping[int, Looked], now_s: float
    ) -> dict[Role, Side]:
        """Return what each side carries; an instance that drains is on the side that it goes to."""
        roles = [each.role.other if each.draining else each.role for each in members.values()]
        loads = [pool.planner.load(slot, now_s) for slot in members]
        held = Contexts(
            sum(load.active_tokens + load.committed_tokens for load in loads),
            sum(load.active_requests + load.committed_requests for load in loads),
        )
        decode = held, self._waiting(pool, now_s), pool.planner.growth_tokens
        queued_s = sum(load.queue_s for load in loads)
        slo, demand = pool.options.slo, watched.demand.instances(now_s)
        return {
            Role.PREFILL: prefill_side(roles.count(Role.PREFILL), demand, queued_s, slo.ttft_s),
            Role.DECODE: decode_side(roles.count(Role.DECODE), *decode, pool.costs, slo),
        }


def _is_drained(pool: Pool, member: Member, now_s: float) -> bool:
    """Return whether an instance has nothing in its queue and its batch, and nothing on the way there.

    A request whose prefill it has handed on is no work of it, nor is one that was not routed here.
    """
    load = pool.planner.load(member.slot, now_s)
    own = load.active_requests - member.foreign + load.committed_requests
    return not (load.queued or load.is_prefilling or own > 0)


def _work(pool: Pool, member: Member, now_s: float) -> float:
    load = pool.planner.load(member.slot, now_s)
    if member.role == "prefill":
        return load.queue_s
    return float(load.active_tokens + load.committed_tokens)
