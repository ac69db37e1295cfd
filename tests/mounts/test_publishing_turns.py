"""Closed files are published a few at a time, and other tasks get their turn between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from mounts.drafts.publisher import PUBLISHED_AT_ONCE, DraftPublisher
from tests.support.waits import until

FILES = 3 * PUBLISHED_AT_ONCE + 1


class Stand:
    """A publisher of stand-ins for files that were closed, and what was published between the turns of another task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: list[int] = []
        nothing: Any = SimpleNamespace(maintain=lambda: None, catch_up=lambda: None)
        self.publisher = DraftPublisher(nothing, nothing, nothing, nothing, nothing, nothing)
        monkeypatch.setattr(
            self.publisher, "_publish_or_linger", lambda node, opened: self.published.append(node.nodeid)
        )

    def close_files(self) -> None:
        for nodeid in range(1, FILES + 1):
            opened: Any = SimpleNamespace(
                torn=False,
                overtaken=False,
                failed=False,
                awaited=set(),
                untouched=False,
                closed=False,
                lingering=False,
            )
            node: Any = SimpleNamespace(nodeid=nodeid, draft=opened, linked=True)
            self.publisher.end_writing(node, opened)


def test_a_turn_publishes_a_few_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    stand.close_files()
    assert not stand.publisher.publish_ripe(lambda: False), "names may still change"
    stand.publisher.ripen()
    for turn in range(1, 4):
        assert stand.publisher.publish_ripe(lambda: False)
        assert stand.published == list(range(1, turn * PUBLISHED_AT_ONCE + 1))
    assert stand.publisher.publish_ripe(lambda: True), "there is other work"
    assert not stand.publisher.publish_ripe(lambda: False)
    assert stand.published == list(range(1, FILES + 1))


async def test_other_tasks_get_their_turn_in_a_burst(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(monkeypatch)
    stand.publisher.run_in(nursery)
    seen = {0}

    async def look() -> None:
        while True:
            await trio.lowlevel.checkpoint()
            seen.add(len(stand.published))

    nursery.start_soon(look)
    stand.close_files()
    await until(lambda: len(stand.published) == FILES)
    for turn in (1, 2):  # in each round of both tasks trio takes either one first
        assert {turn * PUBLISHED_AT_ONCE, (turn + 1) * PUBLISHED_AT_ONCE} & seen
