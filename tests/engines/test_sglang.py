"""SGLang's own factory, controller forms and host pools with `KVFSHiCache`, and its MooncakeStore on kvfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.scripts import run_vllm_script, said_to_work
from tests.support.door import ON_DIRECTORY
from tests.support.service import ROOT, Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

STORED = [True] * 5 + [False]


@pytest.fixture(scope="module")
def answers(engine_python: str, engine_wheels: str, work: Path, service: Service) -> dict[str, Any]:
    asked = {"address": str(service.mount)}
    return dict(run_vllm_script(engine_python, work, "sglang", asked, path=[str(ROOT), engine_wheels]))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_go_round(answers: dict[str, Any], layout: str) -> None:
    found = answers[layout]
    assert found["before"] == 0
    assert found["set"] + found["set behind"] + found["set again"] == [True] * 6
    assert found["exists"] == [5, True, False]
    assert (found["get"], found["equal"]) == (STORED, STORED)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_eviction_between_exists_and_get_is_a_miss(answers: dict[str, Any], layout: str) -> None:
    found = answers[layout]
    assert found["exists before eviction"] == 5
    assert found["get after eviction"] == [True, False, True, True, True, False]
    assert found["exists after eviction"] == 1


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_go_round_as_tensors(answers: dict[str, Any], layout: str) -> None:
    """What the v1 forms stored under the same keys is not taken for it: the bytes may be in another order."""
    found = answers[f"generic {layout}"]
    assert (found["before"], found["exists"], found["cleared"]) == (0, 5, 0)
    assert found["set"] == [True, True]
    assert (found["get"], found["equal"], found["get one"]) == (STORED, STORED, [True, True])
    assert found["get after eviction"] == [True, False, True, True, True, False]


def test_pages_of_other_bytes_never_meet(answers: dict[str, Any]) -> None:
    assert answers["namespaces"] == {
        "same": 6,
        "other rank": 0,
        "other weights": 0,
        "other dtype": 0,
        "other layout": 0,
        "cleared": 0,
        "other rank, not cleared": 2,
        "MLA, other rank": 1,
    }


def test_updated_weights_have_pages_of_their_own(answers: dict[str, Any]) -> None:
    found = answers["weights"]
    assert found["set"] == [True] * 3
    assert found["updated"] == [0, [False]]
    assert found["set, updated"] == [False]
    assert found["another engine"] == found["another engine, cleared"] == 3
    assert (found["cleared"], found["set, cleared"], found["exists, cleared"]) == (0, [True] * 2, 2)


def test_side_pools_of_hybrid_models(answers: dict[str, Any]) -> None:
    """KV has 5 pages, the indexer 4, the window the second and third: each policy asks for what it needs."""
    found = answers["side pools"]
    assert found["before"] == [0, {}, []]
    assert found["set"] == {"indexer": [True] * 4, "swa": [True] * 2}
    assert found["exists"] == [5, {"kv": 5}, [1, 2, 3, 4, 5]]
    assert found["exists, all pages"] == [4, {"kv": 5, "indexer": 4}, [1, 2, 3, 4]]
    assert found["exists, trailing pages"] == [3, {"kv": 5, "swa": 3}, [3]]
    assert found["exists, both"] == [3, {"kv": 5, "indexer": 4, "swa": 3}, [3]]
    assert found["get"] == {"indexer": [True] * 4 + [False] * 2, "swa": [True] * 2}
    assert found["equal"] == [True] * 4 + [False] * 2
    assert found["other places"]
    assert found["places that do not fit"] == {"indexer": [False] * 2}
    assert found["unknown policies"] == [[0, {"kv": 5}, []]] * 2
    covered = [2 * 3, 2 * 3, 1 * 3, 1 * 3, 0, 0]
    hits = [{"kv": 5, **({"indexer": pages} if pages else {})} for pages in covered]
    assert found["block groups"] == [[5, each, [1, 2, 3, 4, 5]] for each in hits], "these bound no prefix"
    assert found["cleared"] == [0, {}, []]


def test_ranks_of_context_parallelism_have_pages_of_their_own(answers: dict[str, Any]) -> None:
    """A rank that is served another one's page computes with other tokens."""
    nothing_then_all = [[False] * 2, [True] * 2]
    assert answers["context parallelism"] == {
        "none": nothing_then_all,
        "prefill 0": nothing_then_all,
        "prefill 1": nothing_then_all,
        "decode 0": nothing_then_all,
        "decode 1": nothing_then_all,
    }


def test_ranks_with_equal_side_pools_share_them(answers: dict[str, Any]) -> None:
    """The first rank of a model with MLA writes them for all; what is divided by heads is never shared."""
    assert answers["replicated pools"] == {
        "unknown": [],
        "latent True, replicated True": [True, True],
        "latent True, replicated False": [True, False],
        "latent False, replicated True": [True, False],
        "latent False, replicated False": [True, False],
    }


def test_without_a_service_everything_is_a_miss(answers: dict[str, Any]) -> None:
    nothing = [False] * 6
    assert answers["outage"] == {"exists": 0, "set": nothing, "get": nothing, "generic": [False, True]}


def test_sglangs_mooncake_store_runs_on_kvfs(answers: dict[str, Any]) -> None:
    found, stored = answers["mooncake"], [True] * 4 + [False] * 2
    assert (found["before"], found["exists"], found["cleared"]) == (0, 4, 0)
    assert found["set"] == [True] * 4
    assert (found["get"], found["equal"]) == (stored, stored)


@pytest.mark.usefixtures("answers")
def test_the_log_names_an_unknown_hit_policy_once(work: Path) -> None:
    said = [line for line in (work / "sglang.log").read_text().splitlines() if "is not supported" in line]
    assert len(said) == 1, said
    assert "of later" in said[0]


@pytest.mark.usefixtures("answers")
def test_the_log_says_that_the_store_works(work: Path, service: Service) -> None:
    log = (work / "sglang.log").read_text()
    said_to_work(log, "sglang", service)
