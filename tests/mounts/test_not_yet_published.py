"""What other doors show of a file that was closed on the mount and cannot be published yet: never what it replaces."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing

from kvfs import limits
from kvfs.client import Client
from kvfs.errors import Busy, Exists
from tests.support.door import BUCKET, ON_DIRECTORY
from tests.support.processor_waits import within
from tests.support.service import Service
from tests.support.small_store import watched
from tests.support.stores import BUCKET as STORE_BUCKET
from tests.support.stores import put, small_store
from tests.support.waits import eventually
from tiers.model.objects import Name, Unpublished

ON_MOUNT: Final = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]
NAME = f"{BUCKET}/file"
BEFORE, AFTER = b"before", b"afterwards"


@pytest.fixture
def service(small: Service) -> Iterator[Service]:
    with watched(small), small.client() as client:
        client.put(NAME, BEFORE)
        yield small
        client.remove(NAME)


CALLS: Final[dict[str, Callable[[Client], object]]] = {
    "get": lambda client: client.get(NAME),
    "open": lambda client: os.close(client.open(NAME)),
    "stat": lambda client: client.stat(NAME),
    "rename": lambda client: client.rename(NAME, NAME + "-moved"),
    "remove": lambda client: client.remove(NAME),
    "create": lambda client: client.put(NAME, b"another", replace=False),
}
CREATIONS: Final[dict[str, Callable[[Client], object]]] = {
    "create": lambda client: client.put(f"{NAME}-new", BEFORE, replace=False),
    "rename": lambda client: client.rename(NAME, f"{NAME}-new", replace=False),
}


def refuses(
    service: Service,
    calls: Mapping[str, Callable[[Client], object]] = CALLS,
    errors: type[Exception] | tuple[type[Exception], ...] = Busy,
) -> None:
    """Every call of another door gets an error to come again after; each has a session of its own, to wait together."""

    def is_refused(call: Callable[[Client], object]) -> None:
        with service.client() as client, pytest.raises(errors):
            call(client)

    with ThreadPoolExecutor(len(calls)) as doors:
        list(doors.map(is_refused, calls.values()))


class TestOnTheMount:
    """Use the kernel's own opens, mappings and closes."""

    pytestmark = ON_MOUNT

    def test_a_file_that_is_still_mapped_is_not_shown_as_it_was(self, service: Service) -> None:
        path = service.mount / NAME
        with path.open("r+b") as file:
            file.truncate(len(AFTER))
            mapping = mmap.mmap(file.fileno(), len(AFTER))
        mapping[:] = AFTER
        refuses(service)
        assert path.read_bytes() == AFTER
        mapping.close()
        with service.client() as client:
            eventually(lambda: client.get(NAME) == AFTER, "what was written")

    def test_a_descriptor_that_is_open_beside_the_closed_one(self, service: Service) -> None:
        """Write as a shell does: it closes one descriptor of `command > file` before the command begins."""
        path = service.mount / NAME
        first = os.open(path, os.O_WRONLY | os.O_TRUNC)
        second = os.dup(first)
        os.write(first, AFTER)
        os.close(first)
        refuses(service)
        os.close(second)
        with service.client() as client:
            assert client.get(NAME) == AFTER

    def test_a_new_file_that_is_closed_is_there_for_whoever_creates_what_is_not(
        self, service: Service
    ) -> None:
        path = service.mount / f"{NAME}-new"
        with path.open("x+b") as file:
            file.truncate(len(AFTER))
            mapping = mmap.mmap(file.fileno(), len(AFTER))
        mapping[:] = AFTER
        refuses(service, CREATIONS, (Busy, Exists))
        with service.client() as client:
            mapping.close()
            with pytest.raises(Exists):
                client.put(f"{NAME}-new", BEFORE, replace=False)
            assert client.get(f"{NAME}-new") == AFTER
            client.remove(f"{NAME}-new")

    def test_a_file_that_nobody_has_closed_is_shown_as_it_was(self, service: Service) -> None:
        with (service.mount / NAME).open("wb") as file, service.client() as client:
            file.write(AFTER)
            file.flush()
            assert service.process is not None
            with within(limits.PUBLISH_WAIT_S, service.process.pid):
                assert client.get(NAME) == BEFORE


# --- the wait itself ---------------------------------------------------------------------------------------
FILE: Final = Name(STORE_BUCKET, b"file")


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PUBLISH_WAIT_S", 0.01)


@pytest.mark.parametrize("was_answered", [False, True])
@pytest.mark.usefixtures("short_wait")
async def test_the_wait_runs_out(tmp_path: Path, was_answered: bool) -> None:
    with small_store(tmp_path) as store:
        put(store, FILE.key, BEFORE)
        store.publishers.append(
            lambda name: Unpublished(trio.Event(), was_answered) if name == FILE else None
        )
        other = Name(STORE_BUCKET, b"other")
        busy = await store.wait_all_published([FILE, other])
        assert (busy.keys() == {FILE}) is was_answered
        if was_answered:
            with pytest.raises(Busy):
                await store.wait_published(FILE)
        await store.wait_published(other)


async def test_what_comes_while_nobody_could_look_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over before anything was looked at: the last look decides, not the clock."""
    monkeypatch.setattr(limits, "PUBLISH_WAIT_S", 0)
    looks = iter([Unpublished(trio.Event(), was_answered=True), None])
    with small_store(tmp_path) as store:
        store.publishers.append(lambda name: next(looks))
        await store.wait_published(FILE)
    assert next(looks, "asked twice") == "asked twice"


@pytest.mark.usefixtures("short_wait")
async def test_many_names_wait_no_longer_than_one(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    with small_store(tmp_path) as store:
        store.publishers.append(lambda name: Unpublished(trio.Event(), was_answered=True))
        began = trio.current_time()
        busy = await store.wait_all_published([Name(STORE_BUCKET, b"%d" % n) for n in range(100)])
        assert len(busy) == 100
        assert trio.current_time() - began < 2 * limits.PUBLISH_WAIT_S


async def test_what_a_mount_that_is_gone_has_not_published_is_not_shown(tmp_path: Path) -> None:
    """A stop takes the mount down before the sessions end."""
    with small_store(tmp_path) as store:
        put(store, FILE.key, BEFORE)
        await store.wait_published(FILE)
        store.retire(FILE)
        with pytest.raises(Busy):
            await store.wait_published(FILE)
        put(store, FILE.key, AFTER)
        await store.wait_published(FILE)
