"""`KVFSTier`: a secondary tier behind vLLM's own CPU offloading (TieringOffloadingSpec).

    "secondary_tiers": [{"type": "KVFSTier", "module_path": "kvfs.connectors.vllm_tier", "address": "/mnt/kvfs"}]

Responsibility: SecondaryTierManager over blocks: look-ups in the shared table, transfers between vLLM's primary tier
and the store as futures. Keys are vLLM's own (block hash and group), so engines share blocks only where they share
vLLM's hash settings: a non-cryptographic hash has a random seed in every process unless PYTHONHASHSEED is set.

Weights: the tier runs beside the scheduler, where there are no weights: their files identify them. vLLM drains a tier's
jobs only where it resets its caches; afterwards keys are of another epoch, which no other engine has.

Invariants: no call but `drain_jobs` and `shutdown` waits; every submitted job is reported once, a load with the keys
that came. The namespace has vLLM's description of the cache and its version, since it does not say how a backend
packs blocks. Concurrency: the scheduler's thread; copies run on the client's threads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvfs._native.blocks.pieces import Scatter
from kvfs.client.blocks import Blocks
from kvfs.connectors.common import (
    VLLM_LOG,
    Link,
    address_of,
    digest_keys,
    model_revision,
    new_epoch,
    string_namespace,
)
from kvfs.errors import InvalidRequest, KvfsError
from kvfs.limits import CONNECTOR_COPY_S, CONNECTOR_MATCH_S, CONNECTOR_TIMEOUT_S
from kvfs.namespaces import Namespace


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    keys: list[bytes]
    begun_s: float
    result: Future[Any]
    """Of a load the bytes of each chunk, -1 for a miss."""
    is_load: bool


class KVFSTier(SecondaryTierManager):  # type: ignore[misc]
    """Store vLLM's offloaded chunks as blocks."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        address: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Connect. `revision` identifies the weights, where the model is no directory. Raises InvalidRequest."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._namespace = _namespace_of(offloading_spec, self.block_size_bytes, revision)
        self._link = Link(address_of({"address": address}), name="vllm-tier", log=logging.getLogger(VLLM_LOG))
        self._link.open(self._namespace)
        self._memory = np.frombuffer(primary_kv_view, dtype=np.uint8)
        self._epoch = ""
        self._jobs: dict[int, _Job] = {}
        self._failed: list[JobResult] = []

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        blocks = self._link.blocks(self._namespace)
        if blocks is None:
            return LookupResult.MISS
        there = self._link.attempt(
            lambda: blocks.exists(self._digests([key]), timeout_s=CONNECTOR_MATCH_S), [False]
        )
        return LookupResult.HIT if there[0] else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, Blocks.put_async, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, Blocks.get_into_async, is_load=True)

    def _submit(self, job: Any, begin: Callable[..., Future[Any]], *, is_load: bool) -> None:
        keys, places = list(job.keys), self._places(job.chunk_ids)
        blocks = self._link.blocks(self._namespace)
        result = None
        if blocks is not None and (is_load or self._link.is_up):
            digests = self._digests(keys)
            result = self._link.attempt(
                lambda: begin(blocks, digests, places, timeout_s=CONNECTOR_TIMEOUT_S), None
            )
        if result is None:
            self._failed.append(JobResult(job.job_id, success=False))
        else:
            self._jobs[job.job_id] = _Job(job.job_id, keys, time.monotonic(), result, is_load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._failed = self._failed, []
        for job_id, job in list(self._jobs.items()):
            if job.result.done():
                del self._jobs[job_id]
                finished.append(self._result(job))
        return finished

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._failed)

    def drain_jobs(self) -> None:
        """Wait for the jobs and begin an epoch: vLLM resets its caches because the weights change."""
        self._wait()
        self._epoch = new_epoch()

    def shutdown(self) -> None:
        self._wait()
        self._link.close()

    def _wait(self) -> None:
        wait([job.result for job in self._jobs.values()], CONNECTOR_COPY_S)

    def _digests(self, keys: list[bytes]) -> list[bytes]:
        return digest_keys(self._namespace, keys, self._epoch)

    def _result(self, job: _Job) -> JobResult:
        taken_s = time.monotonic() - job.begun_s
        try:
            found = job.result.result()
        except InvalidRequest:
            raise
        except (KvfsError, OSError) as error:
            self._link.failed(error)
            return JobResult(job.job_id, success=False, transfer_time=taken_s)
        came = job.keys
        if job.is_load:
            came = [key for key, size in zip(job.keys, found, strict=True) if size == self.block_size_bytes]
        return JobResult(
            job.job_id,
            success=len(came) == len(job.keys),
            successful_keys=tuple(came) if 0 < len(came) < len(job.keys) else None,
            transfer_time=taken_s,
            transfer_bytes=len(came) * self.block_size_bytes,
        )

    def _places(self, chunk_ids: Collection[int]) -> Scatter:
        offsets = np.fromiter(chunk_ids, dtype=np.int64, count=len(chunk_ids)) * self.block_size_bytes
        return Scatter(self._memory, offsets, self.block_size_bytes)


def _namespace_of(spec: Any, chunk_bytes: int, revision: str | None) -> Namespace:
    config = spec.config
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    fields = dict(mapper.get_run_config(), model_name="", rank=mapper.rank)
    return string_namespace(
        "vllm offload key",
        {
            "revision": model_revision(config.model.name, revision),
            "run": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32],
            "layout": str(config.kv_cache_layout),
            "chunk_bytes": str(chunk_bytes),
            "vllm": vllm.__version__,
        },
    )
