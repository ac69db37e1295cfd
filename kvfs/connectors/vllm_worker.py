"""A worker's half of the vLLM connector: copies blocks between the paged KV cache and the store, around each step.

A worker has a shard of each cache group: of the only one, or of several (`kvfs.connectors.vllm_group_planner`).

Responsibility: loads, between steps (`is_async`) or layer by layer ahead of the layer that needs them; which blocks of
a step are stored, layer by layer behind the layer that computed them (`kvfs.connectors.vllm_stores`); and reports of
both.

Invariants:
- A failed load is reported, block by block, no later than its request: the engine computes these blocks. A request
  whose blocks are of several groups is reported once the last of its loads has ended.
- A step ends (`wait_for_save`) when its blocks are copied out, or will be before anything that the engine starts
  afterwards: it may free or reuse them then. Sealing goes on.
- Nothing is loaded or stored from a step whose weights are not the epoch's until the next epoch; a load that ends in
  another epoch than it began in has failed.
- So it is with adapters: a step's blocks are stored only if the worker had loaded what their keys name. An engine loads
  an adapter when it computes with it, which may be after the blocks were loaded: they are reported as failed by the
  step that computes on them, if it is another one.

Concurrency: called by the worker's thread; loads run on the client's threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kvfs._native.cuda.driver import Context, open_driver
from kvfs.client.blocks import Blocks
from kvfs.client.device_pool import DevicePool, Earlier
from kvfs.client.layers import Loading
from kvfs.connectors.adapters import LoadedAdapters
from kvfs.connectors.common import Link, chain_parents
from kvfs.connectors.device.copies import DeviceCopies
from kvfs.connectors.device.pooled import PoolCounts, PooledBlocks
from kvfs.connectors.vllm_layout import KVLayout, Shard
from kvfs.connectors.vllm_scheduler import BlockRun, Plan, Rank
from kvfs.connectors.vllm_stores import Part, Stores
from kvfs.connectors.vllm_weights import Watch
from kvfs.errors import DeadlinePassed, KvfsError, SessionClosed
from kvfs.keys import split_keys
from kvfs.limits import (
    CONNECTOR_COPY_S,
    CONNECTOR_LOADS,
    CONNECTOR_QUOTA_SHARE,
    CONNECTOR_STORE_BLOCKS,
    CONNECTOR_STORE_BYTES,
    CONNECTOR_TIMEOUT_S,
)

log = logging.getLogger("kvfs.connectors")


@dataclass(slots=True)
class _Load:
    run: BlockRun
    sizes: Future[list[int]]
    """Bytes of each block, -1 for a miss."""
    epoch: int
    staging: torch.Tensor | None
    begun_s: float
    is_named: bool = False
    """Whether the log has it as one that does not end."""


class Transfers:
    """Load and store the blocks of one worker."""

    def __init__(
        self,
        link: Link,
        shards: Mapping[Rank, Shard],
        *,
        is_async: bool,
        watch: Watch,
        adapters: LoadedAdapters,
        device: DeviceCopies | None = None,
    ) -> None:
        """Take what compares weights and adapters with those of the plans, and a driver's copies for the caches'
        device. `is_async`: loads are between steps, as they must be with several shards."""
        assert is_async or len(shards) == 1
        self._link, self._shards, self._is_async = link, dict(shards), is_async
        self._device = device
        self._pooled: dict[Rank, PooledBlocks] = {}
        """What loads from, and adds to, the caches' device's own memory."""
        if device is not None:
            for rank, shard in shards.items():
                self._pooled[rank] = device.loads.pooled(partial(self._attach_pool, shard))
        self._is_on_cpu = all(shard.layout.is_on_cpu for shard in shards.values())
        self._watch, self.adapters = watch, adapters
        self._epoch = 0
        self._layer_of = {
            name: (shard, layer)
            for shard in shards.values()
            if shard.layout.is_even
            for layer, name in enumerate(shard.layout.names)
        }
        """Of blocks that are copied layer by layer."""
        self._loads: list[_Load] = []
        self._layered: list[tuple[BlockRun, Loading | None]] = []
        self._finished: dict[str, bool] = {}
        """Requests of which a load has ended, and whether all blocks are there."""
        self._failed_blocks: set[int] = set()
        self._parts: list[Part] = []
        """Of the step under way, once its first layer is saved."""
        self.counts = {
            "loaded_blocks": 0,
            "failed_blocks": 0,
            "stored_blocks": 0,
            "dropped_blocks": 0,
            "late_blocks": 0,
            "weights_changed": 0,
            "adapters_changed": 0,
        }
        self.stores = Stores(link, self.counts, None if device is None else device.stores)
        for shard in shards.values():
            link.open(shard.namespace)

    def close(self) -> None:
        """End loads and stores; waits for those under way."""
        if self._device is not None:
            self._device.loads.close()
        self.stores.close()

    # --- weights ------------------------------------------------------------------------------------------
    def enter(self, plan: Plan) -> None:
        """Begin a step: look at the weights that it computes with, if anything is loaded or stored."""
        self._epoch = plan.epoch
        self._watch.enter(plan.epoch)
        if plan.loads or plan.stores or self._loads or (plan.computes and self._watch.is_new):
            self._watch.look()
            self.counts["weights_changed"] = self._watch.changes
        failed = self.adapters.enter(plan.adapters)
        self._failed_blocks |= failed
        self.counts["failed_blocks"] += len(failed)
        self.counts["adapters_changed"] += len(self.adapters.reports)

    @property
    def ended_epoch(self) -> int | None:
        """Return the epoch whose weights have changed; None while they have not."""
        return None if self._watch.is_right else self._epoch

    def _is_right_on_all_ranks(self, plan: Plan) -> bool:
        """Return whether no rank has found weights, or an adapter of what is stored, changed at the end of a step."""
        right = self._watch.ask()
        self.counts["weights_changed"] = self._watch.changes
        return right and self.adapters.ask(run.request_id for run in plan.stores)

    # --- loads --------------------------------------------------------------------------------------------
    def begin(self, plan: Plan) -> None:
        """Begin what the step is to load."""
        self._layered = []
        for run in plan.loads:
            if self._is_async:
                self._begin_load(run)
            else:
                self._layered.append((run, self._begin_layers(run)))

    def _shard_of(self, run: BlockRun) -> tuple[Rank, Shard]:
        return next((rank, shard) for rank, shard in self._shards.items() if rank in run.keys)

    def _begin_load(self, run: BlockRun) -> None:
        rank, shard = self._shard_of(run)
        blocks = self._link.blocks(shard.namespace)
        is_full = len(self._loads) >= CONNECTOR_LOADS * len(self._shards)
        if blocks is None or not self._watch.is_right or is_full:
            self._finish(run, [-1] * len(run.block_ids))
            return
        try:
            sizes, staging = self._read(blocks, rank, run, shard.layout)
        except KvfsError as error:
            log.warning("a load did not begin: %s", error)
            self._finish(run, [-1] * len(run.block_ids))
            return
        self._loads.append(_Load(run, sizes, self._epoch, staging, time.monotonic()))
        if run.adapter is not None:
            self.adapters.loading(run.request_id, run.adapter, run.block_ids)

    def _read(
        self, blocks: Blocks, rank: Rank, run: BlockRun, layout: KVLayout
    ) -> tuple[Future[list[int]], torch.Tensor | None]:
        """Read blocks into the cache, or on their way there into the memory that is returned."""
        keys, block_ids = run.keys[rank], run.block_ids
        if layout.is_on_cpu:
            return blocks.get_into_async(keys, layout.places(block_ids), timeout_s=CONNECTOR_TIMEOUT_S), None
        if self._device is None:
            staging = torch.empty((len(block_ids), layout.block_bytes), dtype=torch.uint8)
            return blocks.get_into_async(keys, list(staging), timeout_s=CONNECTOR_TIMEOUT_S), staging
        sizes = self._device.loads.submit(
            lambda some, places, left_s: blocks.get_into(some, places, timeout_s=left_s),
            keys,
            layout.device_places(block_ids),
            timeout_s=CONNECTOR_TIMEOUT_S,
            pooled=self._pooled[rank],
        )
        return sizes, None

    def _attach_pool(
        self, shard: Shard, context: Context, timeout_s: float, earlier: Earlier | None
    ) -> DevicePool | None:
        """Take a place in the pool of a shard's blocks. Raises SessionClosed during an outage."""
        blocks = self._link.blocks(shard.namespace)
        if blocks is None:
            raise SessionClosed("the service does not answer")
        return blocks.device_pool(open_driver(), context, timeout_s=timeout_s, earlier=earlier)

    @property
    def pool_counts(self) -> dict[str, int]:
        """Return what was loaded from GPU memory and verified, added to it, and found wrong there, in blocks."""
        counts = [asdict(pooled.counts) for pooled in self._pooled.values()]
        return {f"pool_{name}_blocks": sum(each[name] for each in counts) for name in asdict(PoolCounts())}

    def _begin_layers(self, run: BlockRun) -> Loading | None:
        rank, shard = self._shard_of(run)
        blocks = self._link.blocks(shard.namespace)
        if blocks is None or not self._watch.is_right or run.request_id in self.adapters.refused:
            return None
        layers = [shard.layout.places(run.block_ids, layer) for layer in range(len(shard.layout.layers))]
        return self._link.attempt(
            lambda: blocks.load_layers(run.keys[rank], layers, timeout_s=CONNECTOR_TIMEOUT_S), None
        )

    def wait_layer(self, name: str) -> None:
        """Wait until a layer of all loads of this step is there; missing blocks are reported with the step.

        Raises DeadlinePassed where a copy does not end: it may still write to these blocks.
        """
        if name not in self._layer_of or not self._layered:
            return
        shard, layer = self._layer_of[name]
        for run, loading in self._layered:
            hits = [False] * len(run.block_ids)
            if loading is not None:
                hits = self._wait(loading, layer, hits)
            if layer == len(shard.layout.layers) - 1:
                self._count(run, hits)

    def _wait(self, loading: Loading, layer: int, missed: list[bool]) -> list[bool]:
        try:
            return loading.wait_layer(layer, timeout_s=CONNECTOR_COPY_S)
        except DeadlinePassed:
            raise
        except (KvfsError, OSError) as error:
            log.warning("a load failed: %s", error)
            return missed

    def _count(self, run: BlockRun, good: Sequence[bool]) -> None:
        failed = [block for block, is_good in zip(run.block_ids, good, strict=True) if not is_good]
        self._failed_blocks.update(failed)
        self.counts["loaded_blocks"] += len(good) - len(failed)
        self.counts["failed_blocks"] += len(failed)

    def take_finished(self) -> dict[str, bool]:
        """Return requests whose loads have ended or failed since the last call, and whether all blocks are there."""
        loads, self._loads = self._loads, []
        for load in loads:
            if load.sizes.done():
                self._finish(load.run, self._sizes_of(load), load.staging)
            else:
                self._loads.append(load)
                _name_if_late(load)
        under_way = {load.run.request_id for load in self._loads}
        finished = {each: good for each, good in self._finished.items() if each not in under_way}
        self._finished = {each: good for each, good in self._finished.items() if each in under_way}
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Return blocks of the cache whose loads have failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _sizes_of(self, load: _Load) -> list[int]:
        missed = [-1] * len(load.run.block_ids)
        if load.epoch != self._epoch or not self._watch.is_right:
            return missed
        try:
            return load.sizes.result()
        except (KvfsError, OSError) as error:
            log.warning("a load failed: %s", error)
            return missed

    def _finish(self, run: BlockRun, sizes: list[int], staging: torch.Tensor | None = None) -> None:
        _, shard = self._shard_of(run)
        good = [size == shard.layout.block_bytes for size in sizes]
        if staging is not None and any(good):
            which = [i for i, is_good in enumerate(good) if is_good]
            shard.layout.scatter([run.block_ids[i] for i in which], staging[which])
        self._count(run, good)
        self._finished[run.request_id] = self._finished.get(run.request_id, True) and all(good)

    # --- stores -------------------------------------------------------------------------------------------
    def save_layer(self, plan: Plan, name: str) -> None:
        """Begin to copy out a layer's blocks, once its cache has this step's tokens."""
        if self._is_on_cpu and plan.stores and self._watch.is_right and name in self._layer_of:
            if not self._parts:
                self._parts = self._parts_of(plan)
                for part in self._parts[:1]:
                    self.stores.begin(part)
            shard, layer = self._layer_of[name]
            for part in self._parts[:1]:
                if part.shard is shard:
                    self.stores.copy_layers(part, layer + 1)

    def _parts_of(self, plan: Plan) -> list[Part]:
        """Return the blocks of a step in parts, of which three fit into what the store lets a user write at once."""
        share_bytes = self._link.quota_bytes // CONNECTOR_QUOTA_SHARE or CONNECTOR_STORE_BYTES
        most_bytes = min(CONNECTOR_STORE_BYTES, share_bytes)
        stores = [run for run in plan.stores if run.request_id not in self.adapters.refused]
        parts = []
        for rank, shard in self._shards.items():
            count = min(CONNECTOR_STORE_BLOCKS, most_bytes // shard.layout.block_bytes)
            parts += _step_of([run for run in stores if rank in run.keys], rank, shard).split(max(count, 1))
        return parts

    def finish(self, plan: Plan) -> None:
        """End a step: copy out the remaining blocks, part by part, and have them stored."""
        parts, self._parts = self._parts, []
        if not plan.stores:
            return
        parts = parts or self._parts_of(plan)
        store = self.stores.finish if self._is_right_on_all_ranks(plan) else self.stores.give_up
        for part in parts:
            store(part)


def _name_if_late(load: _Load) -> None:
    """Log once that a load does not end. Its request waits on: the copy may still write to its blocks."""
    taken_s = time.monotonic() - load.begun_s
    if taken_s > CONNECTOR_COPY_S and not load.is_named:
        load.is_named = True
        log.error(
            "a load of %d blocks has not ended after %.0f s: its request %s waits for it",
            len(load.run.block_ids),
            taken_s,
            load.run.request_id,
        )


def _step_of(stores: Sequence[BlockRun], rank: Rank, shard: Shard) -> Part:
    """Return all blocks of a group and step, each once: requests of one step may share a prefix."""
    step, seen = Part(shard, [], [], []), set()
    for run in stores:
        keys = split_keys(run.keys[rank])
        anchors = None if run.anchors is None else split_keys(run.anchors[rank])
        parents = chain_parents(keys, run.parents[rank]) if anchors is None else anchors
        for key, parent, block in zip(keys, parents, run.block_ids, strict=True):
            if key not in seen:
                seen.add(key)
                step.keys.append(key)
                step.parents.append(parent)
                step.block_ids.append(block)
    return step
