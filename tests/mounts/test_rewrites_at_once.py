"""Many writers that empty and write the same files again: what each close or fsync waits for is copied meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.support.door import ON_DIRECTORY, TEST_MODES
from tests.support.posix import start_child, wait_child
from tests.support.service import Service
from tests.support.small_store import watched

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

WRITERS: Final = 4
ROUNDS: Final = 50


@pytest.fixture(scope="module", params=TEST_MODES)
def shared(request: pytest.FixtureRequest) -> Iterator[Service]:
    with Service(mode=request.param, dram="32MiB", nvme="96MiB") as service:
        yield service


@pytest.fixture
def running(shared: Service) -> Iterator[Service]:
    with watched(shared):
        yield shared
    assert not shared.complaints()


def rewrite(bucket: Path, files: int, seed: int, *, syncs: bool) -> None:
    """Write files again and again, each from its beginning. Raises OSError."""
    generator = random.Random(seed)
    for number in range(ROUNDS):
        path, size = bucket / f"{generator.randrange(files)}", generator.randrange(60_000)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for start in range(0, size, 8192):
            os.write(descriptor, bytes([number % 256]) * min(8192, size - start))
        if syncs:
            os.fsync(descriptor)
        os.close(descriptor)


@pytest.mark.parametrize("files", [1, 4])
@pytest.mark.parametrize("kind", ["durable", "cache"])
def test_room_is_not_short_where_a_file_is_emptied_while_it_is_copied(
    running: Service, kind: str, files: int
) -> None:
    bucket = running.create_bucket(f"{kind}-{files}", durable=kind == "durable")
    writers = [
        start_child(partial(rewrite, bucket, files, seed, syncs=kind == "cache")) for seed in range(WRITERS)
    ]
    assert [wait_child(each) for each in writers] == [0] * WRITERS
    assert "not written to NVMe" not in running.log()
    for path in bucket.iterdir():
        assert len(path.read_bytes()) == path.stat().st_size
