"""What names a block of vLLM and its bytes: `python -m tests.support.golden_vllm > tests/golden/vllm.json`.

A difference makes every block that is stored a miss for the next version: write the file anew only where bytes of a
block changed, and then `FORMAT` of `kvfs.connectors.vllm_layout` changes too.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvfs.connectors.common import config_digest, weights_revision
from kvfs.connectors.memory import sample
from kvfs.connectors.vllm_layout import KVLayout, namespace_of
from kvfs.connectors.vllm_scheduler import Planner, Rank, Step
from kvfs.keys import block_name, split_keys
from kvfs.namespaces import Namespace

LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 2, 3, 2, 4, 6
PROMPT = [*range(1, 3 * TOKENS + 2)]
GENERATED = [128_000, 7, 9, (1 << 31) - 1]
WEIGHTS = "memory 00112233445566778899aabbccddeeff"
"""As the connector makes it of all ranks' samples."""


class _Config(SimpleNamespace):
    """A model's configuration, as transformers shows it."""

    def to_json_string(self) -> str:
        return json.dumps({**vars(self), "_name_or_path": "/anywhere"})


class _Planner(Planner):
    """A planner of requests without images, adapters and salts."""

    def _extra(self, tracked: Any, first: int, last: int, size: int) -> list[bytes | None]:
        return [None] * (last - first)


class _Empty:
    """A link to a store with nothing in it."""

    is_up = True

    def open(self, namespace: Namespace) -> _Empty:
        return self

    blocks = open

    def attempt(self, do: Callable[[], Any], otherwise: Any) -> Any:
        return do()

    def match(self, keys: bytes, *, timeout_s: float) -> int:
        return 0

    def below_dram(self, keys: bytes, *, timeout_s: float) -> list[bool]:
        return []

    def exists(self, keys: bytes, *, timeout_s: float) -> list[bool]:
        return [False] * len(split_keys(keys))


def layout_of(order: tuple[int, ...]) -> KVLayout:
    """The cache of an engine whose memory has the axes (layer, block, head, token, element) in this order."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS)
    sizes = [shape[axis] for axis in order]
    memory = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * ELEMENTS, dtype=torch.int32).reshape(sizes)
    whole = memory.view(torch.float32).permute([order.index(axis) for axis in range(5)])
    return KVLayout({f"model.layers.{i}.self_attn.attn": whole[i] for i in range(LAYERS)}, BLOCKS)


def namespace(
    layout: KVLayout, *, spec: str = "FullAttentionSpec", rank: int = 0, shards: int = 1
) -> Namespace:
    """The namespace of a worker, of `shards` tensor-parallel ranks in each of as many stages."""
    hf_config = _Config(architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=10000.0)
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    layers = {name: SimpleNamespace(attn_backend=backend) for name in layout.names}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="meta-llama/Llama",
            revision=None,
            quantization=None,
            dtype=torch.bfloat16,
            hf_config=hf_config,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=shards, pipeline_parallel_size=shards, rank=rank
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"revision": "weights-0123"}),
    )
    kind = type(spec, (), {"block_size": TOKENS})()
    return namespace_of(config, kind, layout, torch.bfloat16, {})


def stored(namespaces: dict[Rank, Namespace]) -> dict[str, Any]:
    """What is stored of a prompt and of tokens that are generated: for each rank the names, and the parents."""
    planner = _Planner(_Empty(), TOKENS, store_generated=True, is_async=True)  # type: ignore[arg-type]
    planner.set_namespaces(namespaces, WEIGHTS)
    request = SimpleNamespace(
        request_id="r",
        all_token_ids=list(PROMPT),
        num_tokens=len(PROMPT),
        num_prompt_tokens=len(PROMPT),
        lora_request=None,
        kv_transfer_params=None,
    )
    planner.match(request, 0)
    runs = planner.plan([Step("r", 0, len(PROMPT), [0, 1, 2, 3])]).stores
    request.all_token_ids += GENERATED
    request.num_tokens += len(GENERATED)
    runs += planner.plan([Step("r", len(PROMPT), request.num_tokens, [0, 1, 2, 3])]).stores
    return {
        f"pipeline {rank[0]}, tensor {rank[1]}": [
            {
                "blocks": [block_name(key).decode() for key in split_keys(run.keys[rank])],
                "parent": parent.hex() if (parent := run.parents[rank]) else None,
            }
            for run in runs
        ]
        for rank in namespaces
    }


def described(layout: KVLayout, spaces: dict[Rank, Namespace]) -> dict[str, Any]:
    """The bytes of one block, and what it is named by."""
    return {
        "block": hashlib.sha256(layout.gather([1]).numpy().tobytes()).hexdigest(),
        "namespaces": [[json.loads(each.canonical), each.digest.hex()] for each in spaces.values()],
        "stored": stored(spaces),
    }


def weights() -> dict[str, str]:
    """What stands for weights in the keys: of files, of memory, of a model's configuration."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "model.safetensors").write_bytes(bytes(range(256)) * 4096)
        files = weights_revision(Path(directory))
    values = torch.arange(3 << 19, dtype=torch.int32)
    hf_config = _Config(architectures=["LlamaForCausalLM"], hidden_size=64)
    return {
        "files": files,
        "memory": sample([("a.weight", values.view(torch.float32)), ("b.bias", values[:7].half())]).hex(),
        "config": config_digest(hf_config),
    }


def text() -> str:
    """The golden file."""
    layers_first, blocks_first, latent = (
        layout_of((0, 1, 2, 3, 4)),
        layout_of((1, 0, 3, 2, 4)),
        layout_of((0, 1, 3, 2, 4)),
    )
    ranks: dict[Rank, Namespace] = {
        (rank // 2, rank % 2): namespace(blocks_first, rank=rank, shards=2) for rank in range(4)
    }
    found = {
        "one rank": described(layers_first, {(0, 0): namespace(layers_first)}),
        "two stages of two ranks": described(blocks_first, ranks),
        "MLA": described(latent, {(0, 0): namespace(latent, spec="MLAAttentionSpec")}),
        "weights": weights(),
    }
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
