"""The oracle of the service crash tests finds what it must find, and nothing else."""

from __future__ import annotations

import time

from tests.support.service_journal import ANYTHING, Change, Journal, digest_of

OLD, NEW, OTHER = (digest_of(word) for word in (b"old", b"new", b"other"))


def written(journal: Journal, name: str, value: str | None) -> Change:
    change = journal.begin("write", {name: value})
    journal.done(change)
    return change


def wrong(journal: Journal, found: dict[str, str]) -> list[str]:
    journal.died()
    verdict = journal.judge(found, ["dur/"])
    return [*verdict.wrong, *verdict.lost]


def test_an_answered_change_supersedes_what_was_answered_before() -> None:
    journal = Journal()
    written(journal, "cache/a", OLD)
    written(journal, "cache/a", NEW)
    [fault] = wrong(journal, {"cache/a": OLD})
    assert "cache/a is an OLDER version" in fault
    assert wrong(journal, {"cache/a": NEW}) == wrong(journal, {}) == []


def test_what_was_removed_does_not_come_back() -> None:
    journal = Journal()
    written(journal, "cache/a", OLD)
    written(journal, "cache/a", None)
    assert len(wrong(journal, {"cache/a": OLD})) == 1


def test_what_was_ended_a_moment_before_may_be_back_where_the_index_is_lost() -> None:
    journal = Journal()
    for name in ("cache/a", "cache/b", "dur/a"):
        written(journal, name, OLD)
    written(journal, "cache/a", None)
    before = time.monotonic()
    written(journal, "cache/b", NEW)
    written(journal, "dur/a", None)
    journal.index_lost(before, ["cache/"])
    assert wrong(journal, {"cache/b": OLD}) == wrong(journal, {"cache/b": NEW}) == wrong(journal, {}) == []
    assert len(wrong(journal, {"cache/a": OLD})) == len(wrong(journal, {"dur/a": OLD})) == 1


def test_bytes_that_nobody_wrote_are_told_from_those_of_another_name() -> None:
    journal = Journal()
    written(journal, "cache/a", OLD)
    written(journal, "cache/b", NEW)
    [fault] = wrong(journal, {"cache/a": NEW})
    assert "bytes of cache/b" in fault
    [fault] = wrong(journal, {"cache/a": OTHER})
    assert "NOBODY" in fault


def test_a_change_without_an_answer_has_happened_or_not_until_a_start_shows_which() -> None:
    journal = Journal()
    written(journal, "dur/a", OLD)
    journal.begin("write", {"dur/a": NEW})
    assert wrong(journal, {"dur/a": OLD}) == wrong(journal, {"dur/a": NEW}) == []
    assert wrong(journal, {}) == ["dur/a"]
    journal.observed({"dur/a": NEW})
    assert len(wrong(journal, {"dur/a": OLD})) == 1


def test_a_first_change_without_an_answer_may_be_absent() -> None:
    journal = Journal()
    journal.begin("write", {"dur/a": NEW})
    assert wrong(journal, {}) == wrong(journal, {"dur/a": NEW}) == []


def test_changes_side_by_side_may_come_in_any_order() -> None:
    journal = Journal()
    written(journal, "dur/a", OLD)
    one, other = journal.begin("one", {"dur/a": NEW}), journal.begin("other", {"dur/a": OTHER})
    journal.done(one)
    journal.done(other)
    assert wrong(journal, {"dur/a": NEW}) == wrong(journal, {"dur/a": OTHER}) == []
    assert len(wrong(journal, {"dur/a": OLD})) == 1


def test_a_refused_change_has_no_effect_and_a_half_made_one_any() -> None:
    journal = Journal()
    written(journal, "dur/a", OLD)
    journal.failed(journal.begin("write", {"dur/a": NEW}), "full")
    assert len(wrong(journal, {"dur/a": NEW})) == 1
    journal.unsure(journal.begin("write", {"dur/a": ANYTHING}), "full")
    assert wrong(journal, {"dur/a": OTHER}) == wrong(journal, {}) == []
    written(journal, "dur/a", NEW)
    assert len(wrong(journal, {"dur/a": OTHER})) == 1


def test_a_rename_that_was_cut_off_leaves_one_object_under_one_name() -> None:
    journal = Journal()
    written(journal, "dur/a", OLD)
    written(journal, "dur/b", NEW)
    journal.begin("rename", {"dur/a": None, "dur/b": OLD}, [("dur/a", "dur/b")])
    assert wrong(journal, {"dur/a": OLD, "dur/b": NEW}) == []


def test_both_names_of_a_rename_are_wrong_and_neither_is() -> None:
    for found, said in (
        ({"dur/a": OLD, "dur/b": OLD}, "one object is both"),
        ({"dur/b": NEW}, "lost on its way"),
    ):
        journal = Journal()
        written(journal, "dur/a", OLD)
        written(journal, "dur/b", NEW)
        journal.begin("rename", {"dur/a": None, "dur/b": OLD}, [("dur/a", "dur/b")])
        [fault] = wrong(journal, found)
        assert said in fault


def test_what_a_rename_brought_may_be_replaced_by_one_beside_it_and_by_none_before_it() -> None:
    for found, faults in ((OLD, 0), (NEW, 0), (OTHER, 2)):
        journal = Journal()
        written(journal, "dur/a", OLD)
        written(journal, "dur/b", NEW)
        written(journal, "dur/c", OTHER)
        journal.begin("rename", {"dur/a": None, "dur/c": OLD}, [("dur/a", "dur/c")])
        journal.begin("rename", {"dur/b": None, "dur/c": NEW}, [("dur/b", "dur/c")])
        assert len(wrong(journal, {"dur/c": found})) == faults


def test_a_copy_may_be_under_several_names() -> None:
    journal = Journal()
    written(journal, "dur/a", OLD)
    journal.done(journal.begin("copy", {"dur/b": OLD}, copies=True))
    assert wrong(journal, {"dur/a": OLD, "dur/b": OLD}) == []


def test_what_a_cache_missed_may_only_come_back_as_it_was() -> None:
    journal = Journal()
    written(journal, "cache/a", OLD)
    written(journal, "cache/a", NEW)
    assert wrong(journal, {}) == []
    journal.observed({})
    assert wrong(journal, {"cache/a": NEW}) == []
    assert len(wrong(journal, {"cache/a": OLD})) == 1


def test_what_was_lost_for_a_known_reason_may_stay_lost() -> None:
    journal = Journal()
    written(journal, "dur/a", OLD)
    written(journal, "dur/a", NEW)
    assert wrong(journal, {}) == ["dur/a"]
    journal.give_up("dur/a")
    assert wrong(journal, {}) == wrong(journal, {"dur/a": NEW}) == []
    assert len(wrong(journal, {"dur/a": OLD})) == 1
