"""vLLM in this process, offline, over prompts of token ids; runs under the engines' python.

Reads JSON lines from standard input and writes JSON lines to the descriptor given as the only argument (the
engine's own logs keep standard output and error). The first line says what the engine is, each further one
is a request that gets one line in reply:

    {"model": directory, "storage": directory or null, "prefix_caching": bool, "connector": settings or null,
     "batched_tokens": int, "cache_blocks": int, "events": settings or null,
     "tensor_parallel": int, "model_tokens": int, "native_layers": bool, "retained_tokens": int,
     "one_cache": bool, "dtype": text}
    {"prompts": [[token id, ...], ...], "max_tokens": int, "kv_transfer_params": {...} or null}
    {"change": float, "rank": int or null}    every layer's norms, in place, by this factor; null: on all ranks
    {"reset": true}                           vLLM's reset_prefix_cache(reset_connector=True)
    {"events": true}                          how many KV events were published, as {"published": count}

`storage` is handed to vLLM's bundled ExampleConnector, unmodified, as its `shared_storage_path`. `connector` are
arguments of KVTransferConfig for another one, `events` those of KVEventsConfig. `cache_blocks` makes the KV cache so
small that requests are preempted. With `native_layers` torch computes layers for which vLLM has kernels; of recurrent
layers one state in `retained_tokens` is kept; with `one_cache` all layers have one cache group; `dtype` is float32
unless another is given. A reply has lists with one entry per prompt:

    {"tokens": [[id, ...]], "logprobs": [[of each chosen token, ...]], "cached_tokens": [count],
     "loaded": [path of each tensor file that was loaded, in order], "counts": {...},
     "finish": [reason, ...], "kv_transfer_params": [of each answer, ...], "peak_mib": int}

A change and a reset are answered by {"done": what vLLM says}.

`cached_tokens` is the engine's own count of prompt tokens that it did not compute; `counts` are those of
`KVFSConnector` since the start, worker's and scheduler's.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import resource
import sys
import threading
from typing import Any, NoReturn

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The engine core in this process, where its loads can be seen.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Torch would compile what counts the likelier tokens, in each engine for its first answer.
    "TORCH_COMPILE_DISABLE": "1",
    # Of a model this small threads wait for each other, beside other engines while they keep the processors busy.
    "OMP_NUM_THREADS": "1",
}
CACHE_BLOCKS = 4096
"""What prompts need here several times over; vLLM writes zeros over its whole cache as it starts."""


def watch_loads() -> list[str]:
    """The list to which the path of every safetensors file loaded from now on is added."""
    import safetensors.torch

    loaded: list[str] = []
    original = safetensors.torch.load_file

    def load_file(filename: str, *args: Any, **kwargs: Any) -> Any:
        tensors = original(filename, *args, **kwargs)
        loaded.append(os.fspath(filename))
        return tensors

    safetensors.torch.load_file = load_file  # type: ignore[assignment]
    return loaded


def make_engine(settings: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    transfer = events = None
    if settings.get("connector") is not None:
        transfer = KVTransferConfig(**settings["connector"])
    if settings.get("events") is not None:
        events = KVEventsConfig(**settings["events"])
    if settings["storage"] is not None:
        transfer = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": settings["storage"]},
        )
    return LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=settings.get("dtype", "float32"),
        block_size=32,
        max_model_len=settings.get("model_tokens", 1024),
        # Whole prompts in one step: the connector under test does not store prompts in chunks.
        max_num_batched_tokens=settings.get("batched_tokens", 16384),
        num_gpu_blocks_override=settings.get("cache_blocks", CACHE_BLOCKS),
        enable_prefix_caching=settings["prefix_caching"],
        tensor_parallel_size=settings.get("tensor_parallel", 1),
        compilation_config={"custom_ops": ["none"]} if settings.get("native_layers") else None,
        disable_hybrid_kv_cache_manager=settings.get("one_cache"),
        prefix_cache_retention_interval=settings.get("retained_tokens", 0),
        kv_transfer_config=transfer,
        kv_events_config=events,
        seed=0,
    )


def counts(engine: Any) -> dict[str, int]:
    """Of the connector's two halves, both in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group() or not hasattr(type(get_kv_transfer_group()), "planner"):
        return {}
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    transfers = get_kv_transfer_group()._transfers  # none where the model's states cannot be kept
    return {**scheduler.connector.planner.counts, **({} if transfers is None else transfers.counts)}


def generate(engine: Any, loaded: list[str], request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    loaded.clear()
    params = request.get("kv_transfer_params")
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        extra_args=None if params is None else {"kv_transfer_params": params},
    )
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in request["prompts"]], sampling, use_tqdm=False
    )
    completions = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(completion.token_ids) for completion in completions],
        "logprobs": [
            [entry[token].logprob for token, entry in zip(c.token_ids, c.logprobs, strict=True)]
            for c in completions
        ],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "loaded": loaded,
        "counts": counts(engine),
        "block_tokens": engine.llm_engine.vllm_config.cache_config.block_size,
        "finish": [completion.finish_reason for completion in completions],
        "kv_transfer_params": [output.kv_transfer_params for output in outputs],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def published_events(engine: Any) -> int:
    """Count the events of all batches, which a thread publishes."""
    import msgspec

    publisher = engine.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
    publisher._event_queue.join()
    return sum(len(msgspec.msgpack.decode(batch)[1]) for _, batch in publisher._buffer)


class Change:
    """Weights that are changed where they are, as a trainer does."""

    def __init__(self, factor: float, rank: int | None) -> None:
        self.factor, self.rank = factor, rank

    def __call__(self, model: Any) -> bool:
        import torch
        from vllm.distributed import get_tensor_model_parallel_rank

        if self.rank not in (None, get_tensor_model_parallel_rank()):
            return False
        with torch.no_grad():
            for layer in model.model.layers:
                norm = layer.input_layernorm
                if not norm.weight.any():  # of Gemma, which adds one to it
                    norm = layer.post_attention_layernorm
                norm.weight[::2].mul_(self.factor)
        return True


def answer(engine: Any, loaded: list[str], request: dict[str, Any]) -> dict[str, Any]:
    if "change" in request:
        return {"done": engine.apply_model(Change(request["change"], request["rank"]))}
    if "reset" in request:
        return {"done": engine.reset_prefix_cache(reset_connector=True)}
    if "events" in request:
        return {"published": published_events(engine)}
    return generate(engine, loaded, request)


def end() -> NoReturn:
    """End this process as an interpreter does, but without taking all apart that is imported, which takes 2 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def serve() -> None:
    faulthandler.enable()
    os.environ.update(ENVIRONMENT)
    gc.unfreeze = lambda: None  # vLLM's last collection would go through all that is imported, too
    loaded = watch_loads()
    engine = make_engine(json.loads(sys.stdin.readline()))
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            replies.write(json.dumps(answer(engine, loaded, json.loads(line))) + "\n")
            replies.flush()


if __name__ == "__main__":
    serve()
    end()
