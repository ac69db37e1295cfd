"""vLLM with an adapter that a trainer replaces: loaded in place, time and again, from one path under one number."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path
from typing import Any, Protocol

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


class Trainer(Protocol):
    """Runs an engine whose adapter is replaced; returns the reply of `run_adapters`."""

    def __call__(self, settings: dict[str, Any] | None, *, resets: bool = True) -> dict[str, Any]: ...


@pytest.fixture(scope="module")
def trainer(engine_python: str, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [write_lora(folder / f"adapter {seed}", seed) for seed in range(ADAPTERS)]
    numbers = count()

    def run(settings: dict[str, Any] | None, *, resets: bool = True) -> dict[str, Any]:
        request = {
            "model": str(engines.work / "model"),
            "adapters": adapters,
            "latest": str(folder / f"latest {next(numbers)}"),
            "connector": settings,
            "prompt": PROMPT,
            "max_tokens": 24,
            "resets": resets,
        }
        return dict(run_vllm_script(engine_python, folder, "adapters", request))

    return run


@pytest.fixture(scope="module")
def plain(trainer: Trainer) -> dict[str, Any]:
    """What an engine without a cache answers."""
    return trainer(None)


def test_an_adapter_that_is_loaded_in_place_is_what_its_files_are(
    trainer: Trainer, plain: dict[str, Any], service: Service
) -> None:
    cached = trainer(connector(service, revision="adapters"))  # a namespace of its own
    assert len({tuple(tokens) for tokens in plain["tokens"]}) == ADAPTERS, "each adapter has its own output"
    assert plain["cached"] == [0] * (2 * ADAPTERS + 1)
    assert cached["tokens"] == plain["tokens"]
    assert cached["cached"] == [0, whole_blocks(PROMPT)] * ADAPTERS + [whole_blocks(PROMPT)]


def test_what_vllm_keeps_itself_of_an_adapter_is_not_stored_for_the_next(
    trainer: Trainer, plain: dict[str, Any], service: Service
) -> None:
    """vLLM knows an adapter by name and path: of one that is replaced there it goes on with the cache of the first."""
    settings = connector(service, revision="adapters that vLLM keeps")
    alone, beside = trainer(None, resets=False), trainer(settings, resets=False)
    first, replaced = plain["tokens"][2], plain["tokens"][4]
    assert alone["tokens"][4] != replaced, "vLLM alone"
    assert beside["tokens"] == alone["tokens"]
    assert beside["cached"][2:-1] == alone["cached"][2:-1]
    after = trainer(settings)
    assert after["tokens"] == plain["tokens"]
    assert first != replaced
