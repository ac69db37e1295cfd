"""Spare drafts are counted by who is charged for them, not by how many of them the native loop still has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mounts.tree.spare_drafts import SpareDrafts
from tiers.model.tier import Extent

WANTED = 8


class UsedAtOnce:
    """A loop whose every spare is used before the next is made, as by a creator on another processor."""

    spares = 0

    def node_draft(self, *_: object, **__: object) -> None: ...

    def spare_add(self, *_: object) -> None: ...

    def spare_take(self) -> int:
        return 0


def stand() -> tuple[SpareDrafts, list[Extent], list[Extent]]:
    """Return spares of a mount of stand-ins, the slots that they have taken, and those that were given back."""
    made: list[Extent] = []
    dropped: list[Extent] = []

    def prepare() -> Extent:
        assert len(made) < 4 * WANTED, "nothing ends it"
        made.append(Extent(len(made), 1))
        return made[-1]

    store: Any = SimpleNamespace(
        prepare=prepare,
        share_listeners=[],
        space=SimpleNamespace(most_spares=WANTED, is_share_near=False),
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
