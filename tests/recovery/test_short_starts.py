"""A start that runs short of memory, file size or descriptors fails with the reason, and loses nothing."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.cli import main
from kvfs.errors import OutOfResources
from kvfs.index.names import NameIndex
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.nvme_stores import running
from tests.support.seeds import SEED
from tests.support.service import Service, ServiceFailed
from tiers.recovery.index_check import MARK, IndexReader, IndexWalk
from tiers.recovery.start import StoreOptions, open_store

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", "2"))
MIB: Final = 1 << 20
LIMITED: Final = (
    "import os, resource, sys; kind, value = map(int, sys.argv[1:3]); "
    "resource.setrlimit(kind, (value, value)); os.execv(sys.argv[3], sys.argv[3:])"
)
SHORT: Final = [
    *(
        (resource.RLIMIT_AS, mib * MIB)
        for mib in (150, 200, 250, 280, 300, 320, 350, 400, 450, 500, 600, 800)
    ),
    *(
        (resource.RLIMIT_FSIZE, size)
        for size in (0, 1, 512, 4096, 65536, MIB, 4 * MIB, 5 * MIB, 12 * MIB, 40 * MIB)
    ),
    *(
        (resource.RLIMIT_NOFILE, count)
        for count in (8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 34, 40, 50, 64)
    ),
]


class Limited(Service):
    """A service that may be started under a resource limit."""

    limit: tuple[int, int] | None = None

    def command(self) -> list[str]:
        if self.limit is None:
            return super().command()
        return [sys.executable, "-c", LIMITED, *map(str, self.limit), *super().command()]


@pytest.fixture(params=["0", "32MiB"], ids=["dram", "nvme"])
def service(request: pytest.FixtureRequest) -> Iterator[Limited]:
    need_mount()
    with Limited(dram="32MiB", nvme=request.param, arguments=("--slots", "4096")) as running:
        yield running


@pytest.mark.seeded
def test_a_short_start_loses_nothing(service: Limited) -> None:
    with service.client() as client:
        client.create_bucket("cache")
        for number in range(50):
            client.put(f"cache/{number}", b"%d" % number * 5000)
    rng = random.Random(SEED)
    for limit in rng.sample(SHORT, min(ROUNDS, len(SHORT))):
        service.kill()
        service.limit = limit
        with suppress(ServiceFailed):
            service.restart()
        service.kill()
        service.limit = None
        service.restart()
        with service.client() as client:
            for number in range(50):
                assert client.get(f"cache/{number}") == b"%d" % number * 5000, service.log()
    assert "starting with an empty" not in service.log(), service.log()
    assert "is built anew" not in service.log(), service.log()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_check_says_nothing_of_the_index(tmp_path: Path, number: signal.Signals) -> None:
    NameIndex.open(tmp_path / "index").close()
    with IndexWalk(tmp_path / "index", copy=tmp_path / "copy") as walk:
        os.kill(walk._child, number)
        with pytest.raises(OutOfResources, match=rf"was killed by {number.name}"):
            walk.is_whole()


@pytest.mark.parametrize("with_nvme", [False, True])
def test_a_failed_start_leaves_the_directory_as_clean_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_nvme: bool
) -> None:
    """Or the next one would not believe the index, had the machine been booted since."""

    async def start() -> None:
        if not with_nvme:
            open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, backing="directory")).close(keep=True)
            return
        async with running(tmp_path, keep=True):
            pass

    def too_many_files(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def state() -> list[bytes]:
        with IndexReader(tmp_path / "index") as reader:
            return [(tmp_path / "format.json").read_bytes(), reader.meta(MARK)]

    trio.run(start)
    before = state()
    early = ["tiers.recovery.start.open_nvme"] if with_nvme else []
    for failing in (*early, "tiers.dram.tier.DramTier.open", "tiers.recovery.startup.Startup.build"):
        with monkeypatch.context() as short:
            short.setattr(failing, too_many_files)
            with pytest.raises(OSError, match="Too many open files"):
                trio.run(start)
        assert state() == before
        assert {file.name for file in (tmp_path / "index").iterdir()} == {"data.mdb", "lock.mdb"}
    trio.run(start)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "kvfs: not enough memory\n"),
        (RuntimeError("can't start new thread"), "kvfs: can't start new thread\n"),
        (
            ExceptionGroup("", [ValueError(), ExceptionGroup("", [OSError(errno.EMFILE, "Too many files")])]),
            "kvfs: [Errno 24] Too many files\n",
        ),
    ],
)
def test_a_shortage_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    def serve() -> None:
        raise error

    monkeypatch.setattr(main, "app", serve)
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().err == line
