"""Bursts of new files: once they are as long as they get, the loop creates all of their files by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import limits
from kvfs.client import Client
from tests.support.door import BUCKET, TEST_MODES, need_mount
from tests.support.service import Service
from tests.support.waits import eventually

FILES = limits.SPARE_DRAFTS - limits.SPARE_DRAFTS_AT_ONCE
"""In a burst: Python may be about to make some spares."""


@pytest.fixture(params=[mode for mode in TEST_MODES if mode != "plain"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    need_mount()
    service = Service(mode=request.param)
    try:
        yield service.start()
    finally:
        service.close()


def creates(client: Client) -> int:
    """How many files Python has created."""
    found = client.status()["latencies"]["mount"].get("create", {"buckets": {}})
    return sum(found["buckets"].values())


def make(directory: Path) -> list[Path]:
    files = [directory / f"{number:04}" for number in range(FILES)]
    for number, file in enumerate(files):
        with file.open("xb", buffering=0) as opened:
            opened.write(b"%d" % number)
    return files


@pytest.mark.mount
def test_a_burst_is_created_by_the_loop_once_there_were_such(service: Service) -> None:
    (service.mount / BUCKET).mkdir()
    with service.client() as client:
        before = creates(client)

        def is_native() -> bool:
            nonlocal before
            directory = service.mount / BUCKET / f"{before}"
            directory.mkdir()
            files = make(directory)
            assert [file.read_bytes() for file in files] == [b"%d" % number for number in range(FILES)]
            for file in files:
                file.unlink()
            directory.rmdir()
            last, before = before, creates(client)
            return before == last

        eventually(is_native, "no file of a burst is created by a call")
        slots = client.status()["tiers"][0]["slots"]
        assert limits.SPARE_DRAFTS_AT_ONCE <= slots <= limits.SPARE_DRAFTS  # the fewest where Python keeps up


@pytest.mark.mount
def test_who_makes_few_files_keeps_few_spares(service: Service) -> None:
    (service.mount / BUCKET).mkdir()
    with service.client() as client:
        for number in range(40):
            file = service.mount / BUCKET / f"{number}"
            file.write_bytes(b"x")
            seals = number + 1
            eventually(lambda seals=seals: client.status()["seals"] == seals, "it is published")
            file.unlink()
        assert client.status()["tiers"][0]["slots"] <= 2 * limits.SPARE_DRAFTS_AT_ONCE
