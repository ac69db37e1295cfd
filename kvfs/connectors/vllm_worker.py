"""A worker's half of the vLLM connector: copies blocks between the paged KV cache and the store, around each step.

Responsibility: loads, between steps (`is_async`) or layer by layer ahead of the layer that needs them; which blocks of
a step are stored, layer by layer behind the layer that computed them (`kvfs.connectors.vllm_stores`); and reports of
both.

Invariants:
- A failed load is reported, block by block, no later than its request: the engine computes these blocks.
- A step ends (`wait_for_save`) when its blocks are copied out: the engine may free or reuse them then. Sealing goes on.
- Nothing is loaded or stored from a step whose weights are not the epoch's until the next epoch; a load that ends in
  another epoch than it began in has failed.
- So it is with adapters: a step's blocks are stored only if the worker had loaded what their keys name. An engine loads
  an adapter when it computes with it, which may be after the blocks were loaded: they are reported as failed by the
  step that computes on them, if it is another one.

Concurrency: called by the worker's thread; loads run on the client's threads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvfs.client.layers import Loading
from kvfs.connectors.adapters import LoadedAdapters
from kvfs.connectors.common import Link, chain_parents
from kvfs.connectors.vllm_layout import KVLayout
from kvfs.connectors.vllm_scheduler import BlockRun, Plan, Rank, split_keys
from kvfs.connectors.vllm_stores import Part, Stores
from kvfs.connectors.vllm_weights import Watch
from kvfs.errors import DeadlinePassed, KvfsError
from kvfs.limits import (
    CONNECTOR_COPY_S,
    CONNECTOR_LOADS,
    CONNECTOR_QUOTA_SHARE,
    CONNECTOR_STORE_BLOCKS,
    CONNECTOR_STORE_BYTES,
    CONNECTOR_TIMEOUT_S,
)
from kvfs.namespaces import Namespace

log = logging.getLogger("kvfs.connectors")


@dataclass(slots=True)
class _Load:
    run: BlockRun
    sizes: Future[list[int]]
    """Bytes of each block, -1 for a miss."""
    epoch: int
    staging: torch.Tensor | None = None


class Transfers:
    """Load and store the blocks of one worker."""

    def __init__(
        self,
        link: Link,
        namespace: Namespace,
        rank: Rank,
        layout: KVLayout,
        *,
        is_async: bool,
        watch: Watch,
        adapters: LoadedAdapters,
    ) -> None:
        """Take what compares weights and adapters with those of the plans."""
        self._link, self._namespace, self._rank, self._layout = link, namespace, rank, layout
        self._is_async = is_async
        self._watch, self.adapters = watch, adapters
        self._epoch = 0
        self._layer_of = {name: layer for layer, name in enumerate(layout.names)}
        self._loads: dict[str, _Load] = {}
        self._layered: list[tuple[BlockRun, Loading | None]] = []
        self._finished: set[str] = set()
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
        self.stores = Stores(link, namespace, layout, self.counts)
        link.open(namespace)

    def close(self) -> None:
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

    def _begin_load(self, run: BlockRun) -> None:
        blocks = self._link.blocks(self._namespace)
        if blocks is None or not self._watch.is_right or len(self._loads) >= CONNECTOR_LOADS:
            self._finish(run, [-1] * len(run.block_ids))
            return
        staging = None
        if self._layout.is_on_cpu:
            places = self._layout.places(run.block_ids)
        else:
            staging = torch.empty((len(run.block_ids), self._layout.block_bytes), dtype=torch.uint8)
            places = list(staging)  # type: ignore[assignment]
        try:
            sizes = blocks.get_into_async(run.keys[self._rank], places, timeout_s=CONNECTOR_TIMEOUT_S)
        except KvfsError as error:
            log.warning("a load did not begin: %s", error)
            self._finish(run, [-1] * len(run.block_ids))
            return
        self._loads[run.request_id] = _Load(run, sizes, self._epoch, staging)
        if run.adapter is not None:
            self.adapters.loading(run.request_id, run.adapter, run.block_ids)

    def _begin_layers(self, run: BlockRun) -> Loading | None:
        blocks = self._link.blocks(self._namespace)
        if blocks is None or not self._watch.is_right or run.request_id in self.adapters.refused:
            return None
        layers = [self._layout.places(run.block_ids, layer) for layer in range(len(self._layout.layers))]
        return self._link.attempt(
            lambda: blocks.load_layers(run.keys[self._rank], layers, timeout_s=CONNECTOR_TIMEOUT_S), None
        )

    def wait_layer(self, name: str) -> None:
        """Wait until a layer of all loads of this step is there; missing blocks are reported with the step.

        Raises DeadlinePassed where a copy does not end: it may still write to these blocks.
        """
        layer = self._layer_of.get(name)
        if layer is None or not self._layered:
            return
        for run, loading in self._layered:
            hits = [False] * len(run.block_ids)
            if loading is not None:
                hits = self._wait(loading, layer, hits)
            if layer == len(self._layout.layers) - 1:
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

    def take_finished(self) -> set[str]:
        """Return requests whose loads have ended or failed since the last call."""
        for request_id, load in list(self._loads.items()):
            if load.sizes.done():
                del self._loads[request_id]
                self._finish(load.run, self._sizes_of(load), load.staging)
        finished, self._finished = self._finished, set()
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
        good = [size == self._layout.block_bytes for size in sizes]
        if staging is not None and any(good):
            which = [i for i, is_good in enumerate(good) if is_good]
            self._layout.scatter([run.block_ids[i] for i in which], staging[which])
        self._count(run, good)
        self._finished.add(run.request_id)

    # --- stores -------------------------------------------------------------------------------------------
    def save_layer(self, plan: Plan, name: str) -> None:
        """Begin to copy out a layer's blocks, once its cache has this step's tokens."""
        if self._layout.is_on_cpu and plan.stores and self._watch.is_right and name in self._layer_of:
            if not self._parts:
                self._parts = self._parts_of(plan)
                for part in self._parts[:1]:
                    self.stores.begin(part)
            for part in self._parts[:1]:
                self.stores.copy_layers(part, self._layer_of[name] + 1)

    def _parts_of(self, plan: Plan) -> list[Part]:
        """Return the blocks of a step in parts, of which three fit into what the store lets a user write at once."""
        share_bytes = self._link.quota_bytes // CONNECTOR_QUOTA_SHARE or CONNECTOR_STORE_BYTES
        most_bytes = min(CONNECTOR_STORE_BYTES, share_bytes)
        count = min(CONNECTOR_STORE_BLOCKS, most_bytes // self._layout.block_bytes)
        stores = [run for run in plan.stores if run.request_id not in self.adapters.refused]
        return _step_of(stores, self._rank).split(max(count, 1))

    def finish(self, plan: Plan) -> None:
        """End a step: copy out the remaining blocks, part by part, and have them sealed."""
        parts, self._parts = self._parts, []
        if not plan.stores:
            return
        parts = parts or self._parts_of(plan)
        store = self.stores.finish if self._is_right_on_all_ranks(plan) else self.stores.give_up
        for part in parts:
            store(part)


def _step_of(stores: Sequence[BlockRun], rank: Rank) -> Part:
    """Return all blocks of a step, each once: requests of one step may share a prefix."""
    step, seen = Part([], [], []), set()
    for run in stores:
        keys = split_keys(run.keys[rank])
        for key, parent, block in zip(
            keys, chain_parents(keys, run.parents[rank]), run.block_ids, strict=True
        ):
            if key not in seen:
                seen.add(key)
                step.keys.append(key)
                step.parents.append(parent)
                step.block_ids.append(block)
    return step
