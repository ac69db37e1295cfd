"""What one uid may take of the slots, and a worker that cannot be started now."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from gateway.app.supervisor import Workers
from kvfs import limits
from kvfs.errors import ConfigError, QuotaExceeded
from tests.support.stores import SLOTS, small_store


def test_one_uid_cannot_take_every_slot(tmp_path: Path) -> None:
    with small_store(tmp_path / "data") as store:
        mine = [store.reserve(0, uid=1001) for _ in range(SLOTS // limits.DRAFT_SHARE_OF_SLOTS)]
        with pytest.raises(QuotaExceeded, match="share of the slots"):
            store.reserve(0, uid=1001)
        others = [store.reserve(0, uid=1002) for _ in range(10)]
        store.abort(mine.pop())
        mine.append(store.reserve(0, uid=1001))
        for draft in mine + others:
            store.abort(draft)


async def test_a_worker_that_cannot_be_started_is_an_error_that_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the descriptor limit; the supervisor tries again after ConfigError."""

    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(trio.lowlevel, "open_process", refuse)
    settings: Any = SimpleNamespace(credentials=())
    with pytest.raises(ConfigError, match="Too many open files"):
        await Workers(settings, 1)._start(0, settings)
