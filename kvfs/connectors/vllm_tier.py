"""`KVFSTier`: a secondary tier behind vLLM's own CPU offloading (TieringOffloadingSpec).

    "secondary_tiers": [{"type": "KVFSTier", "module_path": "kvfs.connectors.vllm_tier", "address": "/mnt/kvfs"}]

Responsibility: SecondaryTierManager over blocks: look-ups in the shared table, transfers between vLLM's primary tier
and the store as futures. Keys are vLLM's own (block hash and group), so engines share blocks only where they share
vLLM's hash settings: a non-cryptographic hash has a random seed in every process unless PYTHONHASHSEED is set.

Weights: the tier runs beside the scheduler, where no weights are: they are named by their files. vLLM drains a tier's
jobs where it resets its caches, and only there; keys are of another epoch afterwards, which no other engine has.

Invariants: no call waits, but `drain_jobs`; every submitted job is reported once, a load with the keys that came. The
namespace has what vLLM says of the cache, its version among it, since it does not say how a backend packs blocks.
Concurrency: the scheduler's thread; copies run on the client's threads.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvfs._native.pieces import Scatter
from kvfs.connectors.common import (
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
    begun: float
    sizes: Future[list[int]] | None = None
    """Of a load: bytes of each chunk, -1 for a miss."""
    stored: Future[list[bool]] | None = None


class KVFSTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module's header."""

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
        """`revision`: which weights, where the model is no directory. Raises InvalidRequest."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._namespace = _namespace_of(offloading_spec, self.block_size_bytes, revision)
        self._link = Link(address_of({"address": address}), name="vllm-tier")
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
        keys, places = list(job_metadata.keys), self._places(job_metadata.chunk_ids)
        blocks = self._link.blocks(self._namespace)
        job = None
        if blocks is not None and self._link.is_up:
            digests = self._digests(keys)
            stored = self._link.attempt(
                lambda: blocks.put_async(digests, places, timeout_s=CONNECTOR_TIMEOUT_S), None
            )
            if stored is not None:
                job = _Job(job_metadata.job_id, keys, time.monotonic(), stored=stored)
        self._begin(job_metadata.job_id, job)

    def submit_load(self, job_metadata: Any) -> None:
        keys, places = list(job_metadata.keys), self._places(job_metadata.chunk_ids)
        blocks = self._link.blocks(self._namespace)
        job = None
        if blocks is not None:
            digests = self._digests(keys)
            sizes = self._link.attempt(
                lambda: blocks.get_into_async(digests, places, timeout_s=CONNECTOR_TIMEOUT_S), None
            )
            if sizes is not None:
                job = _Job(job_metadata.job_id, keys, time.monotonic(), sizes=sizes)
        self._begin(job_metadata.job_id, job)

    def _begin(self, job_id: int, job: _Job | None) -> None:
        if job is None:
            self._failed.append(JobResult(job_id, success=False))
        else:
            self._jobs[job_id] = job

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._failed = self._failed, []
        for job_id, job in list(self._jobs.items()):
            if _future(job).done():
                del self._jobs[job_id]
                finished.append(self._result(job))
        return finished

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._failed)

    def drain_jobs(self) -> None:
        """vLLM resets its caches: what is looked up and stored from now on is of other weights."""
        self._wait()
        self._epoch = new_epoch()

    def shutdown(self) -> None:
        self._wait()
        self._link.close()

    def _wait(self) -> None:
        wait([_future(job) for job in self._jobs.values()], CONNECTOR_COPY_S)

    def _digests(self, keys: list[bytes]) -> list[bytes]:
        return digest_keys(self._namespace, keys, self._epoch)

    def _result(self, job: _Job) -> JobResult:
        taken_s = time.monotonic() - job.begun
        size_bytes = len(job.keys) * self.block_size_bytes
        try:
            if job.sizes is None:
                _future(job).result()
                return JobResult(job.job_id, success=True, transfer_time=taken_s, transfer_bytes=size_bytes)
            came = [
                key
                for key, size in zip(job.keys, job.sizes.result(), strict=True)
                if size == self.block_size_bytes
            ]
        except InvalidRequest:
            raise
        except (KvfsError, OSError) as error:
            self._link.failed(error)
            return JobResult(job.job_id, success=False, transfer_time=taken_s)
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


def _future(job: _Job) -> Future[Any]:
    future = job.sizes or job.stored
    assert future is not None
    return future


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
