"""A name whose object is replaced while its lease is taken, by one that only NVMe has, is opened as it is then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from kvfs.protocol.messages import ExtentAnswer, Op
from tests.support.nvme_stores import data_of, put, running, until_written
from tests.support.waits import WAIT_S
from tiers.model.objects import Name
from tiers.sessions.answers import send_objects
from tiers.sessions.channel import OpenedFrame

SIZE = 70_001


class Answers:
    """Takes what a channel would send."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.data: list[bytes] = []

    async def send_opened(self, fill: Callable[[], OpenedFrame]) -> OpenedFrame:
        frame = fill()
        assert isinstance(frame.answer, ExtentAnswer)
        self.statuses += [entry.status for entry in frame.answer.entries]
        for descriptor in frame.descriptors:
            self.data.append(os.pread(descriptor, SIZE + 1, 0))
            os.close(descriptor)
        return frame


async def test_what_replaces_a_leased_object_is_leased_again(tmp_path: Path) -> None:
    names = [Name(b"b", b"%d" % number) for number in range(3)]
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0, durable=True)
        for name in names:
            put(store, name, SIZE)
        await until_written(store, len(names))
        await store.journal.settle()
        store.evict(names=names)
        shown = iter([names[0], names[0], names[1], names[1], names[1]])

        def find(_: object) -> Any:
            """The first object, until it is leased; the second, until that is; then the third."""
            return store.lookup(next(shown, names[2]))

        answers = Answers()
        session: Any = SimpleNamespace(store=store, caller=SimpleNamespace(uid=0))
        with trio.fail_after(WAIT_S):
            await send_objects(session, Op.OPEN_NAMED, [b"item"], find, answers)  # type: ignore[arg-type]
        assert answers.statuses == [0]
        assert answers.data == [data_of(names[2], SIZE)]
