"""Spare drafts are counted by who is charged for them, not by how many of them the native loop still has."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs import limits
from mounts.tree.spare_drafts import SpareDrafts
from mounts.upcalls import WATCHES, CallServer
from tiers.model.tier import Extent

WANTED = 8


class UsedAtOnce:
    """A loop whose every spare is used before the next is made, as by a creator on another processor."""

    spares = 0

    def node_draft(self, *_: object, **__: object) -> None: ...

    def spare_add(self, *_: object) -> None: ...

    def spare_take(self) -> int:
        return 0


def stand(most: int = WANTED) -> tuple[SpareDrafts, list[Extent], list[Extent]]:
    """Return spares of a mount of stand-ins, the slots that they have taken, and those that were given back."""
    made: list[Extent] = []
    dropped: list[Extent] = []

    def prepare() -> Extent:
        assert len(made) < 4 * most, "nothing ends it"
        made.append(Extent(len(made), 1))
        return made[-1]

    store: Any = SimpleNamespace(
        prepare=prepare,
        share_listeners=[],
        space=SimpleNamespace(most_spares=most, is_share_near=False),
        names=SimpleNamespace(next_ids=lambda count: 7),
        dram=SimpleNamespace(open_draft=lambda extent: -1, abort=dropped.append),
    )
    view: Any = SimpleNamespace(
        store=store,
        nodes=SimpleNamespace(
            allot=lambda: 100 + len(made), free=lambda nodeid: None, get=lambda nodeid: None
        ),
        drafts=SimpleNamespace(adopt=lambda *_, **__: None),
        touch=lambda *_: None,
    )
    files: Any = SimpleNamespace(allot=lambda changes: 1, adopt=lambda *_, **__: None)
    loop: Any = UsedAtOnce()
    return SpareDrafts(loop, view, files), made, dropped


def test_a_refill_ends_at_what_nobody_is_charged_for_yet() -> None:
    spares, made, dropped = stand()
    spares.wanted()
    spares.refill()
    assert len(made) == WANTED
    spares.refill()
    assert len(made) == WANTED, "all of them are used, and nobody is charged yet"
    call: Any = SimpleNamespace(
        other=100, nodeid=1, name=b"f", mode=0o600, uid=1, gid=1, pid=1, offset=1, when_ns=1
    )
    spares.adopt(call)
    spares.refill()
    assert len(made) == WANTED + 1
    spares.close()
    assert sorted(each.slot for each in dropped) == list(range(1, WANTED + 1))


def test_there_are_twice_as_many_each_time_that_they_have_run_out() -> None:
    spares, made, _ = stand(limits.SPARE_DRAFTS)
    assert not spares.refill(), "nobody has created a file"
    number = limits.SPARE_DRAFTS_AT_ONCE
    while number <= limits.SPARE_DRAFTS:
        spares.wanted()
        spares.wanted()  # another file, before any spare is made
        looks = [spares.refill() for _ in range((number - len(made)) // limits.SPARE_DRAFTS_AT_ONCE)]
        assert looks == [True] * (len(looks) - 1) + [False]
        assert len(made) == number
        number *= 2
    spares.wanted()
    assert not spares.refill()
    assert len(made) == limits.SPARE_DRAFTS


def test_there_are_no_more_where_some_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    spares, made, _ = stand(limits.SPARE_DRAFTS)
    spares.wanted()
    assert not spares.refill()
    monkeypatch.setattr(UsedAtOnce, "spares", 1)
    spares.wanted()
    assert not spares.refill()
    assert len(made) == limits.SPARE_DRAFTS_AT_ONCE


def test_they_leave_descriptors_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10 * limits.DESCRIPTORS_PER_SPARE_DRAFT, 1 << 20))
    spares, made, _ = stand(limits.SPARE_DRAFTS)
    for _ in range(9):
        spares.wanted()
        spares.refill()
    assert len(made) == 10


async def test_all_are_made_within_one_burst_though_no_call_comes() -> None:
    looks = iter([True] * 40 + [False] * 100)
    refills: list[bool] = []

    def refill() -> bool:
        refills.append(next(looks))
        return refills[-1]

    loop: Any = SimpleNamespace(calls_waiting=False, await_calls=lambda _: False)
    calls: Any = SimpleNamespace(catch_up=lambda _: None, is_behind=lambda: False)
    view: Any = SimpleNamespace(
        drafts=SimpleNamespace(publisher=SimpleNamespace(publish_ripe=lambda _: False))
    )
    nothing: Any = None
    spares: Any = SimpleNamespace(refill=refill)
    server = CallServer(loop, calls, nothing, nothing, nothing, spares, view, nothing)
    await server._serve_burst()
    assert refills.count(True) == 40
    assert refills.count(False) == WATCHES
