"""Copies that were made by order and have cooled: orders to let them go first.

Responsibility: which copies nodes fetched by order, and, as their heat falls below half of what a copy takes, orders to
the nodes that hold them (`tiers.remote.order_poller`) to evict them next. A copy that cools takes the room of a block
that nobody else has.

Invariants:
- Only a copy that was made by order is cooled, and only while another node holds all of it: never the last, as far as
  events say. Each is cooled once; a use there makes it warm again. What warm runs have in common with it stays.
- Copies that are known and orders that are open are bounded: beyond that the oldest copy is left to eviction's own
  choice, as is one whose run is not known any more, and orders wait for the next sweep.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol

from kvfs.keys import HASH_BYTES, split_keys
from kvfs.limits import COPY_ORDER_S, MAX_COOL_ORDERS, MAX_COOLED_BLOCKS, MAX_HOT_RUNS
from kvfs.protocol.copy_orders import OrderedBlocks, OrderedEviction
from scheduler.conductor.sources import StreamName
from scheduler.routing.replication import LEAST_COPY_HEAT, is_cold


class NamedBlocks(NamedTuple):
    """Blocks of one cache group."""

    namespace: bytes
    """The digest; empty of windows and states, which have namespaces that only stores know."""
    hashes: bytes
    model: bytes = b""
    """Of windows and states: `namespace_groups.NamespaceGroup.model`."""
    group: int = 0
    """Of windows and states: the number of their group."""

    @property
    def block_count(self) -> int:
        """Return how many they are."""
        return len(self.hashes) // HASH_BYTES

    def ordered(self) -> OrderedBlocks:
        """Return them as nodes read them."""
        hashes = [key.hex() for key in split_keys(self.hashes)]
        return OrderedBlocks(self.namespace.hex(), self.model.hex(), self.group, hashes)


Parts = tuple[NamedBlocks, ...]
"""What an order is of."""


class Copied(NamedTuple):
    """For which run of which model blocks were ordered, and the nodes that fetched them, the last one last."""

    model: str
    run: int
    nodes: list[StreamName]


class CoolOrder(NamedTuple):
    """An order to have blocks evicted next."""

    id: str
    target: StreamName
    parts: Parts
    expires_s: float


class Copies(Protocol):
    """Says of a model's runs what there is of them now."""

    @property
    def node_count(self) -> int:
        """Return how many nodes may hold blocks."""

    def heat(self, run: int) -> float | None:
        """Return the heat of a run; None where it is not known any more."""

    def holders(self, parts: Parts) -> Sequence[StreamName]:
        """Return the nodes that hold all of some blocks."""

    def apart(self, run: int, node: StreamName) -> Container[bytes]:
        """Return the keys of those blocks of a run at a node that no warm run has, too."""


class CoolOrders:
    """See the module's header. `next_id` names an order."""

    def __init__(self, next_id: Callable[[], str]) -> None:
        self._next_id = next_id
        self._copied: OrderedDict[Parts, Copied] = OrderedDict()
        self._open: OrderedDict[str, CoolOrder] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def copied(self, model: str, run: int, parts: Parts, node: StreamName) -> None:
        """Note that a node has fetched blocks by order, for a run of a model's prompts."""
        found = self._copied.setdefault(parts, Copied(model, run, []))
        if node not in found.nodes:
            found.nodes.append(node)
        self._copied.move_to_end(parts)
        while len(self._copied) > MAX_HOT_RUNS:
            self._copied.popitem(last=False)

    def for_store(self, topic: str) -> list[OrderedEviction]:
        """Return the open orders of the store that publishes under a topic."""
        return [
            OrderedEviction(id=each.id, parts=[part.ordered() for part in each.parts])
            for each in self._open.values()
            if each.target.topic == topic
        ]

    def expire(self, now_s: float) -> None:
        """End the orders whose time is up: nothing says that one was carried out, and none is given again."""
        while self._open and next(iter(self._open.values())).expires_s <= now_s:
            self._open.popitem(last=False)

    def sweep(self, model: str, copies: Copies, now_s: float) -> None:
        """Order copies of a model's cold runs to go, one of each, while orders may be opened."""
        room = MAX_COOLED_BLOCKS - sum(
            part.block_count for order in self._open.values() for part in order.parts
        )
        for parts, found in list(self._copied.items()):
            if found.model != model:
                continue
            heat = copies.heat(found.run)
            if heat is not None and not is_cold(heat, copies.node_count, LEAST_COPY_HEAT):
                continue  # however many hold it: most copies are warm, and to ask for holders takes longer
            held = () if heat is None else copies.holders(parts)
            found.nodes[:] = [node for node in found.nodes if node in held]
            if heat is not None and found.nodes and is_cold(heat, len(held), LEAST_COPY_HEAT):
                room -= sum(part.block_count for part in parts)
                if room < 0 or len(self._open) >= MAX_COOL_ORDERS:
                    return
                node = found.nodes.pop()
                self._cool(node, _among(parts, copies.apart(found.run, node)), now_s)
            if not found.nodes:
                del self._copied[parts]

    def _cool(self, node: StreamName, parts: Parts, now_s: float) -> None:
        if parts:
            order = CoolOrder(self._next_id(), node, parts, now_s + COPY_ORDER_S)
            self._open[order.id] = order
            self.counts["cooled"] += 1
            self.counts["cooled_blocks"] += sum(part.block_count for part in parts)


def _among(parts: Parts, keys: Container[bytes]) -> Parts:
    """Return those of some blocks that have one of these keys."""
    left = (
        part._replace(hashes=b"".join(key for key in split_keys(part.hashes) if key in keys))
        for part in parts
    )
    return tuple(part for part in left if part.hashes)
