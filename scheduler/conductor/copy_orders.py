"""Copies of hot prefixes that nodes are to fetch from each other, as `routing.replication` orders them.

Responsibility: the heat of runs of blocks that requests wanted, every limits.COPY_SWEEP_S orders to copy the hottest to
nodes that lack them, what became of each order, and pauses for nodes that do not carry theirs out. A node asks for its
orders when it likes (`tiers.remote.order_poller`); its own events say that they are carried out. What was copied and
has cooled goes by `cool_orders`.

A run is what the same nodes hold of a prompt, in pieces of limits.MAX_ORDER_BLOCKS. Of models with several kinds of
attention it is the whole prefix up to where some node can go on no further: only there, and with all before it, windows
and states are of use. What a node lacks of it is one order then, with parts of each cache group.

Invariants:
- A decision waits for none of this: it leaves its prompt in a queue, of which a tick takes a few. Runs, their hashes,
  queue and open orders are bounded; beyond that the oldest goes.
- An order names only blocks that the source's and not the target's events say are there. It ends carried out or
  expired, once; no node has two for the same blocks.
- Full attention is the last part of an order: with that alone a node would be believed to go on from the prefix.
- Blocks of a pool with several shards are not ordered: events name the keys of the first one alone.

Concurrency: one thread; the caller says what time it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby, islice
from typing import Any, NamedTuple

from kvfs._native.cluster.index import ClusterIndex
from kvfs.errors import NotFound
from kvfs.keys import HASH_BYTES, key_at, split_keys
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
    MAX_HOT_HASHES,
    MAX_HOT_RUNS,
    MAX_NAME_BYTES,
    MAX_ORDER_BLOCKS,
)
from kvfs.protocol.copy_orders import NodeOrders, OrderedCopy
from kvfs.system.pauses import Pause
from scheduler.conductor.cool_orders import CoolOrders, NamedBlocks, Parts
from scheduler.conductor.pool import Pool
from scheduler.conductor.registry import Registry
from scheduler.conductor.sources import Stream, StreamName
from scheduler.routing.replication import LEAST_COPY_HEAT, BlockHeat, Copy, Heat, is_cold, replicate


class Wanted(NamedTuple):
    """A prompt that was routed."""

    pool: Pool
    slot: int
    hashes: bytes


class Run(NamedTuple):
    """What requests wanted of a pool's blocks."""

    pool: Pool
    hashes: bytes


class Node(NamedTuple):
    """A store that others read."""

    stream: Stream
    peer: str
    mask: int
    """What the index has of it."""
    queue_s: float
    """The predicted work of its engines."""


class CopyOrder(NamedTuple):
    """An order to fetch blocks from a peer."""

    id: str
    model: str
    """Of the pool."""
    run: int
    """For which run, by its last block."""
    target: StreamName
    peer: str
    parts: Parts
    expires_s: float

    @property
    def keys(self) -> list[bytes]:
        """Return the keys of all blocks."""
        return [key for part in self.parts for key in split_keys(part.hashes)]


def _backoff() -> Pause:
    return Pause(COPY_BACKOFF_S, MAX_COPY_BACKOFF_S)


class CopyOrders:
    """See the module's header. `next_id` names an order."""

    def __init__(self, registry: Registry, index: ClusterIndex, next_id: Callable[[], str]) -> None:
        self._registry, self._index, self._next_id = registry, index, next_id
        self._wanted: deque[Wanted] = deque(maxlen=MAX_HEAT_PROMPTS)
        self._heat = Heat()
        self._runs: OrderedDict[int, Run] = OrderedDict()
        """By their last blocks; the one that was wanted last is last."""
        self._beginning: dict[bytes, set[int]] = {}
        """By the first block, the runs that begin with it."""
        self._hashes = 0
        """Of all runs."""
        self._open: dict[str, CopyOrder] = {}
        self._under_way: dict[StreamName, set[bytes]] = {}
        """The blocks of open orders, by the nodes that are to fetch them."""
        self._cool = CoolOrders(next_id)
        self._backoffs: dict[StreamName, Pause] = {}
        self._sweep_s = float("-inf")
        self.counts: Counter[str] = Counter()

    def routed(self, pool: Pool, slot: int, hashes: bytes) -> None:
        """Leave a prompt to be counted, if its blocks may be ordered: those of one shard, and with full attention."""
        if pool.namespace.tensor_shards * pool.namespace.pipeline_shards > 1 or not pool.has_full:
            return
        if len(self._wanted) == MAX_HEAT_PROMPTS:
            self.counts["prompts_passed_over"] += 1
        self._wanted.append(Wanted(pool, slot, hashes))

    def for_store(self, topic: str) -> NodeOrders:
        """Return the open orders of the store that publishes under a topic: to copy blocks, and to let them go. Raises
        NotFound."""
        if self._registry.users_of(StreamName(topic, 0)) == []:
            raise NotFound(f"store {topic[:MAX_NAME_BYTES]!r}: no instance is registered with it")
        copies = [
            OrderedCopy(id=each.id, peer=each.peer, parts=[part.ordered() for part in each.parts])
            for each in self._open.values()
            if each.target.topic == topic
        ]
        return NodeOrders(copies, self._cool.for_store(topic))

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
        own = set() if member is None else {each.name for each in member.streams}
        masks = [node.mask for node in nodes.values()]
        held_by = cache(lambda holders: tuple(bool(mask & holders) for mask in masks))
        stretches = groupby(self._index.runs(wanted.hashes), lambda run: held_by(run[0]))
        end = 0
        for held, same in islice(stretches, MAX_HEAT_RUNS):
            first, end = end, end + sum(blocks for _, blocks, _ in same)
            if not any(held):
                continue
            is_own = any(has and name in own for name, has in zip(nodes, held, strict=True))
            for hashes in _pieces(wanted, first, end):
                key = int.from_bytes(hashes[-HASH_BYTES:], "big")
                if is_own:
                    self._heat.used(key, sum(held), now_s)
                else:
                    self._heat.loaded(key, now_s)
                self._keep(key, Run(wanted.pool, hashes))

    def _keep(self, key: int, run: Run) -> None:
        """Keep a run as the one that was wanted last; the oldest go where these are too many."""
        self._drop(key)
        self._runs[key] = run
        self._hashes += len(run.hashes) // HASH_BYTES
        self._beginning.setdefault(key_at(run.hashes, 0), set()).add(key)
        while len(self._runs) > MAX_HOT_RUNS or self._hashes > MAX_HOT_HASHES:
            oldest = next(iter(self._runs))
            self._drop(oldest)
            self._heat.remove(oldest)

    def _drop(self, key: int) -> None:
        run = self._runs.pop(key, None)
        if run is None:
            return
        self._hashes -= len(run.hashes) // HASH_BYTES
        first = key_at(run.hashes, 0)
        self._beginning[first].discard(key)
        if not self._beginning[first]:
            del self._beginning[first]

    # --- orders -------------------------------------------------------------------------------------------
    def _sweep(self, now_s: float) -> None:
        pools = {pool.model: _nodes(pool, now_s) for pool in self._registry.pools()}
        self._end_orders(pools, now_s)
        self._cool.expire(now_s)
        left = MAX_COPIED_BLOCKS
        for pool in self._registry.pools():
            nodes = sorted(pools[pool.model].values(), key=_busy_s)
            left -= self._order(pool, nodes, left, now_s)
            self._cool.sweep(pool.model, _Copies(self, pool, nodes, now_s), now_s)

    def _end_orders(self, pools: dict[str, dict[StreamName, Node]], now_s: float) -> None:
        """End the orders that were carried out, and those whose time is up, whose nodes get none for a while."""
        there = {name for nodes in pools.values() for name in nodes}
        self._backoffs = {name: found for name, found in self._backoffs.items() if name in there}
        for order in list(self._open.values()):
            backoff = self._backoffs.setdefault(order.target, _backoff())
            node = pools.get(order.model, {}).get(order.target)
            if node is not None and self.holding([node], order.parts):
                self._backoffs[order.target] = _backoff()
                self.counts["carried_out"] += 1
                self.counts["copied_blocks"] += len(order.keys)
                self._cool.copied(order.model, order.run, order.parts, order.target)
            elif now_s >= order.expires_s:
                if backoff.is_over(now_s):
                    backoff.failed(now_s)
                self.counts["expired"] += 1
            else:
                continue
            self._close(order)

    def _open_order(self, run: int, source: Node, target: Node, parts: Parts, now_s: float) -> None:
        id, model, name = self._next_id(), self._runs[run].pool.model, target.stream.name
        order = CopyOrder(id, model, run, name, source.peer, parts, now_s + COPY_ORDER_S)
        self._open[id] = order
        self._under_way.setdefault(name, set()).update(order.keys)
        self.counts["ordered"] += 1

    def _close(self, order: CopyOrder) -> None:
        del self._open[order.id]
        under_way = self._under_way[order.target]
        under_way.difference_update(order.keys)
        if not under_way:
            del self._under_way[order.target]

    def holding(self, nodes: Sequence[Node], parts: Parts) -> list[Node]:
        """Return the nodes that hold all of some blocks."""
        held = list(nodes)
        for part in parts:
            if part.group:
                keys = split_keys(part.hashes)
                held = [node for node in held if _has_windows(node.stream, keys)]
            else:
                depths = self._index.depths(part.hashes, [node.mask for node in held], limited=False)
                held = [node for node, depth in zip(held, depths, strict=True) if depth == part.block_count]
        return held

    def _order(self, pool: Pool, nodes: Sequence[Node], most_blocks: int, now_s: float) -> int:
        """Order copies of the pool's hottest runs, and return how many blocks these are."""
        targets = [n for n, node in enumerate(nodes) if not self._is_paused(node.stream.name, now_s)]
        hottest = sorted(self._hot(pool, nodes, now_s), key=lambda each: -each.heat)
        holders = {each.block: each.holders for each in hottest}
        ordered = 0
        for found in replicate(hottest, targets, LEAST_COPY_HEAT):
            if not isinstance(found, Copy):
                continue
            hashes, held = self._runs[found.block].hashes, holders[found.block]
            source = next(node for node, has in zip(nodes, self._have(nodes, hashes), strict=True) if has)
            # One that lacks nothing may be unable to go on all the same: its store told of layers that no other has.
            for target in (nodes[n] for n in targets if not held >> n & 1):
                if parts := self._wanting(pool, hashes, source, target):
                    break
            else:
                continue
            count = sum(part.block_count for part in parts)
            if count > MAX_COPIED_BLOCKS:
                continue
            if ordered + count > most_blocks or len(self._open) >= MAX_COPY_ORDERS:
                break
            self._open_order(found.block, source, target, parts, now_s)
            ordered += count
        return ordered

    def _have(self, nodes: Sequence[Node], hashes: bytes) -> list[bool]:
        """Return whether prompts go on at each node behind all of a run."""
        depths = self._index.depths(hashes, [node.mask for node in nodes])
        return [depth * HASH_BYTES == len(hashes) for depth in depths]

    def _wanting(self, pool: Pool, hashes: bytes, source: Node, target: Node) -> Parts:
        """Return what a node lacks of a run and is not to fetch already, full attention last."""
        under_way = self._under_way.get(target.stream.name, ())
        lacking: dict[int, dict[bytes, None]] = {}
        for _, group, key in _beside(source.stream, pool.cache_model, hashes):
            if target.stream.window_blocks is None or key not in target.stream.window_blocks:
                lacking.setdefault(group, {})[key] = None
        wanted = [
            (NamedBlocks(b"", b"", pool.cache_model, group), [*lacking[group]]) for group in sorted(lacking)
        ]
        full = NamedBlocks(pool.namespace.digest, self._index.lacking(hashes, target.mask))
        return tuple(
            blocks._replace(hashes=b"".join(keys[at : at + MAX_ORDER_BLOCKS]))
            for blocks, all_keys in (*wanted, (full, split_keys(full.hashes)))
            if (keys := [key for key in all_keys if key not in under_way])
            for at in range(0, len(keys), MAX_ORDER_BLOCKS)
        )

    def _is_paused(self, stream: StreamName, now_s: float) -> bool:
        backoff = self._backoffs.get(stream)
        return backoff is not None and not backoff.is_over(now_s)

    def _hot(self, pool: Pool, nodes: Sequence[Node], now_s: float) -> Iterator[BlockHeat]:
        """Yield the runs that were wanted since the last sweep, with the nodes that hold all of each, or are to."""
        ordered = {(order.target, order.run) for order in self._open.values()}
        for key, run in self._runs.items():
            heat = self._heat.of(key, now_s)
            recent = now_s - self._heat.touched_s(key) <= COPY_SWEEP_S
            if run.pool is not pool or not recent or heat < LEAST_COPY_HEAT:
                continue
            held = self._have(nodes, run.hashes)
            if any(held):
                has = (held[n] or (node.stream.name, key) in ordered for n, node in enumerate(nodes))
                yield BlockHeat(key, sum(1 << n for n, each in enumerate(has) if each), heat)

    def heat_of(self, run: int, now_s: float) -> float | None:
        """Return the heat of a run; None where it is not known."""
        return self._heat.of(run, now_s) if run in self._runs else None

    def warm_runs(self, first: bytes, now_s: float) -> list[bytes]:
        """Return the hashes of the runs with this first block of which a second copy would stay, in order."""
        keys = self._beginning.get(first, ())
        warm = (key for key in keys if not is_cold(self._heat.of(key, now_s), 2, LEAST_COPY_HEAT))
        return sorted(self._runs[key].hashes for key in warm)

    def hashes_of(self, run: int) -> bytes:
        """Return the hashes of a known run."""
        return self._runs[run].hashes


class _Copies:
    """Implement `cool_orders.Copies` of one pool, in one sweep."""

    def __init__(self, orders: CopyOrders, pool: Pool, nodes: Sequence[Node], now_s: float) -> None:
        self._orders, self._pool, self._now_s = orders, pool, now_s
        self._nodes = {node.stream.name: node for node in nodes}
        self._warm_runs = cache(lambda first: orders.warm_runs(first, now_s))
        self.node_count = len(nodes)

    def heat(self, run: int) -> float | None:
        return self._orders.heat_of(run, self._now_s)

    def holders(self, parts: Parts) -> list[StreamName]:
        return [node.stream.name for node in self._orders.holding([*self._nodes.values()], parts)]

    def apart(self, run: int, node: StreamName) -> set[bytes]:
        hashes = self._orders.hashes_of(run)
        first = _most_in_common(hashes, self._warm_runs(key_at(hashes, 0)))
        beside = _beside(self._nodes[node].stream, self._pool.cache_model, hashes)
        keys = {key for at, _, key in beside if at >= first}
        return keys.union(split_keys(hashes[first * HASH_BYTES :]))


def _nodes(pool: Pool, now_s: float) -> dict[StreamName, Node]:
    """Return the stores of a pool that other nodes may read."""
    found: dict[StreamName, Node] = {}
    for member in pool.members.values():
        for stream in member.streams:
            if stream.is_store and member.instance.store_peer:
                queue_s = pool.planner.load(member.slot, now_s).queue_s
                before = found.get(stream.name)
                mask = stream.mask_of(pool.cache_model)
                peer = member.instance.store_peer if before is None else before.peer
                queue_s += 0.0 if before is None else before.queue_s
                found[stream.name] = Node(stream, peer, mask, queue_s)
    return found


def _busy_s(node: Node) -> float:
    return node.queue_s


def _beside(stream: Stream, model: bytes, hashes: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the blocks of a store's windows and states that are read behind a prefix: which of its blocks each ends
    with, the group and the key."""
    for place in stream.windows:
        if place.model == model and stream.window_blocks is not None:
            for at in place.window.read_before(len(hashes) // HASH_BYTES):
                anchor = key_at(hashes, at)
                for group, key in stream.window_blocks.beside(place, anchor):
                    yield at, group, key


def _most_in_common(one: bytes, others: Sequence[bytes]) -> int:
    """Return how many blocks a prompt has in common with another one at most: with a neighbour, as these are sorted."""
    at = bisect_left(others, one)
    behind = at + 1 if others[at : at + 1] == [one] else at
    return max(
        (_in_common(one, other) for other in (*others[max(at - 1, 0) : at], *others[behind : behind + 1])),
        default=0,
    )


def _in_common(one: bytes, other: bytes) -> int:
    """Return how many blocks two prompts have in common: a block's hash says of all before it, too, that they are."""
    return bisect_left(
        range(min(len(one), len(other)) // HASH_BYTES),
        True,
        key=lambda at: not other.startswith(key_at(one, at), at * HASH_BYTES),
    )


def _has_windows(stream: Stream, keys: Sequence[bytes]) -> bool:
    there = stream.window_blocks
    return there is not None and all(key in there for key in keys)


def _pieces(wanted: Wanted, first: int, end: int) -> Iterator[bytes]:
    """Yield the hashes by which a run of a prompt is counted."""
    if not wanted.pool.cache_model:
        for at in range(first, end, MAX_ORDER_BLOCKS):
            yield wanted.hashes[at * HASH_BYTES : min(at + MAX_ORDER_BLOCKS, end) * HASH_BYTES]
    elif end <= MAX_COPIED_BLOCKS:
        yield wanted.hashes[: end * HASH_BYTES]
