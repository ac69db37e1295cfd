"""A Conductor's orders to fetch hot blocks from peers, carried out at this node's own pace.

Responsibility: ask for the orders of this node again and again, and have the blocks fetched behind urgent reads.

Invariants:
- An order reaches only what a client of this node could: a peer of the settings or a member of the directory, a
  namespace that has a bucket here, charged to the bucket's owner. It can add cache blocks, whose bytes are verified,
  and nothing else.
- One order is carried out at a time. One whose blocks did not all come is tried again when it is named again, each time
  after a longer pause.
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
from tiers.model.objects import Bucket
from tiers.store.store import Store

log = logging.getLogger("kvfs.remote")


class FetchesBlocks(Protocol):
    """Fetch blocks from peers (`tiers.remote.cluster`)."""

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int: ...


class Order(msgspec.Struct, frozen=True):
    id: str
    peer: str
    namespace: str
    hashes: list[str]


class Orders(msgspec.Struct, frozen=True):
    orders: list[Order]


class OrderPoller:
    """See the module's header."""

    def __init__(self, settings: ClusterSettings, store: Store, cluster: FetchesBlocks) -> None:
        self._url = f"{settings.conductor}/v1/orders/{settings.conductor_topic}"
        token = settings.conductor_token.get_secret_value()
        self._headers = [f"Authorization: Bearer {token}"] if token else []
        self._store, self._cluster = store, cluster
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By order, how often it was tried, and when it is tried again."""
        self._fault = ""
        self.counts: Counter[str] = Counter()

    def status(self) -> dict[str, int]:
        """Return counts as JSON values."""
        names = ("orders_done", "orders_failed", "ordered_blocks", "order_answers_failed")
        return {name: self.counts[name] for name in names}

    async def run(self) -> None:
        """Ask and fetch until cancelled."""
        pause_s = limits.ORDERS_INTERVAL_S
        while True:
            pause_s = (
                limits.ORDERS_INTERVAL_S
                if await self.look()
                else min(2 * pause_s, limits.MAX_ORDERS_INTERVAL_S)
            )
            await trio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def look(self) -> bool:
        """Ask once, and carry out what is to be done; return whether there was an answer."""
        try:
            found = await self._ask()
        except GetFailed as error:
            self.counts["order_answers_failed"] += 1
            if self._fault != str(error):
                self._fault = str(error)
                log.warning("%s: %s", self._url, error)
            return False
        self._fault = ""
        for order in found[: limits.MAX_COPY_ORDERS]:
            tries, again_s = self._tries.get(order.id, (0, 0.0))
            if trio.current_time() >= again_s:
                await self._carry_out(order, tries)
        return True

    async def _ask(self) -> list[Order]:
        with trio.move_on_after(limits.ORDERS_WAIT_S):
            text = await get(self._url, limits.MAX_ORDERS_BYTES, self._headers)
            try:
                return msgspec.json.decode(text, type=Orders).orders
            except msgspec.MsgspecError as error:
                raise GetFailed(f"no orders: {error}") from None
        raise GetFailed(f"no answer in {limits.ORDERS_WAIT_S} s")

    async def _carry_out(self, order: Order, tries: int) -> None:
        here, wanted = 0, len(order.hashes)
        try:
            here = await self._fetch(order)
        except KvfsError as error:
            log.info("order %r: %s", order.id[: limits.MAX_NAME_BYTES], error)
        whole = here == wanted
        self.counts["orders_done" if whole else "orders_failed"] += 1
        self.counts["ordered_blocks"] += here
        pause_s = limits.COPY_ORDER_S if whole else limits.ORDERS_INTERVAL_S * 2 ** min(tries, 8)
        self._tries[order.id] = tries + 1, trio.current_time() + pause_s
        self._tries.move_to_end(order.id)
        while len(self._tries) > limits.MAX_COPY_ORDERS:
            self._tries.popitem(last=False)

    async def _fetch(self, order: Order) -> int:
        """Fetch an order's blocks; return how many are here then. Raises KvfsError."""
        try:
            namespace, digests = bytes.fromhex(order.namespace), list(map(bytes.fromhex, order.hashes))
        except ValueError:
            raise InvalidRequest("namespace or hashes are not hexadecimal") from None
        if len(digests) > limits.MAX_ORDER_BLOCKS or any(len(each) != HASH_BYTES for each in digests):
            raise InvalidRequest(f"hashes: {limits.MAX_ORDER_BLOCKS} of {HASH_BYTES} bytes at most")
        bucket = next((each for each in self._store.catalog.buckets() if each.namespace == namespace), None)
        if bucket is None:
            raise InvalidRequest("no bucket here has this namespace")
        return await self._cluster.fetch(bucket, digests, uid=bucket.uid, hint=order.peer, urgent=False)
