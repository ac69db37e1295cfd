"""vLLM in this process with an adapter that is loaded again in place; runs under the engines' python.

Reads a JSON request from standard input, writes a JSON reply to the path given as the only argument:

    {"model": directory, "adapters": [directory, ...], "latest": directory, "connector": settings or null,
     "prompt": [token id], "max_tokens": int, "resets": bool}

The first adapter is loaded from its own directory; the files of each further one are copied to `latest` and loaded in
place, all under number 1. The prompt is generated twice with each, vLLM's own prefix cache being emptied before where
`resets` says so. At last it is generated with the first adapter from its own directory, under another name.
Reply: {"tokens": [[id]], "cached": [count]}, two of each adapter and one of the last.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

from tests.engines.run_engine import CACHE_BLOCKS, ENVIRONMENT


def make_engine(request: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    connector = request["connector"]
    return LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        num_gpu_blocks_override=CACHE_BLOCKS,
        enable_lora=True,
        max_lora_rank=8,
        kv_transfer_config=None if connector is None else KVTransferConfig(**connector),
        seed=0,
    )


def generate(engine: Any, request: dict[str, Any], lora: Any) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
    )
    if request["resets"]:
        engine.reset_prefix_cache()
    [output] = engine.generate(
        [{"prompt_token_ids": request["prompt"]}], sampling, lora_request=lora, use_tqdm=False
    )
    return output


def main() -> None:
    os.environ.update(ENVIRONMENT)
    request = json.loads(sys.stdin.readline())
    engine = make_engine(request)
    from vllm.lora.request import LoRARequest

    outputs = []
    for number, adapter in enumerate(request["adapters"]):
        path = request["latest"] if number else adapter
        if number:
            shutil.copytree(adapter, path, dirs_exist_ok=True)
        engine.llm_engine.add_lora(LoRARequest("trained", 1, path, load_inplace=True))
        outputs += [generate(engine, request, LoRARequest("trained", 1, path)) for _ in range(2)]
    outputs.append(generate(engine, request, LoRARequest("another name", 2, request["adapters"][0])))
    reply = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(reply, file)


if __name__ == "__main__":
    main()
