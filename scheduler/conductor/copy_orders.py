"""Copies of hot prefixes that nodes are to fetch from each other, as `routing.replication` orders them.

Responsibility: the heat of runs of blocks that requests wanted, every limits.COPY_SWEEP_S orders to copy the hottest to
nodes that lack them, what became of each order, and pauses for nodes that do not carry theirs out. A node asks for its
orders when it likes (`tiers.remote.order_poller`); its own events say that they are carried out. What was copied and
has cooled goes by `cool_orders`.

Invariants:
- A decision waits for none of this: it leaves its prompt in a queue, of which a tick takes a few. Runs, queue and open
  orders are bounded; beyond that the oldest goes.
- An order names only blocks that the source's and not the target's events say are there. It ends carried out or
  expired, once; no node has two for the same blocks.
- Blocks of a pool with several shards are not ordered: events name the keys of the first one alone. Nor are those of a
  model with several kinds of attention: prompts are looked up by the keys of full attention, without whose windows and
  states a copy would be worth nothing.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from kvfs._native.cluster.index import ClusterIndex
from kvfs.errors import NotFound
from kvfs.keys import HASH_BYTES
from kvfs.limits import (
    COPY_BACKOFF_S,
    COPY_ORDER_S,
    COPY_SWEEP_S,
    HEAT_PROMPTS_TICK,
    MAX_COPIED_BLOCKS,
    MAX_COPY_BACKOFF_S,
    MAX_COPY_ORDERS,
    MAX_HEAT_PROMPTS,
    MAX_HEAT_RUNS,
    MAX_HOT_RUNS,
    MAX_NAME_BYTES,
    MAX_ORDER_BLOCKS,
)
from kvfs.system.pauses import Pause
from scheduler.conductor.cool_orders import CoolOrders, in_hex
from scheduler.conductor.pool import Pool
from scheduler.conductor.registry import Registry
from scheduler.conductor.sources import StreamName
from scheduler.routing.replication import LEAST_COPY_HEAT, BlockHeat, Copy, Heat, replicate


class Wanted(NamedTuple):
    """A prompt that was routed."""

    pool: Pool
    slot: int
    hashes: bytes


class Node(NamedTuple):
    """A store that others read."""

    stream: StreamName
    peer: str
    mask: int
    """What the index has of it."""
    queue_s: float
    """The predicted work of its engines."""


class CopyOrder(NamedTuple):
    """An order to fetch blocks from a peer."""

    id: str
    target: StreamName
    peer: str
    namespace: bytes
    hashes: bytes
    expires_s: float

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON values, as nodes read it."""
        namespace = self.namespace.hex()
        return {"id": self.id, "peer": self.peer, "namespace": namespace, "hashes": in_hex(self.hashes)}


def _backoff() -> Pause:
    return Pause(COPY_BACKOFF_S, MAX_COPY_BACKOFF_S)


class CopyOrders:
    """See the module's header. `next_id` names an order."""

    def __init__(self, registry: Registry, index: ClusterIndex, next_id: Callable[[], str]) -> None:
        self._registry, self._index, self._next_id = registry, index, next_id
        self._wanted: deque[Wanted] = deque(maxlen=MAX_HEAT_PROMPTS)
        self._heat = Heat()
        self._runs: OrderedDict[int, tuple[Pool, bytes]] = OrderedDict()
        """By the last block of a run, its hashes; the one that was wanted last is last."""
        self._open: dict[str, CopyOrder] = {}
        self._cool = CoolOrders(next_id)
        self._backoffs: dict[StreamName, Pause] = {}
        self._sweep_s = float("-inf")
        self.counts: Counter[str] = Counter()

    def routed(self, pool: Pool, slot: int, hashes: bytes) -> None:
        """Leave a prompt to be counted, if its blocks may be ordered."""
        if pool.layers or pool.namespace.tensor_shards * pool.namespace.pipeline_shards > 1:
            return
        if len(self._wanted) == MAX_HEAT_PROMPTS:
            self.counts["prompts_passed_over"] += 1
        self._wanted.append(Wanted(pool, slot, hashes))

    def for_store(self, topic: str) -> dict[str, list[dict[str, Any]]]:
        """Return the open orders of the store that publishes under a topic: to copy blocks, and to let them go. Raises
        NotFound."""
        if self._registry.users_of(StreamName(topic, 0)) == []:
            raise NotFound(f"store {topic[:MAX_NAME_BYTES]!r}: no instance is registered with it")
        copies = [order.as_json() for order in self._open.values() if order.target.topic == topic]
        return {"orders": copies, "cool": self._cool.for_store(topic)}

    def status(self) -> dict[str, Any]:
        """Return counts as JSON values."""
        counts = {**self.counts, **self._cool.counts}
        return {"runs": len(self._runs), "open": len(self._open), "counts": counts}

    # --- heat ---------------------------------------------------------------------------------------------
    def tick(self, now_s: float) -> None:
        """Count some prompts, end orders, and give new ones when it is time."""
        some = [self._wanted.popleft() for _ in range(min(len(self._wanted), HEAT_PROMPTS_TICK))]
        nodes = {pool.model: _nodes(pool, now_s) for pool in {wanted.pool for wanted in some}}
        for wanted in some:
            self._count(wanted, nodes[wanted.pool.model], now_s)
        if now_s - self._sweep_s >= COPY_SWEEP_S:
            self._sweep_s = now_s
            self._sweep(now_s)

    def _count(self, wanted: Wanted, nodes: dict[StreamName, Node], now_s: float) -> None:
        """Count a use of each run of a prompt that some store holds, or a load where the prompt's own lacks it."""
        member = wanted.pool.slots[wanted.slot]
        own = (
            [] if member is None else [nodes[each.name].mask for each in member.streams if each.name in nodes]
        )
        first = 0
        for holders, blocks, _ in islice(self._index.runs(wanted.hashes), MAX_HEAT_RUNS):
            copies = sum(bool(node.mask & holders) for node in nodes.values())
            hashes = wanted.hashes[first * HASH_BYTES : (first + blocks) * HASH_BYTES]
            first += blocks
            if not copies:
                continue
            for piece in _pieces(hashes):
                key = int.from_bytes(piece[-HASH_BYTES:], "big")
                if any(mask & holders for mask in own):
                    self._heat.used(key, copies, now_s)
                else:
                    self._heat.loaded(key, now_s)
                self._runs[key] = wanted.pool, piece
                self._runs.move_to_end(key)
        while len(self._runs) > MAX_HOT_RUNS:
            self._heat.remove(self._runs.popitem(last=False)[0])

    # --- orders -------------------------------------------------------------------------------------------
    def _sweep(self, now_s: float) -> None:
        self._end_orders(now_s)
        self._cool.expire(now_s)
        left = MAX_COPIED_BLOCKS
        for pool in self._registry.pools():
            nodes = sorted(_nodes(pool, now_s).values(), key=_busy_s)
            left -= self._order(pool, nodes, left, now_s)
            self._cool.sweep(pool.namespace.digest, partial(self._holders, nodes), self._heat, now_s)

    def _end_orders(self, now_s: float) -> None:
        """End the orders that were carried out, and those whose time is up, whose nodes get none for a while."""
        masks = {
            name: node.mask for pool in self._registry.pools() for name, node in _nodes(pool, now_s).items()
        }
        self._backoffs = {name: found for name, found in self._backoffs.items() if name in masks}
        for order in list(self._open.values()):
            blocks = len(order.hashes) // HASH_BYTES
            backoff = self._backoffs.setdefault(order.target, _backoff())
            if self._held(order.hashes, masks.get(order.target, 0)) == blocks:
                self._backoffs[order.target] = _backoff()
                self.counts["carried_out"] += 1
                self.counts["copied_blocks"] += blocks
                self._cool.copied(order.namespace, order.hashes, order.target)
            elif now_s >= order.expires_s:
                if backoff.is_over(now_s):
                    backoff.failed(now_s)
                self.counts["expired"] += 1
            else:
                continue
            del self._open[order.id]

    def _holders(self, nodes: Sequence[Node], hashes: bytes) -> list[StreamName]:
        return [node.stream for node, has in zip(nodes, self._have(nodes, hashes), strict=True) if has]

    def _have(self, nodes: Sequence[Node], hashes: bytes) -> list[bool]:
        """Return whether each node has all of a run."""
        depths = self._index.depths(hashes, [node.mask for node in nodes])
        return [depth * HASH_BYTES == len(hashes) for depth in depths]

    def _held(self, hashes: bytes, mask: int) -> int:
        return self._index.depths(hashes, [mask])[0]

    def _order(self, pool: Pool, nodes: Sequence[Node], most_blocks: int, now_s: float) -> int:
        """Order copies of the pool's hottest runs, and return how many blocks these are."""
        targets = [n for n, node in enumerate(nodes) if not self._is_paused(node.stream, now_s)]
        hottest = sorted(self._hot(pool, nodes, now_s), key=lambda each: -each.heat)
        ordered = 0
        for found in replicate(hottest, targets, LEAST_COPY_HEAT):
            if not isinstance(found, Copy):
                continue
            hashes = self._runs[found.block][1]
            blocks = len(hashes) // HASH_BYTES
            if ordered + blocks > most_blocks or len(self._open) >= MAX_COPY_ORDERS:
                break
            source = next(node for node in nodes if self._held(hashes, node.mask) == blocks)
            target, digest = nodes[found.target].stream, pool.namespace.digest
            order = CopyOrder(self._next_id(), target, source.peer, digest, hashes, now_s + COPY_ORDER_S)
            self._open[order.id] = order
            ordered += blocks
            self.counts["ordered"] += 1
        return ordered

    def _is_paused(self, stream: StreamName, now_s: float) -> bool:
        backoff = self._backoffs.get(stream)
        return backoff is not None and not backoff.is_over(now_s)

    def _hot(self, pool: Pool, nodes: Sequence[Node], now_s: float) -> Iterator[BlockHeat]:
        """Yield the runs that were wanted since the last sweep, with the nodes that hold all of each, or are to."""
        ordered = {(order.target, order.hashes) for order in self._open.values()}
        for key, (owner, hashes) in self._runs.items():
            heat = self._heat.of(key, now_s)
            recent = now_s - self._heat.touched_s(key) <= COPY_SWEEP_S
            if owner is not pool or not recent or heat < LEAST_COPY_HEAT:
                continue
            held = self._have(nodes, hashes)
            if any(held):
                has = (held[n] or (node.stream, hashes) in ordered for n, node in enumerate(nodes))
                yield BlockHeat(key, sum(1 << n for n, each in enumerate(has) if each), heat)


def _nodes(pool: Pool, now_s: float) -> dict[StreamName, Node]:
    """Return the stores of a pool that other nodes may read."""
    found: dict[StreamName, Node] = {}
    for member in pool.members.values():
        for stream in member.streams:
            if stream.is_store and member.instance.store_peer:
                queue_s = pool.planner.load(member.slot, now_s).queue_s
                before = found.get(stream.name)
                mask = sum(1 << source for _, source in stream.media(pool.layers))
                peer = member.instance.store_peer if before is None else before.peer
                queue_s += 0.0 if before is None else before.queue_s
                found[stream.name] = Node(stream.name, peer, mask, queue_s)
    return found


def _busy_s(node: Node) -> float:
    return node.queue_s


def _pieces(hashes: bytes) -> Iterator[bytes]:
    step = MAX_ORDER_BLOCKS * HASH_BYTES
    for at in range(0, len(hashes), step):
        yield hashes[at : at + step]
