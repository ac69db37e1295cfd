"""`KVFSHybridConnector` for tests, watched as `watched_connector.py` watches `KVFSConnector`.

KVFS_TEST_LOSE=n,m: of the first loads of requests the first block of one of these groups, in turn, is removed between
the match and the load.
"""

from __future__ import annotations

import os
from typing import Any

from kvfs.connectors.hybrid.vllm_hybrid import KVFSHybridConnector
from kvfs.connectors.vllm import KVFSMetadata
from kvfs.keys import HASH_BYTES
from tests.engines.watched_connector import wait_at_gate


class WatchedHybridConnector(KVFSHybridConnector):
    def build_connector_meta(self, scheduler_output: Any) -> KVFSMetadata:
        counts = self.planner.counts
        counts.setdefault("resumed", 0)
        counts["resumed"] += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        metadata = super().build_connector_meta(scheduler_output)
        if metadata.plan.loads:
            self._lose(metadata)
            wait_at_gate()
        return metadata

    def _lose(self, metadata: KVFSMetadata) -> None:
        groups = [int(each) for each in os.environ.get("KVFS_TEST_LOSE", "").split(",") if each]
        requests = list(dict.fromkeys(run.request_id for run in metadata.plan.loads))
        for number, request_id in enumerate(requests if groups else []):
            group = groups[number % len(groups)]
            for run in metadata.plan.loads:
                for rank, keys in run.keys.items():
                    if run.request_id == request_id and rank[-1] == group:
                        blocks = self._link.open(self.planner._namespaces[rank])
                        assert blocks is not None
                        blocks.remove(keys[:HASH_BYTES])
        os.environ.pop("KVFS_TEST_LOSE", None)
