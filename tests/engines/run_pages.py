"""What docs/engines.md shows of engines, as it is printed; runs under the engines' python.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"model": directory, "transformers": code, "vllm": [the JSON of each --kv-transfer-config]}

The code runs twice; the reply has how many tokens it knew each time, and the class and the tiers that vLLM makes of
each configuration:

    {"known": [int, int], "connectors": [name], "tiers": [[name]]}
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def run_printed(code: str, directory: str) -> int:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    names: dict[str, Any] = {"model": model, "input_ids": torch.arange(2, 152).unsqueeze(0)}
    exec(compile(code, "docs/engines.md", "exec"), names)
    return int(names["known"])


def tiers_of(config: dict[str, Any]) -> list[str]:
    tiers = config["kv_connector_extra_config"].get("secondary_tiers", [])
    return [getattr(importlib.import_module(tier["module_path"]), tier["type"]).__name__ for tier in tiers]


def main() -> None:
    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    made = [KVConnectorFactory.get_connector_class(KVTransferConfig(**config)) for config in request["vllm"]]
    reply = {
        "known": [run_printed(request["transformers"], request["model"]) for _ in range(2)],
        "connectors": [connector.__name__ for connector in made],
        "tiers": [tiers_of(config) for config in request["vllm"]],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
