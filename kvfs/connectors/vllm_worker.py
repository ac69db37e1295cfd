"""A worker's half of the vLLM connector: copies blocks between the paged KV cache and the store, around each step.

Responsibility: loads, between steps (`is_async`) or layer by layer ahead of the layer that needs them; stores, layer by
layer behind the layer that computed them; and reports of both.

Invariants:
- A failed load is reported, block by block, no later than its request: the engine computes these blocks.
- A step ends (`wait_for_save`) when its blocks are copied out: the engine may free or reuse them then. Sealing goes on.
- Nothing is loaded or stored from a step whose weights are not the epoch's until the next epoch; a load that ends in
  another epoch than it began in has failed.
- So it is with adapters: a step's blocks are stored only if the worker had loaded what their keys name. An engine loads
  an adapter when it computes with it, which may be after the blocks were loaded: they are reported as failed by the
  step that computes on them, if it is another one.
- A store that does not answer costs at most CONNECTOR_SAVE_S of one step per outage.

Concurrency: called by the worker's thread; stores are copied on one thread and sealed on another, so that a long seal
delays no step; loads run on the client's threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from kvfs._native.blocks.writer import Draft
from kvfs.client.blocks import Blocks
from kvfs.client.layers import Loading
from kvfs.connectors.adapters import LoadedAdapters
from kvfs.connectors.common import Link, chain_parents
from kvfs.connectors.vllm_layout import KVLayout
from kvfs.connectors.vllm_scheduler import BlockRun, Plan, Rank, split_keys
from kvfs.connectors.vllm_weights import Watch
from kvfs.errors import DeadlinePassed, InvalidRequest, KvfsError, NoSpace, QuotaExceeded
from kvfs.limits import (
    CONNECTOR_COPY_S,
    CONNECTOR_LOADS,
    CONNECTOR_QUOTA_SHARE,
    CONNECTOR_SAVE_S,
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


@dataclass(slots=True)
class _Store:
    """Blocks of one step that are being stored."""

    keys: list[bytes]
    parents: list[bytes | None]
    block_ids: list[int]
    drafts: list[Draft | None] = field(default_factory=list)
    layers_begun: int = 0
    jobs: list[Future[None]] = field(default_factory=list)
    given_up: bool = False

    def parts(self, count: int) -> list[_Store]:
        """Return the same blocks in parts of `count`."""
        return [
            _Store(self.keys[i : i + count], self.parents[i : i + count], self.block_ids[i : i + count])
            for i in range(0, len(self.keys), count)
        ]


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
        self._parts: list[_Store] = []
        """Of the step under way, once its first layer is saved."""
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kvfs-stores")
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="kvfs-seals")
        self._sealing = threading.BoundedSemaphore(2)
        """Parts of steps that wait to be sealed: each holds its drafts."""
        self._last_seal: Future[None] | None = None
        self.counts = {
            "loaded_blocks": 0,
            "failed_blocks": 0,
            "stored_blocks": 0,
            "dropped_blocks": 0,
            "weights_changed": 0,
            "adapters_changed": 0,
        }
        link.open(namespace)

    def close(self) -> None:
        self._copier.shutdown(wait=True)
        self._sealer.shutdown(wait=True)
        self._link.close()

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
                    self._begin_store(part)
            for part in self._parts[:1]:
                self._save_layers_to(part, self._layer_of[name] + 1)

    def _parts_of(self, plan: Plan) -> list[_Store]:
        """Return the blocks of a step in parts, of which three fit into what the store lets a user write at once."""
        share_bytes = self._link.quota_bytes // CONNECTOR_QUOTA_SHARE or CONNECTOR_STORE_BYTES
        most_bytes = min(CONNECTOR_STORE_BYTES, share_bytes)
        count = min(CONNECTOR_STORE_BLOCKS, most_bytes // self._layout.block_bytes)
        stores = [run for run in plan.stores if run.request_id not in self.adapters.refused]
        return _step_of(stores, self._rank).parts(max(count, 1))

    def _begin_store(self, store: _Store) -> None:
        store.jobs.append(self._copier.submit(self._reserve, store, self._last_seal))

    def _save_layers_to(self, store: _Store, end: int) -> None:
        for layer in range(store.layers_begun, end):
            store.jobs.append(self._copier.submit(self._save_one, store, layer))
        store.layers_begun = max(store.layers_begun, end)

    def finish(self, plan: Plan) -> None:
        """End a step: copy out the remaining blocks, part by part, and have them sealed."""
        parts, self._parts = self._parts, []
        if not plan.stores:
            return
        parts = parts or self._parts_of(plan)
        if not self._is_right_on_all_ranks(plan):
            begun = [part for part in parts if part.jobs]
            self.counts["dropped_blocks"] += sum(len(part.keys) for part in parts if not part.jobs)
            for part in begun:  # its drafts are aborted
                part.given_up = True
            parts = begun
        for part in parts:
            self._finish_part(part)

    def _finish_part(self, part: _Store) -> None:
        if not self._layout.is_on_cpu:
            copies = self._layout.gather(part.block_ids)
            self._seal_behind(lambda blocks: self._put(blocks, part, copies), len(part.keys))
            return
        if not part.jobs:
            self._begin_store(part)
        self._save_layers_to(part, len(self._layout.layers))
        for job in part.jobs:
            job.result()
        self._seal_behind(lambda blocks: self._seal(blocks, part), len(part.keys))

    def _reserve(self, store: _Store, before: Future[None] | None) -> None:
        """Reserve a part's drafts; `before` is the end of the seals under way."""
        blocks = self._link.blocks(self._namespace)
        if blocks is None or not self._link.is_up:
            store.given_up = True
            return
        sizes = [self._layout.block_bytes] * len(store.keys)
        reserve = partial(
            blocks.reserve,
            store.keys,
            sizes,
            store.parents,
            layers=len(self._layout.layers),
            timeout_s=CONNECTOR_SAVE_S,
        )
        try:
            store.drafts = _with_room(reserve, before)
        except InvalidRequest as error:
            log.error("blocks are not stored: %s", error)
            store.given_up = True
        except (KvfsError, OSError) as error:
            self._link.failed(error)
            store.given_up = True

    def _save_one(self, store: _Store, layer: int) -> None:
        if store.given_up:
            return
        place = self._layout.layers[layer]
        try:
            for draft, block in zip(store.drafts, store.block_ids, strict=True):
                if draft is not None:
                    at = block * place.block_stride_bytes
                    runs = [at + offset for offset in place.run_offsets]
                    draft.save_layer(layer, [place.memory[run : run + place.run_bytes] for run in runs])
        except (KvfsError, OSError) as error:
            log.warning("blocks are not stored: %s", error)
            store.given_up = True

    def _seal_behind(self, do: Callable[[Blocks], int | None], count: int) -> None:
        """Seal on another thread; wait where two parts are waiting: the engine is faster than the store."""
        self._sealing.acquire()
        self._last_seal = self._sealer.submit(self._seal_all, do, count)
        self._last_seal.add_done_callback(lambda _: self._sealing.release())

    def _seal_all(self, do: Callable[[Blocks], int | None], count: int) -> None:
        blocks, stored = self._link.blocks(self._namespace), None
        try:
            stored = None if blocks is None else do(blocks)
        except InvalidRequest as error:
            log.error("blocks are not stored: %s", error)
        except (KvfsError, OSError) as error:
            self._link.failed(error)
        self.counts["stored_blocks"] += stored or 0
        self.counts["dropped_blocks"] += count if stored is None else 0

    def _seal(self, blocks: Blocks, store: _Store) -> int | None:
        """Seal the drafts of a part; return how many were new. None: none is stored, and all drafts are aborted."""
        try:
            if self._link.is_up and not store.given_up:
                return sum(blocks.seal(store.drafts, timeout_s=CONNECTOR_SAVE_S))
        except BaseException:
            blocks.abort(store.drafts, timeout_s=CONNECTOR_SAVE_S)
            raise
        blocks.abort(store.drafts, timeout_s=CONNECTOR_SAVE_S)
        return None

    def _put(self, blocks: Blocks, step: _Store, copies: torch.Tensor) -> int | None:
        if not self._link.is_up:
            return None
        return sum(blocks.put(step.keys, list(copies), step.parents, timeout_s=CONNECTOR_TIMEOUT_S))


def _with_room(reserve: Callable[[], list[Draft | None]], before: Future[None] | None) -> list[Draft | None]:
    """Reserve drafts; where there is no room for them, once more when the seals under way have ended.

    A part that is left out would end every later match before the parts behind it. Raises NoSpace, QuotaExceeded.
    """
    under_way = before is not None and not before.done()
    try:
        return reserve()
    except (NoSpace, QuotaExceeded):
        if before is None or not under_way:
            raise
    wait([before], CONNECTOR_SAVE_S)
    return reserve()


def _step_of(stores: Sequence[BlockRun], rank: Rank) -> _Store:
    """Return all blocks of a step, each once: requests of one step may share a prefix."""
    step, seen = _Store([], [], []), set()
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
