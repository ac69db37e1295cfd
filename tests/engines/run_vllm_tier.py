"""`KVFSTier` behind vLLM's own factory and primary tier's interface; runs under the engines' python.

TieringOffloadingSpec refuses to start on a CPU, so the tier is made as that does, by SecondaryTierFactory with a spec
of vLLM's own base class and configuration, and is called as TieringOffloadingManager calls it.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"address": path}    ->    {check: answer}
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

CHUNKS, CHUNK_BYTES = 8, 12_288
WAIT_S = 60.0
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(CHUNKS)]
REQUEST = ReqContext(req_id="request")


class Spec(OffloadingSpec):
    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def spec(*, tp_size: int = 1, groups: int = 1) -> Spec:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=tp_size,
        tp_size=tp_size,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    return Spec(
        OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(tokens_per_block=16, layer_names=(f"layer {i}",), group_id=i)
                for i in range(groups)
            ),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig(name="test/model", dtype="bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
        )
    )


def tier(address: str, memory: np.ndarray[Any, Any], *, revision: str = "1", **settings: int) -> Any:
    config = {
        "type": "KVFSTier",
        "module_path": "kvfs.connectors.vllm_tier",
        "address": address,
        "revision": revision,
    }
    return SecondaryTierFactory.create_secondary_tier(config, memory.data, spec(**settings))


def job(number: int, keys: list[Any], chunks: list[int], *, load: bool) -> TransferJob:
    return TransferJob(number, keys, np.array(chunks, dtype=np.int64), load, REQUEST)


def finished(which: Any) -> dict[int, Any]:
    """Results by job, once all have ended."""
    deadline, found = time.monotonic() + WAIT_S, {}
    while which.has_pending_work():
        assert time.monotonic() < deadline
        for result in which.get_finished_jobs():
            found[result.job_id] = result
        time.sleep(0.001)
    return found


def hits(which: Any, keys: list[Any] = KEYS) -> list[str]:
    return [which.lookup(key, REQUEST).name for key in keys]


def groups(address: str, source: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Chunks of one hash in two cache groups, whose bytes differ."""
    target = np.zeros_like(source)
    writer, reader = tier(address, source, groups=2), tier(address, target, groups=2)
    first, second = (make_offload_key(bytes([77]) * 32, group) for group in range(2))
    writer.submit_store(job(1, [first], [0], load=False))
    finished(writer)
    found: dict[str, Any] = {
        "one": hits(reader, [first, second]),
        "other groups": hits(tier(address, target), [first])[0],
    }
    writer.submit_store(job(2, [second], [1], load=False))
    finished(writer)
    reader.submit_load(job(3, [second, first], [2, 3], load=True))
    found["both"] = finished(reader)[3].success
    found["equal"] = [bool((target[2] == source[1]).all()), bool((target[3] == source[0]).all())]
    for each in (writer, reader):
        each.shutdown()
    return found


def main() -> None:
    address = json.loads(sys.stdin.readline())["address"]
    rng = np.random.default_rng(1)
    source = rng.integers(0, 255, (CHUNKS, CHUNK_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)
    writer, reader = tier(address, source), tier(address, target)
    writer.on_new_request(REQUEST)
    found: dict[str, Any] = {"before": hits(reader)}
    writer.submit_store(job(1, KEYS[:3], [0, 1, 2], load=False))
    writer.submit_store(job(2, KEYS[2:5], [2, 3, 4], load=False))
    stored = finished(writer)
    found["store"] = [stored[number].success for number in (1, 2)]
    found["lookup"] = hits(reader)
    reader.submit_load(job(3, KEYS[:4], [7, 6, 5, 4], load=True))
    loaded = finished(reader)[3]
    found["load"] = [loaded.success, loaded.transfer_bytes, loaded.successful_keys]
    found["equal"] = [bool((target[7 - i] == source[i]).all()) for i in range(4)]
    # Evicted between the look-up and the load: only what came counts.
    from kvfs.connectors.common import digest_keys

    blocks = writer._link.blocks(writer._namespace)
    blocks.remove(digest_keys(writer._namespace, KEYS[1:2]))
    reader.submit_load(job(4, KEYS[:3], [0, 1, 2], load=True))
    partial = finished(reader)[4]
    found["load after eviction"] = [partial.success, [KEYS.index(key) for key in partial.successful_keys]]
    found["equal after eviction"] = [bool((target[i] == source[i]).all()) for i in range(3)]
    found["others"] = {
        "weights": hits(tier(address, target, revision="2"))[0],
        "tensor parallel": hits(tier(address, target, tp_size=2))[0],
        "chunk size": hits(tier(address, np.zeros((4, 4096), dtype=np.uint8)))[0],
    }
    found["groups"] = groups(address, source)
    away = tier("/nowhere/kvfs.sock", target)
    away.submit_store(job(5, KEYS[:1], [0], load=False))
    away.submit_load(job(6, KEYS[:1], [0], load=True))
    failed = finished(away)
    found["without a service"] = [hits(away)[0], failed[5].success, failed[6].success]
    reader.submit_load(job(7, KEYS[:1], [0], load=True))
    reader.drain_jobs()
    found["drained"] = [result.job_id for result in reader.get_finished_jobs()]
    found["reset"] = [hits(reader)[0], hits(writer)[0]]
    reader.submit_store(job(8, KEYS[5:6], [5], load=False))
    finished(reader)
    found["stored after the reset"] = [hits(reader)[5], hits(writer)[5]]
    for each in (writer, reader, away):
        each.shutdown()
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
