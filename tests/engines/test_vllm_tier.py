"""A secondary tier of vLLM's own offloading on kvfs, through vLLM's factory and job interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.scripts import run_vllm_script, said_to_work
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

CHUNK_BYTES = 12_288


def test_chunks_go_round(engine_python: str, work: Path, service: Service) -> None:
    found = run_vllm_script(engine_python, work, "vllm_tier", {"address": str(service.mount)})
    assert found["before"] == ["MISS"] * 8
    assert found["store"] == [True, True]
    assert found["lookup"] == ["HIT"] * 5 + ["MISS"] * 3
    assert found["load"] == [True, 4 * CHUNK_BYTES, None]
    assert found["equal"] == [True] * 4
    assert found["load after eviction"] == [False, [0, 2]]
    assert found["equal after eviction"] == [True, False, True]
    assert found["others"] == {"weights": "MISS", "tensor parallel": "MISS", "chunk size": "MISS"}
    groups = {"one": ["HIT", "MISS"], "other groups": "MISS", "both": True, "equal": [True, True]}
    assert found["groups"] == groups
    assert found["without a service"] == ["MISS", False, False]
    assert found["drained"] == [7]
    assert found["reset"] == ["MISS", "HIT"], "others go on with what they have"
    assert found["stored after the reset"] == ["HIT", "MISS"]
    said_to_work((work / "vllm_tier.log").read_text(), "vllm-tier", service)
