"""KV events of the store: which blocks came to a tier, or left one, as messages that routers for vLLM read.

Responsibility: turn what the store tells of its blocks into batches of events and hand them to the publisher. DRAM is
the medium `CPU`, NVMe `STORAGE`; both are `LOCAL`, of the owner `kvfs`, and hashes are the 16 bytes of `kvfs.keys`.

Invariants:
- Batches tell changes in the order in which they happened. The first event of a stream says that nothing is there; what
  the start took over follows, so that a subscriber from the first batch on knows everything.
- At most EVENT_INTERVAL_S passes between a change and its batch, and no batch has more than MAX_EVENT_HASHES.

Concurrency: the service's trio thread. Telling never waits.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import trio
import trio.lowlevel

from kvfs._native.table import TIER_DRAM, TIER_NVME
from kvfs.event_sockets import Publisher
from kvfs.events import CPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvfs.limits import EVENT_INTERVAL_S, MAX_EVENT_HASHES
from kvfs.namespaces import Namespace
from tiers.model import BlockPlaced
from tiers.store import TieredStore

OWNER = "kvfs"
_MEDIA = {TIER_DRAM: CPU, TIER_NVME: STORAGE}


class BlockEvents:
    """Publishes what happens to the store's blocks, while `run` runs."""

    def __init__(self, store: TieredStore, publisher: Publisher) -> None:
        self._store, self._publisher = store, publisher
        self._events: list[KVEvent] = []
        self._hashes = 0
        self._last: bytes | None = None
        """The hash that the last event ends with, if it is one of stored blocks."""
        self._changed = trio.Event()
        self._namespaces: dict[bytes, Namespace] = {}
        self.published = 0

    def status(self) -> dict[str, Any]:
        return {
            "endpoint": self._publisher.endpoint,
            "replay": self._publisher.replay_endpoint,
            "sequence": self._publisher.sequence,
            "hashes": self.published,
        }

    async def run(self) -> None:
        """Publish and answer requests for replays, until cancelled."""
        self._store.block_listeners.append(self._on_placed)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publisher.serve_replays)
                await self._tell_all()
                while True:
                    await self._changed.wait()
                    self._changed = trio.Event()
                    await trio.sleep(EVENT_INTERVAL_S)
                    self._flush()
        finally:
            self._store.block_listeners.remove(self._on_placed)

    async def _tell_all(self) -> None:
        self._publisher.publish([AllBlocksCleared()])
        placed = self._store.placed_blocks()
        while some := list(islice(placed, MAX_EVENT_HASHES)):
            for each in some:
                self._on_placed(each)
            self._flush()
            await trio.lowlevel.checkpoint()

    def _on_placed(self, placed: BlockPlaced) -> None:
        for tier, medium in _MEDIA.items():
            if placed.after & tier and not placed.before & tier:
                self._stored(placed, medium)
            elif placed.before & tier and not placed.after & tier:
                self._removed(placed.digest, medium)
        if self._hashes >= MAX_EVENT_HASHES:
            self._flush()
        self._changed.set()

    def _stored(self, placed: BlockPlaced, medium: str) -> None:
        last = self._events[-1] if self._events else None
        namespace = self._namespace_of(placed.bucket)
        if (
            isinstance(last, BlockStored)
            and last.medium == medium
            and placed.parent is not None
            and placed.parent == self._last
        ):
            last.block_hashes.append(placed.digest)
        else:
            event = BlockStored(
                block_hashes=[placed.digest],
                parent_block_hash=placed.parent,
                token_ids=[],
                block_size=namespace.block_tokens,
                lora_id=None,
                medium=medium,
                lora_name=namespace.lora or None,
                locality="LOCAL",
                ownership=OWNER,
            )
            self._events.append(event)
        self._last = placed.digest
        self._hashes += 1

    def _removed(self, digest: bytes, medium: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(digest)
        else:
            self._events.append(BlockRemoved([digest], medium, locality="LOCAL", ownership=OWNER))
        self._hashes += 1

    def _flush(self) -> None:
        if self._events:
            self._publisher.publish(self._events)
            self.published += self._hashes
            self._events, self._hashes, self._last = [], 0, None

    def _namespace_of(self, bucket: bytes) -> Namespace:
        row = self._store.names.get_bucket(bucket)
        assert row is not None
        assert row.namespace is not None
        if row.namespace not in self._namespaces:
            self._namespaces[row.namespace] = Namespace.from_json(row.namespace_json)
        return self._namespaces[row.namespace]
