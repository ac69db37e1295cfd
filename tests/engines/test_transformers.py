"""transformers with `PromptCache`: the same outputs from a cache that was put together from stored blocks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine import Engines
from tests.engines.scripts import run_vllm_script, said_to_work
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


@pytest.fixture(scope="module")
def replies(engine_python: str, work: Path, engines: Engines, service: Service) -> dict[str, Any]:
    shutil.copytree(work / "model", work / "copied model")
    request = {
        "model": str(work / "model"),
        "copy": str(work / "copied model"),
        "address": str(service.mount),
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
    }
    return dict(run_vllm_script(engine_python, work, "transformers", request))


# At first the prompts after the first one share its blocks, then each has its own.
FIRST = [0, 16, whole(47), whole(99), 0]
ALL = [whole(len(prompt) - 1) for prompt in PROMPTS]
KNOWN = {
    "first": FIRST,
    "second": ALL,
    "equal files elsewhere": ALL,
    "from config": FIRST,
    "from config, again": ALL,
    "a row changed in place": FIRST,
    "changed back": ALL,
    "adapter attached": FIRST,
    "adapter attached, again": ALL,
    "adapter scaled": FIRST,
    "adapter disabled": FIRST,
    "adapter merged": FIRST,
    "files, at last": ALL,
    "epsilon of a norm": FIRST,
    "scaling of an attention": FIRST,
    "quantised": FIRST,
    "trained and quantised": FIRST,
}


@pytest.mark.parametrize("case", KNOWN)
def test_outputs_are_those_without_a_cache(replies: dict[str, Any], case: str) -> None:
    """Whatever the weights in memory are: each kind of them has blocks of its own.

    Dynamic quantisation scales a pass by all its tokens: that of a prompt's end is another one.
    """
    reply = replies[case]
    assert reply["cached"] == reply["plain"] or case.endswith("quantised")
    assert reply["known"] == KNOWN[case]
    assert (sum(reply["new_blocks"]) == 0) == (KNOWN[case] == ALL)
    assert len({tuple(output) for output in reply["plain"]}) == len(PROMPTS)


def test_other_weights_give_other_outputs(replies: dict[str, Any]) -> None:
    """Without this an equal output would prove nothing."""
    others = [
        case for case, known in KNOWN.items() if known == FIRST and case not in ("first", "adapter disabled")
    ]
    for case in others:
        pairs = zip(replies[case]["plain"], replies["first"]["plain"], strict=True)
        assert any(one != two for one, two in pairs), case


def test_a_cache_of_other_weights_is_not_saved(replies: dict[str, Any]) -> None:
    assert replies["late"] == 0


@pytest.mark.usefixtures("replies")
def test_the_log_says_that_the_store_works(work: Path, service: Service) -> None:
    log = (work / "transformers.log").read_text()
    said_to_work(log, "transformers", service)
