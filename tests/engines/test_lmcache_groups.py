"""Object groups of a hybrid model through LMCache's own storage and look-up, with kvfs as its second level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.scripts import run_vllm_script
from tests.support.door import ON_DIRECTORY
from tests.support.service import ROOT, Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

ALL, NONE = [6, True], [0, True]
"""How many chunks LMCache hits, and whether all that it needs of them is loaded, and right."""


@pytest.fixture(scope="module")
def answers(engine_python: str, engine_wheels: str, work: Path, service: Service) -> dict[str, Any]:
    asked = {"address": str(service.mount)}
    return dict(
        run_vllm_script(engine_python, work, "lmcache_groups", asked, path=[str(ROOT), engine_wheels])
    )


def test_an_engines_caches_go_through_lmcaches_copies_and_back(answers: dict[str, Any]) -> None:
    found = answers["engine"]
    assert (found["copied"], set(found["store"])) == ([True] * 2, {True})
    assert (found["hits"], found["retrieve"]) == (6, [True] * 2)
    assert found["equal"] == [[True] * 5] * 2, (
        "of each rank the layers of attention, of the window and of states"
    )


def test_all_groups_of_all_ranks_go_round(answers: dict[str, Any]) -> None:
    found = answers["round"]
    assert set(found["store"]) == {True}
    assert found["usage is of all objects"]
    assert (found["all"], found["again"], found["nothing"]) == (ALL, ALL, NONE)
    assert found["locked at the end"] == 0


def test_a_hit_ends_where_windows_and_states_are(answers: dict[str, Any]) -> None:
    found = answers["round"]
    assert found["few states"] == [4, True], "the last chunk with a state and a window"
    assert found["window with a gap"] == NONE, "no state is where a window is"


def test_other_layouts_weights_and_groups_are_other_keys(answers: dict[str, Any]) -> None:
    found = answers["round"]
    assert found["other weights"] == NONE
    assert found["other element types"] == NONE, "of the same sizes"
    assert found["other order of groups"] == NONE
    assert found["full attention alone"] == ALL, "its objects are the same, whatever groups are beside it"


def test_what_one_group_has_lost_shortens_the_hit(answers: dict[str, Any]) -> None:
    found = answers["evictions"]
    assert found["a window's last chunk of one rank"] == [5, True]
    assert found["a window's old chunk"] == ALL, "no hit of all needs it"
    assert found["a state of one rank"] == [5, True]
    assert found["full attention"] == [2, True]


def test_what_is_lost_after_the_look_up_is_no_wrong_hit(answers: dict[str, Any]) -> None:
    found = answers["evictions"]
    assert found["all, after the look-up"] == ALL, "it is locked"
    assert found["a window's, after look-up and unlock"] == NONE
    assert found["locked at the end"] == 0


def test_what_finds_no_room_among_the_locks_is_a_hit_as_well(answers: dict[str, Any]) -> None:
    assert answers["evictions"]["more than can be locked"] == [*ALL, [5]]


def test_an_object_of_another_size_is_a_miss_of_its_own(answers: dict[str, Any]) -> None:
    found = answers["sizes"]
    assert found["longer"] == [5, True]
    assert found["shorter"] == [4, True]
    assert found["missed by a load of all"] == [[1, 5]]
    assert found["loaded right"]


def test_objects_under_keys_without_a_layout_are_hits_of_a_single_group(answers: dict[str, Any]) -> None:
    found = answers["bare keys"]
    assert (found["one group"], found["of another size"]) == (ALL, [3, True])
    assert found["one group, deleted"] == NONE
    assert found["several groups"] == NONE


def test_serde_runs_with_one_group_and_is_refused_with_several(answers: dict[str, Any], work: Path) -> None:
    found = answers["serde"]
    assert (set(found["store"]), found["hits"]) == ({True}, 6)
    assert found["without serde"] == NONE
    assert [set(each) for each in found["store of groups"]] == [{False}] * 2
    assert (found["usage"], found["hits of groups"]) == (0, NONE)
    assert found["groups without serde"] == [True, ALL]
    log = (work / "lmcache_groups.log").read_text()
    assert log.count("serde with --separate-object-groups is refused") == 1


def test_a_deletion_reaches_the_objects_of_all_groups(answers: dict[str, Any]) -> None:
    assert answers["delete"] == {"there": 3 * 2 * 6, "left": 0, "usage": 0}
