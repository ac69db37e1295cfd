"""What `KVFSConnector` refuses when vLLM's factory makes it; runs under the engines' python, without a model.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"address": path}    ->    {setting: {role: message}}
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

SETTINGS = ("decode_context_parallel_size", "prefill_context_parallel_size")


def message(address: str, role: KVConnectorRole, **parallel: int) -> str:
    """The refusal of a connector for a configuration that is plain but for `parallel`; empty where it is made."""
    transfer = KVTransferConfig(
        kv_connector="KVFSConnector",
        kv_connector_module_path="kvfs.connectors.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"address": address},
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        parallel_config=SimpleNamespace(**{**dict.fromkeys(SETTINGS, 1), **parallel}),
    )
    cache = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    try:
        KVConnectorFactory.create_connector(config, role, cache).shutdown()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    address = json.loads(sys.stdin.readline())["address"]
    reply = {
        setting or "plain": {
            role.name: message(address, role, **({setting: 2} if setting else {})) for role in KVConnectorRole
        }
        for setting in ("", *SETTINGS)
    }
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
