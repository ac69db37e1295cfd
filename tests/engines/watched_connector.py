"""`KVFSConnector` for tests: it counts what vLLM does with it, loses blocks at a chosen moment, and can be held up.

Its behaviour is in the environment of the engine:

- KVFS_TEST_LOSE=n: of each load the block with this index is removed from the store between the match and the load.
- KVFS_TEST_LOSE_GROUPS=n,m: of the first step's loads the first block of one of these cache groups, in turn.
- KVFS_TEST_GATE=path: the first step that loads makes the file `path`.reached and waits for `path`.go.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvfs.connectors.vllm import KVFSConnector, KVFSMetadata
from kvfs.connectors.vllm_scheduler import BlockRun
from kvfs.keys import key_at

_POLL_S = 0.01


class WatchedConnector(KVFSConnector):
    def build_connector_meta(self, scheduler_output: Any) -> KVFSMetadata:
        counts = self.planner.counts
        counts.setdefault("resumed", 0)
        counts["resumed"] += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        metadata = super().build_connector_meta(scheduler_output)
        if metadata.plan.loads:
            self._lose(metadata.plan.loads)
            wait_at_gate()
        return metadata

    def _lose(self, loads: list[BlockRun]) -> None:
        index = os.environ.get("KVFS_TEST_LOSE")
        if index is not None:
            for run in loads:
                self._remove(run, int(index))
        groups = os.environ.pop("KVFS_TEST_LOSE_GROUPS", "").split(",")
        requests = list(dict.fromkeys(run.request_id for run in loads))
        lost = {request_id: groups[i % len(groups)] for i, request_id in enumerate(requests)}
        for run in loads:
            if str(next(iter(run.keys))[-1]) == lost[run.request_id]:
                lost[run.request_id] = ""
                self._remove(run, 0)

    def _remove(self, run: BlockRun, index: int) -> None:
        for rank, keys in run.keys.items():
            blocks = self._link.open(self.planner._namespaces[rank])
            assert blocks is not None
            blocks.remove(key_at(keys, index))


def wait_at_gate() -> None:
    gate = os.environ.pop("KVFS_TEST_GATE", None)
    if gate is not None:
        Path(gate + ".reached").touch()
        while not Path(gate + ".go").exists():
            time.sleep(_POLL_S)
