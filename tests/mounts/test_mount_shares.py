"""What one uid may take of the slots through the mount, also where the native loop creates its files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import limits
from tests.support.door import BUCKET, TEST_MODES, need_mount
from tests.support.posix import NOBODY, run_as
from tests.support.service import Service

SLOTS = 512
SHARE = SLOTS // limits.DRAFT_SHARE_OF_SLOTS


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    need_mount()
    service = Service(mode=request.param, arguments=["--slots", str(SLOTS)])
    try:
        yield service.start()
    finally:
        service.close()


def create_until_refused(directory: Path) -> tuple[int, int | None]:
    """How many files can be open for writing at once, and what the next one is refused with."""
    opened: list[int] = []
    try:
        while len(opened) < SLOTS:
            opened.append(os.open(directory / f"f{len(opened):05}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except OSError as refusal:
        return len(opened), refusal.errno
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return len(opened), None


@pytest.mark.mount
def test_spare_drafts_lead_nobody_past_his_share_of_the_slots(service: Service) -> None:
    bucket = service.mount / BUCKET
    bucket.mkdir()
    directory = bucket / "mine"
    directory.mkdir()
    os.chown(directory, NOBODY, NOBODY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        for _ in range(3):
            found, error = run_as(NOBODY, lambda: create_until_refused(directory))
            assert (found, error) == (SHARE, errno.EDQUOT)
            for name in os.listdir(directory):
                os.unlink(directory / name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
