"""`KVFSHybridConnector` for vLLM: models with sliding windows or recurrent layers, by groups of their KV cache.

    --kv-transfer-config '{"kv_connector": "KVFSHybridConnector",
                           "kv_connector_module_path": "kvfs.connectors.hybrid.vllm_hybrid",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"address": "/mnt/kvfs"}}'

Responsibility: what `KVFSConnector` does, with vLLM's hybrid KV cache manager on: layers of one kind are a cache group
with blocks, keys and a namespace of its own. A model with one group of full attention has the keys of `KVFSConnector`.

Invariants: vLLM cannot compute single blocks of several groups again (it raises where a connector reports some), so a
request of which one load failed is reported as a whole: vLLM frees its blocks and begins it anew. That works for loads
between steps only, so `load` is `async`; for the same reason adapters are refused, whose blocks may fail in a step
that computes on them. Concurrency: as vLLM calls it, one thread on each side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

from kvfs.connectors.hybrid.group_planner import HybridPlanner
from kvfs.connectors.vllm import KVFSConnector
from kvfs.connectors.vllm_layout import Shard, extra_of, groups_of, shard_of
from kvfs.connectors.vllm_scheduler import Rank
from kvfs.errors import InvalidRequest


@dataclass
class KVFSHybridHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From each worker to the scheduler, once: its namespaces by group, as JSON, and the sample of its weights."""

    namespaces: dict[int, str]
    weights: bytes


class KVFSHybridConnector(KVFSConnector, SupportsHMA):  # type: ignore[misc]
    """Connect vLLM's scheduler or one of its workers, with several cache groups."""

    def _check_model(self) -> None:
        if self._chosen["load"] != "async":
            raise InvalidRequest(
                "load = 'layers' is not supported by KVFSHybridConnector: vLLM begins a request anew only between "
                "steps where a load of several groups failed; use 'async'"
            )
        if self._vllm_config.lora_config is not None:
            raise InvalidRequest(
                "adapters (LoRA) are not supported by KVFSHybridConnector: vLLM cannot compute single blocks of "
                "several groups again; use KVFSConnector"
            )
        speculative = self._vllm_config.speculative_config
        if speculative is not None and speculative.use_eagle():
            raise InvalidRequest(
                f"speculative decoding by {speculative.method} is not supported by KVFSHybridConnector: "
                "its layers read blocks before a window"
            )
        groups = groups_of(self._kv_cache_config)
        if speculative is not None and any(group.is_state for group in groups):
            raise InvalidRequest(
                "speculative decoding is not supported for recurrent layers: their state is one behind drafts"
            )

    def _new_planner(self) -> HybridPlanner:
        first = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        return HybridPlanner(
            self._link,
            first.block_size,
            groups_of(self._kv_cache_config),
            store_generated=self._chosen["store"] == "all",
        )

    # --- worker -------------------------------------------------------------------------------------------
    def _shards_of(self, kv_caches: dict[str, torch.Tensor]) -> dict[Rank, Shard]:
        groups = self._kv_cache_config.kv_cache_groups
        shards: dict[Rank, Shard] = {}
        for index, group in enumerate(groups):
            if any(name in kv_caches for name in group.layer_names):  # a stage of a pipeline may have none
                extra = extra_of(group, groups)
                if "group_state" in extra:
                    extra["group_state"] += f" {get_conv_state_layout()}"
                shard = shard_of(self._vllm_config, self._kv_cache_config, group, kv_caches, extra)
                shards[shard.namespace.pipeline_rank, shard.namespace.tensor_rank, index] = shard
        if not shards:
            raise InvalidRequest("the engine has no KV cache")
        return shards

    def get_handshake_metadata(self) -> KVFSHybridHandshake | None:
        if self._watch is None:
            return None
        namespaces = {rank[-1]: shard.namespace.canonical.decode() for rank, shard in self._shards.items()}
        return KVFSHybridHandshake(namespaces, self._watch.sample)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._transfers is None:
            return KVConnectorTransferResults()
        finished = self._transfers.take_finished()
        self._transfers.take_failed_blocks()  # they are reported by their requests
        failed = {request_id for request_id, is_good in finished.items() if not is_good}
        return KVConnectorTransferResults(finished_recving=set(finished), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    # --- scheduler ----------------------------------------------------------------------------------------
    @property
    def planner(self) -> HybridPlanner:
        assert isinstance(self._planner, HybridPlanner), "this is a worker's connector"
        return self._planner

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Rank, Any]) -> None:
        ranks = sorted(metadata.items())
        # Groups of full attention first: a prefill engine names its blocks, and a Conductor knows them.
        found = [((*rank, group), each) for rank, every in ranks for group, each in every.namespaces.items()]
        found.sort(key=lambda item: (self.planner.groups[item[0][-1]].window_blocks is not None, item[0]))
        self._know(dict(found), [each.weights for _, each in ranks])

    def update_connector_output(self, connector_output: Any) -> None:
        self.planner.failed_requests(connector_output.failed_recving)
        super().update_connector_output(connector_output)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.planner.allocated_groups(request, blocks.get_block_ids(), num_external_tokens)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])
