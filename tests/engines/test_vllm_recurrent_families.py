"""vLLM with `KVFSConnector`: further families with recurrent layers, Mamba 2 and gated delta nets.

vLLM has no kernels for CPUs that keep a state of Mamba 2 within a step, and ends: steps are of one block here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.groups import Group
from tests.engines import families
from tests.engines.families import Case, Runs
from tests.engines.tiny_families import GRANITE_4, QWEN_3_NEXT
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

GROUPS = (Group(), Group.of_state(), Group.of_state())
CASES = {
    "Granite 4": Case(GRANITE_4, families.STEP, GROUPS, {"prefix_caching": True}),
    # vLLM computes gated delta nets on CPUs in bfloat16 only.
    "Qwen3-Next": Case(QWEN_3_NEXT, None, GROUPS, {"prefix_caching": True, "dtype": "bfloat16"}),
}


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, engine_python: str, work: Path, service: Service) -> Runs:
    return families.run(engine_python, work / request.param, service, CASES[request.param])


def test_outputs_are_those_without_a_cache(runs: Runs) -> None:
    families.check_outputs(runs)


def test_the_second_engine_loads_all_that_it_can_go_on_from(runs: Runs) -> None:
    families.check_hits(runs)
