"""`KVFSConnector` for vLLM: blocks by prefix hash, loaded and stored through the store's own pages.

    --kv-transfer-config '{"kv_connector": "KVFSConnector", "kv_connector_module_path": "kvfs.connectors.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"address": "/mnt/kvfs"}}'

Responsibility: vLLM's interface (KVConnectorBase_V1); `Planner` works in the scheduler's process, `Transfers` in each
worker's. Further keys of kv_connector_extra_config: `revision` (of the weights; else their files identify them), `load`
(`async`, between steps, or `layers`, within the step), `store` (`all` or `prompt`), `fetch` (blocks of other machines:
of those that a request `named`, or of `any`).

Layers of one kind are a cache group with blocks, keys and a namespace of its own: many models have one group, of full
attention; for those with sliding windows or recurrent layers vLLM's hybrid KV cache manager stays on.

Weights: keys have a digest of all ranks' weights in memory. `reset_cache` begins an epoch, whose number goes to the
workers with each step's plan: in each step a worker compares its weights with those of the epoch before anything is
loaded or stored.

Invariants: without kv_load_failure_policy `recompute`, vLLM fails requests whose blocks were evicted meanwhile, so the
start requires it. Concurrency: as vLLM calls it, one thread on each side.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.lora.utils import get_adapter_absolute_path
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

from kvfs.connectors.adapters import LoadedAdapters
from kvfs.connectors.common import VLLM_LOG, Link, address_of
from kvfs.connectors.device.torch_device import copies_of
from kvfs.connectors.vllm_group_planner import GroupPlanner
from kvfs.connectors.vllm_layout import Shard, check_parallel, shard_of
from kvfs.connectors.vllm_rules.cache_groups import (
    block_tokens_of,
    check_settings,
    extra_of,
    groups_of,
    is_plain,
    why_unkept,
)
from kvfs.connectors.vllm_scheduler import Plan, Planner, Rank, Step
from kvfs.connectors.vllm_weights import Peers, Watch, adapters_of, calling_worker, models_of
from kvfs.connectors.vllm_worker import Transfers
from kvfs.errors import InvalidRequest
from kvfs.namespace_groups import STATE, describe_groups
from kvfs.namespaces import Namespace

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvfs.connectors")
_KNOWN_BY = (
    *("namespace", "groups", "weights", "role"),
    *("store_topic", "store_endpoint", "store_replay", "store_peer"),
)
"""What a Conductor has to know of an engine: labels of the metric `vllm:kvfs_info`."""
_CHOICES = {"load": ("async", "layers"), "store": ("all", "prompt"), "fetch": ("named", "any")}
_KEYS = frozenset(("address", "revision", *_CHOICES))


@dataclass
class KVFSMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, once per step."""

    plan: Plan


@dataclass
class KVFSHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From each worker to the scheduler, once: its namespaces by cache group, as JSON, and the sample of its weights in
    memory."""

    namespaces: dict[int, str]
    weights: bytes


@dataclass
class KVFSReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler: what they compute with, where it is not what it was taken for."""

    epoch: int
    """In which some worker's weights have changed; -1: in none."""
    adapters: dict[int, tuple[int, str]]
    """By number: the epoch that ends, and the name of what was loaded."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVFSReport:
        assert isinstance(other, KVFSReport)
        return KVFSReport(max(self.epoch, other.epoch), {**self.adapters, **other.adapters})


@dataclass
class KVFSInfo(KVConnectorStats):  # type: ignore[misc]
    """From the scheduler to the server's process, whenever it changes: `data` has a text for each of _KNOWN_BY."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVFSInfo:
        return KVFSInfo({**self.data, **other.data})

    def reduce(self) -> dict[str, int | float]:
        return {}

    def is_empty(self) -> bool:
        return not self.data


class KVFSInfoMetric(KVConnectorPromMetrics):  # type: ignore[misc]
    """Show at `/metrics` of each engine what it said last: the sample that is 1."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._gauge = self._gauge_cls(  # vLLM removes metrics with its own name before it makes them again
            name="vllm:kvfs_info",
            documentation="What a Conductor knows this engine's blocks by.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, *_KNOWN_BY],
        )
        self._shown: dict[int, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if engine_idx in self._shown:
            self._shown[engine_idx].set(0)
        values = [str(transfer_stats_data.get(name, "")) for name in _KNOWN_BY]
        self._shown[engine_idx] = self._gauge.labels(*self.per_engine_labelvalues[engine_idx], *values)
        self._shown[engine_idx].set(1)


def check_config(extra: dict[str, Any]) -> dict[str, str]:
    """Return the configured choices, with defaults. Raises InvalidRequest naming the key."""
    unknown = sorted(set(extra) - _KEYS)
    if unknown:
        raise InvalidRequest(
            f"kv_connector_extra_config: {unknown[0]!r} is unknown; there are {', '.join(sorted(_KEYS))}"
        )
    chosen = {name: extra.get(name, choices[0]) for name, choices in _CHOICES.items()}
    for name, value in chosen.items():
        if value not in _CHOICES[name]:
            raise InvalidRequest(
                f"kv_connector_extra_config: {name} is {value!r}, not one of {', '.join(_CHOICES[name])}"
            )
    return chosen


class KVFSConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Connect vLLM's scheduler or one of its workers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._chosen = check_config(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidRequest(
                "kv_load_failure_policy must be 'recompute': with 'fail', vLLM ends a request whose blocks were "
                "evicted between its lookup and its load"
            )
        check_parallel(vllm_config.parallel_config)
        unkept = why_unkept(kv_cache_config, vllm_config)
        self._is_idle = bool(unkept)
        """Whether nothing can be kept: then no worker has a namespace, without which nothing is planned."""
        self._groups = [] if self._is_idle else groups_of(kv_cache_config)
        self._is_plain = is_plain(kv_cache_config.kv_cache_groups)
        if self._is_idle:
            if role == KVConnectorRole.SCHEDULER:
                logging.getLogger(VLLM_LOG).warning(
                    "kvfs: nothing is loaded or stored, the engine computes every prompt: %s", unkept
                )
        elif not self._is_plain:
            check_settings(self._groups, vllm_config, self._chosen["load"])
        self._link = Link(
            address_of(transfer.kv_connector_extra_config), name="vllm", log=logging.getLogger(VLLM_LOG)
        )
        self._planner: Planner | None = None
        self._transfers: Transfers | None = None
        self._shards: dict[Rank, Shard] = {}
        self._watch: Watch | None = None
        self._own_cache: Any = None
        self._known_by: dict[str, str] = {}
        self._said: dict[str, str] = {}
        """What the server's process was last told of it."""
        if role == KVConnectorRole.SCHEDULER:
            self._planner = self._new_planner()

    def _new_planner(self) -> Planner:
        block_tokens = block_tokens_of(self._kv_cache_config.kv_cache_groups)
        store_generated, fetches_any = self._chosen["store"] == "all", self._chosen["fetch"] == "any"
        if not self._is_plain:
            return GroupPlanner(
                self._link,
                block_tokens,
                self._groups,
                store_generated=store_generated,
                fetches_any=fetches_any,
            )
        return Planner(
            self._link,
            block_tokens,
            store_generated=store_generated,
            is_async=self._chosen["load"] == "async",
            fetches_any=fetches_any,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a missing block is computed again

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layers"

    # --- worker -------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._is_idle:
            return
        self._shards = self._shards_of(kv_caches)
        layouts = [shard.layout for shard in self._shards.values()]
        if self._chosen["load"] == "layers" and not all(each.is_on_cpu and each.is_even for each in layouts):
            raise InvalidRequest(
                "load = 'layers' is for KV caches in CPU memory whose layers have one size; use 'async'"
            )
        ranks = self._vllm_config.parallel_config.world_size
        peers = Peers(str(self._vllm_config.kv_transfer_config.engine_id), ranks)
        worker = calling_worker()
        self._watch = Watch(partial(models_of, worker), peers)
        self._transfers = Transfers(
            self._link,
            self._shards,
            is_async=self._chosen["load"] == "async",
            watch=self._watch,
            adapters=LoadedAdapters(adapters_of(worker), peers, get_adapter_absolute_path),
            device=copies_of(
                layouts[0].device,
                max(layout.block_bytes for layout in layouts),
            ),
        )

    def _shards_of(self, kv_caches: dict[str, torch.Tensor]) -> dict[Rank, Shard]:
        """Return this worker's part of each cache group. Raises InvalidRequest for a cache that is not supported."""
        groups = self._kv_cache_config.kv_cache_groups
        shards: dict[Rank, Shard] = {}
        for index, group in enumerate(groups):
            if any(name in kv_caches for name in group.layer_names):  # a stage of a pipeline may have none
                extra = extra_of(group, groups)
                if self._groups[index].is_state:
                    extra[STATE] += f" {get_conv_state_layout()}"
                shard = shard_of(self._vllm_config, self._kv_cache_config, group, kv_caches, extra)
                shards[shard.namespace.pipeline_rank, shard.namespace.tensor_rank, index] = shard
        if not shards:
            raise InvalidRequest("the engine has no KV cache")
        # Full attention first, whose blocks are the parents of the others.
        return dict(sorted(shards.items(), key=lambda each: not self._groups[each[0][-1]].is_full))

    def get_handshake_metadata(self) -> KVFSHandshake | None:
        if self._watch is None:
            return None
        namespaces = {rank[-1]: shard.namespace.canonical.decode() for rank, shard in self._shards.items()}
        return KVFSHandshake(namespaces, self._watch.sample)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._transfers is not None:
            self._transfers.enter(self._plan())

    def build_connector_worker_meta(self) -> KVFSReport | None:
        if self._transfers is None:
            return None
        ended, adapters = self._transfers.ended_epoch, self._transfers.adapters.reports
        return (
            None if ended is None and not adapters else KVFSReport(-1 if ended is None else ended, adapters)
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._transfers is not None:
            self._transfers.begin(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._transfers is not None:
            self._transfers.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._transfers is not None:
            self._transfers.save_layer(self._plan(), layer_name)

    def wait_for_save(self) -> None:
        if self._transfers is not None:
            self._transfers.finish(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._transfers is None:
            return None, None
        self._transfers.adapters.ended(finished_req_ids)
        return None, set(self._transfers.take_finished())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report loads that have ended; of several groups those that failed by their requests, not by their blocks."""
        if self._is_plain or self._transfers is None:
            return super().get_transfer_results(finished_req_ids)
        finished = self._transfers.take_finished()
        self._transfers.take_failed_blocks()
        failed = {request_id for request_id, is_good in finished.items() if not is_good}
        return KVConnectorTransferResults(finished_recving=set(finished), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._transfers is None or not self._is_plain:
            return set()
        return self._transfers.take_failed_blocks()

    def shutdown(self) -> None:
        if self._transfers is not None:
            log.info("kvfs: %s", self._transfers.counts | self._transfers.pool_counts)
            self._transfers.close()
        self._link.close()

    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVFSMetadata)
        return metadata.plan

    # --- scheduler ----------------------------------------------------------------------------------------
    @property
    def planner(self) -> Planner:
        """Return the scheduler's planner; a worker has none."""
        assert self._planner is not None, "this is a worker's connector"
        return self._planner

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Rank, Any]) -> None:
        """Take the namespaces of all workers and their weights. Groups of full attention come first: a prefill engine
        names its blocks, and a Conductor knows them."""
        ranks = sorted(metadata.items())
        named = [((*rank, group), each) for rank, every in ranks for group, each in every.namespaces.items()]
        named.sort(key=lambda item: (not self._groups[item[0][-1]].is_full, item[0]))
        found = {rank: Namespace.from_json(namespace) for rank, namespace in named}
        samples = hashlib.sha256(b"".join(each.weights for _, each in ranks))
        weights = "memory " + samples.hexdigest()[:32]
        self.planner.set_namespaces(found, weights)
        if found:  # docs/conductor.md
            role = str(self._vllm_config.kv_transfer_config.kv_role)
            worker = named[0][0][:-1]
            groups = describe_groups({rank[-1]: each for rank, each in found.items() if rank[:-1] == worker})
            said = json.dumps(groups)
            self._known_by = {"namespace": named[0][1], "groups": said, "weights": weights, "role": role}
            logging.getLogger(VLLM_LOG).info(
                'kvfs: a Conductor knows these blocks by {"namespace": %s, "groups": %s, "weights": "%s"}',
                named[0][1],
                said,
                weights,
            )

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM is to take a step without requests, with which statistics leave."""
        return self._info() != self._said

    def get_kv_connector_stats(self) -> KVFSInfo | None:
        if (info := self._info()) == self._said:
            return None
        self._said = info
        return KVFSInfo(dict(info))

    def _info(self) -> dict[str, str]:
        if not self._known_by:
            return {}
        published = self._link.published
        return {**self._known_by, **{f"store_{name}": str(value) for name, value in published.items()}}

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFSInfo:
        return KVFSInfo()  # for vLLM's own log, which has it already

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVFSInfoMetric:
        return KVFSInfoMetric(*arguments)

    def reset_cache(self) -> bool | None:
        """Begin an epoch, since the weights change; stored blocks stay for engines with the old weights."""
        if self._planner is None:
            return None
        self._planner.reset(has_old_blocks=self._has_blocks())
        return True

    def _has_blocks(self) -> bool:
        """Return whether the engine's own cache, which it empties before `reset_cache`, still has requests' blocks."""
        if self._kv_cache_manager is None:
            return False
        pool = self._kv_cache_manager.block_pool
        return bool(pool.get_num_free_blocks() != pool.num_gpu_blocks - 1)  # one block stands for none

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self.planner.failed(connector_output.invalid_block_ids)
        self.planner.failed_requests(connector_output.failed_recving or ())
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, KVFSReport):
            self.planner.end_epoch(report.epoch)
            for number, (epoch, name) in report.adapters.items():
                self.planner.end_adapter(number, epoch, name)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._kv_cache_manager is not None:
            held = self._kv_cache_manager.block_pool.cached_block_hash_to_block
            if held is not self._own_cache:  # made anew when it is emptied, of which a connector is not told
                self._own_cache = held
                self.planner.emptied()
        return self.planner.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVFSMetadata:
        return KVFSMetadata(self.planner.plan(_steps_of(scheduler_output)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.planner.finished(request)  # its blocks were copied out when its last step ended

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


def _steps_of(output: Any) -> Iterator[Step]:
    before = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    block_state = output.kv_connector_block_state
    for request_id, scheduled in output.num_scheduled_tokens.items():
        block_ids = block_state.get_block_ids(request_id)
        if block_ids is not None and request_id in before:
            after = before[request_id] + scheduled
            states = block_state.boundary_state_offloads.get(request_id, ())
            yield Step(request_id, before[request_id], after, block_ids[0], block_ids, states)
