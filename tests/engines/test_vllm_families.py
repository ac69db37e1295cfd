"""vLLM with `KVFSConnector`: further families whose layers keep keys and values of tokens, or a latent of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.groups import Group
from tests.engines import families
from tests.engines.families import Case, Runs
from tests.engines.tiny_families import (
    CHUNK,
    DEEPSEEK,
    GEMMA_4,
    GEMMA_4_LARGE,
    GPT_OSS,
    LLAMA_4,
    LLAMA_4_FULL,
    MISTRAL,
    WINDOW,
)
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

CASES = {
    "Mistral": Case(MISTRAL, 32, (Group.of_window(WINDOW, 32),)),
    "gpt-oss": Case(GPT_OSS, 32, (Group(), Group.of_window(WINDOW, 32))),
    # vLLM's own RMSNorm for CPUs reads other rows of a slice of a tensor, as with LFM2 (tiny_lfm2.py). vLLM makes
    # blocks of 16 tokens of whatever is asked for, and computes whole prompts in one step, on CPUs without AMX.
    "DeepSeek": Case(DEEPSEEK, 16, settings={"native_layers": True}),
    # Blocks of layers with smaller keys have more tokens, so that all blocks have the same bytes.
    "Gemma 4": Case(GEMMA_4, 64, (Group(stride=2), *[Group.of_window(WINDOW, 64)] * 2)),
    "Gemma 4, large": Case(GEMMA_4_LARGE, 64, (Group(), *[Group.of_window(WINDOW, 32, 2)] * 2)),
    "Gemma 4, large, with one cache": Case(GEMMA_4_LARGE, 32, settings={"one_cache": True}),
    "Llama 4": Case(LLAMA_4, 32, (Group(), *[Group.of_chunks(CHUNK, 32)] * 3)),
    "Llama 4, more full attention": Case(LLAMA_4_FULL, 32, (*[Group()] * 3, Group.of_chunks(CHUNK, 32))),
    "Llama 4 with one cache": Case(LLAMA_4, 32, settings={"one_cache": True}),
}


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, engine_python: str, work: Path, service: Service) -> Runs:
    return families.run(engine_python, work / request.param, service, CASES[request.param])


def test_outputs_are_those_without_a_cache(runs: Runs) -> None:
    families.check_outputs(runs)


def test_the_second_engine_loads_all_that_it_can_go_on_from(runs: Runs) -> None:
    families.check_hits(runs)
