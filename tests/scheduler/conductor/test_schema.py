"""The OpenAPI document of the Conductor, taken at its word by Schemathesis: no request is answered by 5xx, all
answers are as the document says, what the document rules out is refused, and a refusal names the field.

KVFS_TEST_SEED repeats a run, KVFS_TEST_SCHEMA_S says for how long requests are made up (default: 15 s; with the
gate's seed they are so many, that it says the same twice). What the document cannot say (instances of a pool agree,
`tokens` or `hashes`) may be refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.support.conductors import instance, serving
from tests.support.seeds import GATE_SEED, SEED
from tests.support.service import ROOT

SCHEMA_S: Final = int(os.environ.get("KVFS_TEST_SCHEMA_S", 0 if SEED == GATE_SEED else 15))
BOUND: Final = ("--max-time", str(SCHEMA_S), "--max-examples", "200") if SCHEMA_S else ("--max-examples", "4")
TOKEN: Final = "0123456789abcdef"
SETTINGS: Final = """
warnings = false
[checks]
positive_data_acceptance.enabled = false
"""


@pytest.mark.seeded
async def test_the_document_holds(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    arguments = [
        *(sys.executable, "-m", "schemathesis.cli", "run"),
        *("--seed", str(SEED), *BOUND, "--continue-on-failure"),
        *("-H", f"Authorization: Bearer {TOKEN}", "--no-color", "--generation-database", "none"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SCHEMATHESIS_HOOKS": "tests.support.schemathesis_hooks",
    }
    async with serving(tokens=[TOKEN]) as (service, addresses):
        for name in "ab":
            service.add(instance(name, url="http://127.0.0.1:1"))
        done = await trio.run_process(
            # A stream that does not end.
            [*arguments, "--exclude-path", "/v1/events", f"{addresses.http}/openapi.json"],
            cwd=tmp_path,
            env=environment,
            check=False,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout.decode()
        assert service._api.errors["InternalError"] == 0
        assert service._api.requests["route"] > 0
        assert service._api._bodies_bytes == 0
