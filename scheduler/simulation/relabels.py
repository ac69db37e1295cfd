"""Instances of a simulation that change their roles.

Responsibility: carries out the orders of `routing.roles`. Each instance has a prefill queue, a batch and a cache; what
it does not do by its role it does not take, which is `draining` for the policies.

Invariants: an instance takes work in one role at most. It is relabelled when it has no queue and no batch, and nobody
is on the way to its batch. Looks end while there is nothing to look at: a trace may have its next request in a year.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.routing.cluster import Cluster
from scheduler.routing.roles import (
    Balance,
    Contexts,
    Demand,
    Member,
    Relabel,
    Role,
    Side,
    decode_side,
    prefill_side,
    rebalance,
)
from scheduler.simulation.event_queue import Events
from scheduler.simulation.nodes import DecodeNode
from scheduler.simulation.options import Options
from scheduler.simulation.results import Change

DRAIN_LOOK_S = 0.5
"""How often it is looked whether an instance has drained."""


def instances(options: Options) -> tuple[int, int]:
    """Return how many instances have a prefill queue, and how many a batch."""
    if options.relabels is not None:
        return options.prefill + options.decode, options.prefill + options.decode
    return options.prefill, options.prefill if options.coupled else options.decode


class Roles:
    """The roles of all instances, where they change."""

    def __init__(
        self,
        events: Events,
        cluster: Cluster,
        decodes: list[DecodeNode],
        waiting: Callable[[], Contexts],
        options: Options,
    ) -> None:
        self._events = events
        self._cluster = cluster
        self._decodes = decodes
        self._waiting = waiting
        self._options = options
        self._roles: list[Role] = []
        self._drains: Relabel | None = None
        self._balance = Balance()
        self._demand = Demand()
        self._looked_s = 0.0
        self._looking = False
        self.changes: list[Change] = []

    def begin(self) -> None:
        """Label all instances, and look at them from now on."""
        rules, options = self._options.relabels, self._options
        if rules is None:
            return
        self._roles = [Role.PREFILL] * options.prefill + [Role.DECODE] * options.decode
        for n, role in enumerate(self._roles):
            self._label(n, role)
        self.wake()

    def wake(self) -> None:
        """Look again, at the time of the next look: a request arrives."""
        rules, now_s = self._options.relabels, self._events.now_s
        if rules is not None and not self._looking:
            self._looking = True
            missed = (now_s - self._looked_s) // rules.look_s
            self._events.at(self._looked_s + (missed + 1) * rules.look_s, self._look)

    def arrived(self, prefill_s: float) -> None:
        """Count a prompt that was committed."""
        if self._roles:
            self._demand = self._demand.added((prefill_s,), self._events.now_s)

    def _label(self, n: int, role: Role) -> None:
        self._roles[n] = role
        self._cluster.prefill[n].draining = role is not Role.PREFILL
        self._cluster.decode[n].draining = role is not Role.DECODE

    def _look(self) -> None:
        rules, now_s = self._options.relabels, self._events.now_s
        assert rules is not None
        for n, node in enumerate(self._decodes):
            node.advance(now_s)
            self._cluster.decode[n].active_requests = node.requests
            self._cluster.decode[n].active_tokens = node.context_tokens
        sides = self._sides()
        self._balance, order = rebalance(self._balance, self._members(), sides, rules, now_s)
        if order is not None:
            self._drains = order
            self._cluster.prefill[order.instance].draining = True
            self._cluster.decode[order.instance].draining = True
            self._drain()
        self._looked_s, self._looking = now_s, False
        if (
            self._drains is not None
            or self._is_busy()
            or any(s.pressure > rules.high for s in sides.values())
        ):
            self.wake()

    def _is_busy(self) -> bool:
        """Return whether there is work. Without any, pressures only fall: no look gives an order until some arrives."""
        prefill, decode = self._cluster.prefill, self._cluster.decode
        return bool(
            self._waiting().requests
            or any(each.running or len(each.queue) for each in prefill)
            or any(each.committed_requests for each in decode)
            or any(node.requests for node in self._decodes)
        )

    def _drain(self) -> None:
        order = self._drains
        assert order is not None
        n = order.instance
        prefill, decode, now_s = self._cluster.prefill[n], self._cluster.decode[n], self._events.now_s
        self._decodes[n].advance(now_s)
        if prefill.running or len(prefill.queue) or decode.committed_requests or self._decodes[n].requests:
            self._events.at(now_s + DRAIN_LOOK_S, self._drain)
            return
        self._label(n, order.role)
        self._drains = None
        self.changes.append(Change(now_s, n, order.role))

    def _members(self) -> dict[int, Member]:
        drains = None if self._drains is None else self._drains.instance
        return {n: Member(role, self._work(n, role), n == drains) for n, role in enumerate(self._roles)}

    def _work(self, n: int, role: Role) -> float:
        if role is Role.PREFILL:
            return self._queued_s(n)
        decode = self._cluster.decode[n]
        return float(decode.active_tokens + decode.committed_tokens)

    def _queued_s(self, n: int) -> float:
        return sum(job.service_s for job in self._cluster.prefill[n].queue.jobs())

    def _sides(self) -> dict[Role, Side]:
        """Return what each side carries; an instance that drains is on the side that it goes to."""
        after = list(self._roles)
        if self._drains is not None:
            after[self._drains.instance] = self._drains.role
        queued_s = sum(self._queued_s(n) for n in range(len(after)))
        decode, growth_tokens = self._cluster.decode, self._cluster.growth_tokens
        held = Contexts(
            sum(each.active_tokens + each.committed_tokens for each in decode),
            sum(each.active_requests + each.committed_requests for each in decode),
        )
        demand = self._demand.instances(self._events.now_s)
        slo, costs = self._options.slo, self._options.costs.slowed_decode(self._options.decode_factor)
        return {
            Role.PREFILL: prefill_side(after.count(Role.PREFILL), demand, queued_s, slo.ttft_s),
            Role.DECODE: decode_side(
                after.count(Role.DECODE), held, self._waiting(), growth_tokens, costs, slo
            ),
        }
