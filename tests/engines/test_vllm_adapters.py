"""vLLM with an adapter that a trainer replaces: loaded in place, time and again, from one path under one number."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engines.engine import BLOCK_TOKENS, Engines, whole_blocks
from tests.engines.scripts import run_vllm_script
from tests.engines.test_vllm_connector import connector
from tests.engines.tiny_llama import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

RANK = 4
TARGETS = {"v_proj": (HIDDEN, KV_HEADS * HEAD_DIM), "o_proj": (HEADS * HEAD_DIM, HIDDEN)}
PROMPT = [random.Random(86).randrange(2, VOCABULARY) for _ in range(5 * BLOCK_TOKENS + 7)]
ADAPTERS = 3


def write_lora(directory: Path, seed: int) -> str:
    """An adapter in PEFT's format that changes every layer's cache."""
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for target, (inputs, outputs) in TARGETS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            for name, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                values = rng.standard_normal(shape) / np.sqrt(shape[1])
                tensors[f"{prefix}.{name}.weight"] = values.astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8 * RANK, "target_modules": list(TARGETS)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def test_an_adapter_that_is_loaded_in_place_is_what_its_files_are(
    engine_python: str, engines: Engines, service: Service, tmp_path: Path
) -> None:
    adapters = [write_lora(tmp_path / f"adapter {seed}", seed) for seed in range(ADAPTERS)]

    def run(settings: dict[str, Any] | None) -> dict[str, Any]:
        request = {
            "model": str(engines.work / "model"),
            "adapters": adapters,
            "latest": str(tmp_path / f"latest {settings is None}"),
            "connector": settings,
            "prompt": PROMPT,
            "max_tokens": 24,
        }
        return dict(run_vllm_script(engine_python, tmp_path, "adapters", request))

    settings = connector(service, revision="adapters")  # a namespace of its own
    plain, cached = run(None), run(settings)
    assert len({tuple(tokens) for tokens in plain["tokens"]}) == ADAPTERS, "each adapter has its own output"
    assert plain["cached"] == [0] * (2 * ADAPTERS + 1)
    assert cached["tokens"] == plain["tokens"]
    assert cached["cached"] == [0, whole_blocks(PROMPT)] * ADAPTERS + [whole_blocks(PROMPT)]
