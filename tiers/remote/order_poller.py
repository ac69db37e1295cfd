"""A Conductor's orders to fetch hot blocks from peers, and to let copies go, carried out at this node's own pace.

Responsibility: ask for the orders of this node again and again, have the blocks fetched behind urgent reads, and copies
that have cooled evicted next.

Invariants:
- An order reaches only what a client of this node could: a peer of the settings or a member of the directory, a
  namespace that has a bucket here, charged to the bucket's owner. It can add cache blocks, whose bytes are verified,
  and have those of a cache go before others where there is no room, and nothing else.
- One order is carried out at a time, its parts in turn: full attention without the windows before it would be taken for
  a hit. One whose blocks did not all come is tried again when it is named again, each time after a longer pause.
- A Conductor that does not answer is asked less and less often; nothing else here waits for it.

Concurrency: one trio task.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec
import trio

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import InvalidRequest, KvfsError
from kvfs.http.bounded_get import GetFailed, get
from kvfs.keys import HASH_BYTES
from kvfs.namespace_groups import group_in
from kvfs.namespaces import Namespace
from kvfs.protocol.copy_orders import NodeOrders, OrderedBlocks, OrderedCopy, OrderedEviction
from kvfs.system.pauses import Pause
from tiers.model.objects import Bucket
from tiers.store.catalog import bucket_of_row
from tiers.store.store import Store

log = logging.getLogger("kvfs.remote")


Caches = dict[bytes | tuple[bytes, int], list[Bucket]]
"""By the digest of a namespace, and by model and number of a group of windows or states."""


class FetchesBlocks(Protocol):
    """Fetch blocks from peers (`tiers.remote.cluster`)."""

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int:
        """Fetch blocks that are not here; return how many are here then. Raises InvalidRequest of an unknown hint."""

    @property
    def refusal(self) -> str:
        """Return why this machine fetches nothing that others name; empty where it does."""


class OrderPoller:
    """See the module's header."""

    def __init__(self, settings: ClusterSettings, store: Store, cluster: FetchesBlocks) -> None:
        self._url = f"{settings.conductor}/v1/orders/{settings.conductor_topic}"
        token = settings.conductor_token.get_secret_value()
        self._headers = [f"Authorization: Bearer {token}"] if token else []
        self._store, self._cluster = store, cluster
        self._tried: OrderedDict[str, Pause] = OrderedDict()
        """By order, when it is tried again."""
        self._cooled: OrderedDict[str, None] = OrderedDict()
        """Orders that were carried out: a second time would let go what was used since."""
        self._groups: dict[bytes, tuple[bytes, int] | None] = {}
        """Of namespaces with windows or states their model and number."""
        self._fault = ""
        self.counts: Counter[str] = Counter()

    def status(self) -> dict[str, int]:
        """Return counts as JSON values."""
        names = ("orders_done", "orders_failed", "ordered_blocks", "cooled_blocks", "order_answers_failed")
        return {name: self.counts[name] for name in names}

    async def run(self) -> None:
        """Ask and fetch until cancelled."""
        pause = Pause(2 * limits.ORDERS_INTERVAL_S, limits.MAX_ORDERS_INTERVAL_S)
        while True:
            if await self.look():
                pause.succeeded()
                wait_s = limits.ORDERS_INTERVAL_S
            else:
                wait_s = pause.failed(trio.current_time())
            await trio.sleep(wait_s * random.uniform(0.75, 1.25))

    async def look(self) -> bool:
        """Ask once, unless this machine takes nothing now, and carry out what is to be done; return whether that is
        answered."""
        if self._cluster.refusal:
            return True
        try:
            found = await self._ask()
        except GetFailed as error:
            self.counts["order_answers_failed"] += 1
            if self._fault != str(error):
                self._fault = str(error)
                log.warning("%s: %s", self._url, error)
            return False
        self._fault = ""
        caches = self._caches() if found.orders or found.cool else {}
        for cooling in found.cool[: limits.MAX_COOL_ORDERS]:
            self._cool(cooling, caches)
        for order in found.orders[: limits.MAX_COPY_ORDERS]:
            pause = self._tried.get(order.id) or Pause(limits.ORDERS_INTERVAL_S, limits.COPY_ORDER_S)
            if pause.is_over(trio.current_time()):
                await self._carry_out(order, caches, pause)
        return True

    async def _ask(self) -> NodeOrders:
        with trio.move_on_after(limits.ORDERS_WAIT_S):
            text = await get(self._url, limits.MAX_ORDERS_BYTES, self._headers)
            try:
                return msgspec.json.decode(text, type=NodeOrders)
            except msgspec.MsgspecError as error:
                raise GetFailed(f"no orders: {error}") from None
        raise GetFailed(f"no answer in {limits.ORDERS_WAIT_S} s")

    async def _carry_out(self, order: OrderedCopy, caches: Caches, pause: Pause) -> None:
        """Fetch the parts of an order one by one, each where those before are here as a whole."""
        here, whole = 0, False
        try:
            for part in order.parts:
                came = await self._fetch(part, order.peer, caches)
                here, whole = here + came, came == len(part.hashes)
                if not whole:
                    break
        except KvfsError as error:
            log.info("order %r: %s", order.id[: limits.MAX_NAME_BYTES], error)
            whole = False
        self.counts["orders_done" if whole else "orders_failed"] += 1
        self.counts["ordered_blocks"] += here
        if whole:
            pause.until_s = trio.current_time() + limits.COPY_ORDER_S
        else:
            pause.failed(trio.current_time())
        self._tried[order.id] = pause
        self._tried.move_to_end(order.id)
        while len(self._tried) > limits.MAX_COPY_ORDERS:
            self._tried.popitem(last=False)

    async def _fetch(self, part: OrderedBlocks, peer: str, caches: Caches) -> int:
        """Fetch blocks; return how many are here then. Raises KvfsError."""
        buckets, digests = _named(part, caches)
        here = 0
        for bucket in buckets:
            here += await self._cluster.fetch(bucket, digests, uid=bucket.uid, hint=peer, urgent=False)
            if here >= len(digests):
                break
        return here

    def _cool(self, order: OrderedEviction, caches: Caches) -> None:
        """Have an order's blocks evicted next, once."""
        if order.id in self._cooled:
            return
        self._cooled[order.id] = None
        while len(self._cooled) > limits.MAX_COPY_ORDERS:
            self._cooled.popitem(last=False)
        for part in order.parts:
            try:
                buckets, digests = _named(part, caches)
            except KvfsError as error:
                log.info("order %r: %s", order.id[: limits.MAX_NAME_BYTES], error)
                continue
            names = {bucket.name for bucket in buckets}
            for digest in digests:
                block = self._store.catalog.blocks.get(digest)
                if block is not None and block.bucket in names:
                    self._store.cool(digest)
                    self.counts["cooled_blocks"] += 1

    def _caches(self) -> Caches:
        """Return the caches that orders may name: one of each namespace, and all of each cache group.

        Of a group these are several where engines that lay its blocks out differently have one store: each block is in
        the namespace of one of them, at the peer as here.
        """
        found: Caches = {}
        for row in self._store.names.buckets():
            bucket = bucket_of_row(row)
            if bucket.namespace is None or bucket.durable:
                continue
            found.setdefault(bucket.namespace, [bucket])
            if group := self._group_in(bucket.namespace, row.namespace_json):
                found.setdefault(group, []).append(bucket)
        return found

    def _group_in(self, namespace: bytes, namespace_json: bytes) -> tuple[bytes, int] | None:
        """Return the group of windows or states that a namespace is of, which takes 40 us the first time."""
        if namespace not in self._groups:
            while len(self._groups) >= limits.MAX_BUCKETS:
                self._groups.clear()
            self._groups[namespace] = _windows_in(namespace_json)
        return self._groups[namespace]


def _windows_in(namespace_json: bytes) -> tuple[bytes, int] | None:
    try:
        group = group_in(Namespace.from_json(namespace_json))
    except KvfsError:  # of a later version's
        return None
    return None if group is None or group.number is None else (group.model, group.number)


def _named(part: OrderedBlocks, caches: Caches) -> tuple[list[Bucket], list[bytes]]:
    """Return the caches that may have some blocks, and these. Raises InvalidRequest."""
    try:
        namespace, model = bytes.fromhex(part.namespace), bytes.fromhex(part.model)
        digests = list(map(bytes.fromhex, part.hashes))
    except ValueError:
        raise InvalidRequest("namespace, model or hashes are not hexadecimal") from None
    if len(digests) > limits.MAX_ORDER_BLOCKS or any(len(each) != HASH_BYTES for each in digests):
        raise InvalidRequest(f"hashes: {limits.MAX_ORDER_BLOCKS} of {HASH_BYTES} bytes at most")
    buckets = caches.get((model, part.group) if part.group else namespace)
    if buckets is None:
        raise InvalidRequest(f"no cache here has this {'group' if part.group else 'namespace'}")
    return buckets, digests
