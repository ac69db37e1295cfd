"""`KVFSConnector` for tests: it counts what vLLM does with it, loses blocks at a chosen moment, and can be held up.

Its behaviour is in the environment of the engine:

- KVFS_TEST_LOSE=n: of each load the block with this index is removed from the store between the match and the load.
- KVFS_TEST_GATE=path: the first step that loads makes the file `path`.reached and waits for `path`.go.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvfs.connectors.vllm import KVFSConnector, KVFSMetadata
from kvfs.keys import HASH_BYTES

_POLL_S = 0.01


class WatchedConnector(KVFSConnector):
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
        index = os.environ.get("KVFS_TEST_LOSE")
        if index is None:
            return
        for run in metadata.plan.loads:
            for rank, keys in run.keys.items():
                blocks = self._link.blocks(self.planner._namespaces[rank])
                assert blocks is not None
                blocks.remove(keys[int(index) * HASH_BYTES :][:HASH_BYTES])


def wait_at_gate() -> None:
    gate = os.environ.pop("KVFS_TEST_GATE", None)
    if gate is not None:
        Path(gate + ".reached").touch()
        while not Path(gate + ".go").exists():
            time.sleep(_POLL_S)
