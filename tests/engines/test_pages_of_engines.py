"""What docs/engines.md shows works with the engines as it is printed, on a real service."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.engines.engine import Engines
from tests.engines.scripts import run_vllm_script
from tests.support.door import ON_DIRECTORY
from tests.support.pages import blocks_of
from tests.support.service import ROOT, Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]


def test_what_the_page_shows_works(
    engine_python: str, work: Path, engines: Engines, service: Service
) -> None:
    blocks = blocks_of(ROOT / "docs" / "engines.md")
    [prompt_cache] = [block.code for block in blocks if "PromptCache" in block.code]
    transfers = re.findall(
        r"--kv-transfer-config '(.*?)'", "".join(block.code for block in blocks), re.DOTALL
    )
    request = {
        "model": str(work / "model"),
        "transformers": prompt_cache.replace("/mnt/kvfs", str(service.mount)),
        "vllm": [json.loads(text) for text in transfers],
    }
    reply = run_vllm_script(engine_python, work, "pages", request)
    assert reply == {
        "known": [0, 128],
        "connectors": ["KVFSConnector", "OffloadingConnector"],
        "tiers": [[], ["KVFSTier"]],
    }
