"""KV events of the store: which blocks came to a tier, or left one, as messages that routers for vLLM read.

Responsibility: turn what the store reports of its blocks into batches of events and hand them to the publisher. DRAM is
the medium `CPU`, NVMe `STORAGE`; both are `LOCAL`, of the owner `kvfs`, and hashes are the 16 bytes of `kvfs.keys`.
Blocks of a model with several kinds of attention have the kind of their layers, and those that do not read everything
the number of their cache group.

Invariants:
- Batches report changes in the order in which they happened. The first event of a stream says that nothing is there;
  what the start took over follows, so that a subscriber from the first batch on knows everything.
- Who lost batches for good asks for a manifest: all blocks are published again, in the stream and so in order with
  changes; for who knows them already that changes nothing. It happens at most once in MANIFEST_INTERVAL_S.
- At most EVENT_INTERVAL_S passes between a change and its batch, and no batch has more than MAX_EVENT_HASHES.

Concurrency: the service's trio thread. Reporting never waits.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import trio
import trio.lowlevel

from kvfs._native.shared.table import TIER_DRAM, TIER_NVME
from kvfs.events.kv_events import CPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvfs.events.sockets import Publisher
from kvfs.limits import EVENT_INTERVAL_S, MANIFEST_INTERVAL_S, MAX_EVENT_HASHES
from kvfs.namespace_groups import group_in
from kvfs.namespaces import Namespace
from tiers.model.objects import BlockPlaced
from tiers.store.store import Store

OWNER = "kvfs"
_MEDIA = {TIER_DRAM: CPU, TIER_NVME: STORAGE}


class BlockEvents:
    """Publishes what happens to the store's blocks, while `run` runs."""

    def __init__(self, store: Store, publisher: Publisher) -> None:
        self._store, self._publisher = store, publisher
        self._events: list[KVEvent] = []
        self._hashes = 0
        self._last: bytes | None = None
        """The hash that the last event ends with, if it is one of stored blocks."""
        self._changed = trio.Event()
        self._manifest_wanted = trio.Event()
        self._namespaces: dict[bytes, _Layers] = {}
        self.published = 0

    def status(self) -> dict[str, Any]:
        """Describe the topic, the sockets and what was published, as JSON values."""
        return {
            "topic": self._publisher.topic,
            "endpoint": self._publisher.endpoint,
            "replay": self._publisher.replay_endpoint,
            "sequence": self._publisher.sequence,
            "hashes": self.published,
        }

    async def run(self) -> None:
        """Publish and answer requests for replays, until cancelled."""
        self._store.block_listeners.append(self._on_placed)
        self._publisher.on_manifest = lambda: self._manifest_wanted.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publisher.serve_replays)
                self._publisher.publish([AllBlocksCleared()])
                await self._publish_all()
                nursery.start_soon(self._publish_manifests)
                while True:
                    await self._changed.wait()
                    self._changed = trio.Event()
                    await trio.sleep(EVENT_INTERVAL_S)
                    self._flush()
        finally:
            self._store.block_listeners.remove(self._on_placed)

    async def _publish_manifests(self) -> None:
        while True:
            await self._manifest_wanted.wait()
            self._manifest_wanted = trio.Event()
            await self._publish_all()
            self._publisher.manifest_published()
            await trio.sleep(MANIFEST_INTERVAL_S)

    async def _publish_all(self) -> None:
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
                self._removed(placed, medium)
        if self._hashes >= MAX_EVENT_HASHES:
            self._flush()
        self._changed.set()

    def _stored(self, placed: BlockPlaced, medium: str) -> None:
        last = self._events[-1] if self._events else None
        layers = self._layers_of(placed.bucket)
        if (
            isinstance(last, BlockStored)
            and last.medium == medium
            and placed.parent is not None
            and placed.parent == self._last
            and last.group_idx == layers.number
        ):
            last.block_hashes.append(placed.digest)
        else:
            event = BlockStored(
                block_hashes=[placed.digest],
                parent_block_hash=placed.parent,
                token_ids=[],
                block_size=layers.block_tokens,
                lora_id=None,
                medium=medium,
                lora_name=layers.lora,
                group_idx=layers.number,
                kv_cache_spec_kind=layers.kind,
                kv_cache_spec_sliding_window=layers.window_tokens,
                locality="LOCAL",
                ownership=OWNER,
                layers_of=layers.model,
                chunk_tokens=layers.chunk_tokens,
            )
            self._events.append(event)
        self._last = placed.digest
        self._hashes += 1

    def _removed(self, placed: BlockPlaced, medium: str) -> None:
        last, layers = self._events[-1] if self._events else None, self._layers_of(placed.bucket)
        if (
            isinstance(last, BlockRemoved)
            and (last.medium, last.group_idx) == (medium, layers.number)
            and last.layers_of == layers.model
        ):
            last.block_hashes.append(placed.digest)
        else:
            self._events.append(
                BlockRemoved(
                    [placed.digest],
                    medium,
                    layers.number,
                    locality="LOCAL",
                    ownership=OWNER,
                    layers_of=layers.model,
                )
            )
        self._hashes += 1

    def _flush(self) -> None:
        if self._events:
            self._publisher.publish(self._events)
            self.published += self._hashes
            self._events, self._hashes, self._last = [], 0, None

    def _layers_of(self, bucket: bytes) -> _Layers:
        """Return what events say of the blocks of a bucket: it is there until the last of them has gone."""
        row = self._store.names.get_bucket(bucket)
        assert row is not None
        assert row.namespace is not None
        found = self._namespaces.get(row.namespace)
        if found is None:
            namespace = Namespace.from_json(row.namespace_json)
            found = self._namespaces[row.namespace] = _Layers.of(namespace)
        return found


class _Layers(NamedTuple):
    """What events say of the blocks of a namespace."""

    block_tokens: int
    lora: str | None
    number: int | None = None
    kind: str | None = None
    window_tokens: int | None = None
    model: bytes | None = None
    chunk_tokens: int | None = None

    @classmethod
    def of(cls, namespace: Namespace) -> _Layers:
        """Return what they say of a namespace: of one of all layers nothing of what these read."""
        layers, group = cls(namespace.block_tokens, namespace.lora or None), group_in(namespace)
        if group is None:
            return layers
        return cls(
            *layers[:2], group.number, group.kind, group.window_tokens, group.model, group.chunk_tokens
        )
