"""transformers with `PromptCache`: the same outputs from a cache that was put together from stored blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engines.engine import Engines
from tests.engines.scripts import run_script
from tests.engines.tiny_llama import VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

BLOCK_TOKENS = 16
NEW_TOKENS = 12

_rng = random.Random(85)
ROOT_PROMPT = [_rng.randrange(2, VOCABULARY) for _ in range(150)]
PROMPTS = [ROOT_PROMPT[:n] + [_rng.randrange(2, VOCABULARY) for _ in range(7)] for n in (131, 16, 47, 99, 9)]


def whole(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_outputs_are_those_without_a_cache(
    engine_python: str, work: Path, engines: Engines, service: Service
) -> None:
    request = {
        "model": str(work / "model"),
        "address": str(service.mount),
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
    }
    reply = run_script(engine_python, work, "transformers", request)
    assert reply["first"] == reply["plain"]
    assert reply["second"] == reply["plain"]
    assert len({tuple(output) for output in reply["plain"]}) == len(PROMPTS)
    # At first the prompts after the first one share its blocks, then each has its own.
    assert reply["known"][0] == [0, 16, whole(47), whole(99), 0]
    assert reply["known"][1] == [whole(len(prompt) - 1) for prompt in PROMPTS]
    assert reply["new_blocks"][1] == [0] * len(PROMPTS)
