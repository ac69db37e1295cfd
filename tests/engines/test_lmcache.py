"""LMCache's own adapters, memory and events with kvfs's connectors, and its connector for Mooncake on kvfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.run_lmcache import CHUNK, COUNT, ELEMENTS, HEADS, LAYERS
from tests.engines.scripts import run_vllm_script, said_to_work
from tests.support.door import ON_DIRECTORY
from tests.support.service import ROOT, Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

CHUNK_BYTES = 2 * LAYERS * CHUNK * HEADS * ELEMENTS * 4
STORED = [True] * 4 + [False]


@pytest.fixture(scope="module")
def answers(engine_python: str, engine_wheels: str, work: Path, service: Service) -> dict[str, Any]:
    asked = {"address": str(service.mount)}
    return dict(run_vllm_script(engine_python, work, "lmcache", asked, path=[str(ROOT), engine_wheels]))


@pytest.mark.parametrize("form", ["described", "plain"])
def test_the_connector_goes_round(answers: dict[str, Any], form: str) -> None:
    found = answers[f"connector, {form}"]
    assert found["before"] == [False, False]
    assert (found["exists"], found["contains"]) == (STORED, 4)
    assert (found["get"], found["equal"], found["get one"]) == (STORED, STORED, True)
    assert found["partial"] == [[2, LAYERS, CHUNK // 2, HEADS * ELEMENTS], True]
    assert found["other weights"] == 0
    assert found["without a service"] == [False, True]


@pytest.mark.parametrize("form", ["described", "plain"])
def test_eviction_between_look_up_and_read_is_a_miss(answers: dict[str, Any], form: str) -> None:
    found = answers[f"connector, {form}"]
    assert (found["contains before eviction"], found["remove"]) == (COUNT, [True, False])
    assert found["get after eviction"] == [True, False, True, True, True]
    assert found["prefix after eviction"] == 1


def test_the_second_level_goes_round(answers: dict[str, Any]) -> None:
    found = answers["l2"]
    assert found["event descriptors"] == 6
    assert found["before"] == [False] * 4
    assert (found["store"], found["store again"]) == ([True, 3 * CHUNK_BYTES], [True, 0])
    assert found["usage"] == 3 * CHUNK_BYTES
    assert found["look-up"] == [True, True, True, False]
    assert found["other rank, salt, weights"] == [False] * 3
    assert found["without a service"] == [[False, 0], [False], [False]]


def test_lmcache_is_told_what_delete_deleted(answers: dict[str, Any]) -> None:
    found = answers["l2"]
    assert found["usage after delete"] == found["usage after another"] == 2 * CHUNK_BYTES
    assert found["heard as deleted"] == [1, 1]
    assert (found["store after eviction"], found["usage after eviction"]) == (
        [True, 2 * CHUNK_BYTES],
        3 * CHUNK_BYTES,
    )
    assert found["usage at the end"] == 0
    assert found["heard without a service"] == 0


def test_what_is_locked_can_be_loaded_though_it_is_evicted(answers: dict[str, Any]) -> None:
    found = answers["l2"]
    assert found["look-up by another"] == [True, False, True, False]
    assert (found["load after eviction"], found["equal"]) == (
        [True, True, True, False],
        [True, True, True, False],
    )
    assert found["load by another"] == [True, False, True, False]
    assert found["load of what has no room"] == [False], "and LMCache is told"
    assert found["locked after unlock"] == 0


@pytest.mark.parametrize("form", ["described", "plain"])
def test_lmcaches_connector_for_mooncake_runs_on_kvfs(answers: dict[str, Any], form: str) -> None:
    found = answers[f"mooncake, {form}"]
    assert (found["before"], found["contains"]) == (0, 3)
    assert found["equal"] == [True] * 3 + [False] * 2


@pytest.mark.usefixtures("answers")
def test_the_log_says_that_the_store_works(work: Path, service: Service) -> None:
    log = (work / "lmcache.log").read_text()
    assert "LMCache INFO" in said_to_work(log, "lmcache", service)
    said_to_work(log, "lmcache-l2", service)
