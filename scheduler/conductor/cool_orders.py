"""Copies that were made by order and have cooled: orders to let them go first.

Responsibility: which copies nodes fetched by order, and, as their heat falls below half of what a copy takes, orders to
the nodes that hold them (`tiers.remote.order_poller`) to evict them next. A copy that cools takes the room of a block
that nobody else has.

Invariants:
- Only a copy that was made by order is cooled, and only while another node holds all of it: never the last, as far as
  events say. Each is cooled once; a use there makes it warm again.
- Copies that are known and orders that are open are bounded: beyond that the oldest copy is left to eviction's own
  choice, and orders wait for the next sweep.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from kvfs.keys import HASH_BYTES
from kvfs.limits import COPY_ORDER_S, MAX_COOL_ORDERS, MAX_HOT_RUNS
from scheduler.conductor.sources import StreamName
from scheduler.routing.replication import LEAST_COPY_HEAT, Heat, is_cold


class Copied(NamedTuple):
    """A run of blocks, and the nodes that fetched it by order, the last one last."""

    namespace: bytes
    hashes: bytes
    nodes: list[StreamName]


class CoolOrder(NamedTuple):
    """An order to have blocks evicted next."""

    id: str
    target: StreamName
    namespace: bytes
    hashes: bytes
    expires_s: float

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON values, as nodes read it."""
        return {"id": self.id, "namespace": self.namespace.hex(), "hashes": in_hex(self.hashes)}


class CoolOrders:
    """See the module's header. `next_id` names an order."""

    def __init__(self, next_id: Callable[[], str]) -> None:
        self._next_id = next_id
        self._copied: OrderedDict[int, Copied] = OrderedDict()
        """By the last block of a run."""
        self._open: OrderedDict[str, CoolOrder] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def copied(self, namespace: bytes, hashes: bytes, node: StreamName) -> None:
        """Note that a node has fetched a run by order."""
        key = int.from_bytes(hashes[-HASH_BYTES:], "big")
        found = self._copied.setdefault(key, Copied(namespace, hashes, []))
        if node not in found.nodes:
            found.nodes.append(node)
        self._copied.move_to_end(key)
        while len(self._copied) > MAX_HOT_RUNS:
            self._copied.popitem(last=False)

    def for_store(self, topic: str) -> list[dict[str, Any]]:
        """Return the open orders of the store that publishes under a topic."""
        return [order.as_json() for order in self._open.values() if order.target.topic == topic]

    def expire(self, now_s: float) -> None:
        """End the orders whose time is up: nothing says that one was carried out, and none is given again."""
        while self._open and next(iter(self._open.values())).expires_s <= now_s:
            self._open.popitem(last=False)

    def sweep(
        self, namespace: bytes, holders: Callable[[bytes], list[StreamName]], heat: Heat, now_s: float
    ) -> None:
        """Order copies of a namespace's cold runs to go, one of each run, while orders may be opened. `holders`: the
        nodes that hold all of a run."""
        for key, found in list(self._copied.items()):
            if len(self._open) >= MAX_COOL_ORDERS:
                return
            if found.namespace != namespace:
                continue
            held = holders(found.hashes)
            found.nodes[:] = [node for node in found.nodes if node in held]
            if found.nodes and is_cold(heat.of(key, now_s), len(held), LEAST_COPY_HEAT):
                self._cool(found, found.nodes.pop(), now_s)
            if not found.nodes:
                del self._copied[key]

    def _cool(self, found: Copied, node: StreamName, now_s: float) -> None:
        order = CoolOrder(self._next_id(), node, found.namespace, found.hashes, now_s + COPY_ORDER_S)
        self._open[order.id] = order
        self.counts["cooled"] += 1
        self.counts["cooled_blocks"] += len(found.hashes) // HASH_BYTES


def in_hex(hashes: bytes) -> list[str]:
    """Return joined hashes, each as hexadecimal text."""
    return [hashes[at : at + HASH_BYTES].hex() for at in range(0, len(hashes), HASH_BYTES)]
