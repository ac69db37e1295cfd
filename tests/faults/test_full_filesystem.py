"""The filesystem under the data directory is full: an error at each door, a service that lives, and goes on later."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import NoSpace
from kvfs.formats import EndingKind
from kvfs.index.names import NameIndex
from kvfs.index.rows import NameRow
from kvfs.system import linux
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.service import Service
from tiers.device.threads import thread_device
from tiers.dram import tmpfs
from tiers.log.ending_pages import Ending
from tiers.log.endings import FILES, Endings

MIB = 1 << 20
pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]


@pytest.fixture
def small() -> Iterator[Path]:
    """A filesystem of 12 MiB."""
    need_mount()
    base = Path(tempfile.mkdtemp(prefix="kvfs-full-"))
    base.chmod(0o755)
    (base / "data").mkdir()
    tmpfs.mount(base / "data", 12 * MIB, inodes=1024, gid=None)
    yield base
    if base.exists():
        for point in (base / "data/dram", base / "data"):
            while tmpfs.is_mounted(point):
                linux.unmount(point, linux.MNT_DETACH)
        for path in (base / "data", base):
            if path.exists():
                os.rmdir(path)


def fill(directory: Path) -> Path:
    """Take all that is left, as another program may."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        for piece in (MIB, 4096):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return path


def row(number: int) -> NameRow:
    return NameRow(number, number, 1, 0o644, 0, 0, 0, 0, number, 0, b"", b"m" * 500)


def until_refused(kind: type[Exception], do: Callable[[int], object]) -> int:
    """Do it with 0, 1, 2 and so on until there is no space left; how often it was done."""
    for number in range(100_000):
        try:
            do(number)
        except kind as error:
            if "No space left" not in str(error):
                raise
            return number
    raise AssertionError("there was always space")


def put_until_full(names: NameIndex) -> int:
    """How many names it took."""
    return until_refused(NoSpace, lambda number: names.put(b"b", b"%06d" % number, row(number + 1)))


def test_an_index_on_a_full_filesystem_refuses_names_and_removes_them(small: Path) -> None:
    """LMDB writes through a mapping: a page that the filesystem has no room for would end the process."""
    with NameIndex.open(small / "data/index") as names:
        names.put(b"b", b"first", row(1))
        filler = fill(small / "data")
        count = put_until_full(names)
        assert count > 100
        assert names.get(b"b", b"%06d" % (count - 1)) == row(count)
        for number in range(count):  # with the reserve alone
            assert names.remove(b"b", b"%06d" % number) == row(number + 1)
        assert put_until_full(names) > count // 2  # in the room of what went
        filler.unlink()
        for number in range(count, count + 2_000):
            names.put(b"b", b"%06d" % number, row(number + 1))
        fill(small / "data")
    with NameIndex.open(small / "data/index") as names:
        assert names.get(b"b", b"first") == row(1)
        assert names.get(b"b", b"%06d" % (count + 1_999)) == row(count + 2_000)


def test_a_service_whose_filesystem_is_full_refuses_writes_and_goes_on(small: Path) -> None:
    with Service(base=small, dram="64MiB", arguments=("--slots", "16384")) as service:
        with service.client() as client:
            client.create_bucket("b")
            client.put("b/first", b"bytes", user_metadata=b"m" * 1000)
            filler = fill(service.data)
            stored = until_refused(
                NoSpace,
                lambda number: client.put(f"b/{number}", b"bytes", user_metadata=b"m" * 60_000),
            )
            until_refused(OSError, lambda number: (service.mount / f"b/{number}-{'d' * 200}").mkdir())
            assert service.running.poll() is None, service.log()
            assert client.get("b/first") == b"bytes"
            assert client.get(f"b/{stored - 1}") == b"bytes"
            for number in range(stored):
                client.remove(f"b/{number}")
            client.put("b/second", b"bytes")
            filler.unlink()
            for number in range(60):
                client.put(f"b/more-{number}", b"bytes", user_metadata=b"m" * 60_000)
        service.kill()
        filler = fill(service.data)
        service.restart()
        service.kill()
        service.restart()
        with service.client() as client:
            assert client.get("b/first") == b"bytes"
            client.remove("b/more-0")
        service.stop()
        service.start()
        filler.unlink()
        with service.client() as client:
            assert client.get("b/first") == b"bytes"
            client.put("b/third", b"bytes")
        assert "Traceback" not in service.log(), service.log()
        assert "No space left" in service.log()


async def test_endings_files_that_have_no_room_to_grow_stay_in_use(small: Path) -> None:
    """What they say must not be given up for larger ones."""
    device, directory = thread_device(2), small / "data"
    ended = Ending(7, 1, 9, EndingKind.OBJECT, 0)

    async def start(capacity_bytes: int, *more: Ending) -> set[int]:
        """What has ended, and `more`; how large the files are then."""
        endings = Endings(device, directory, bytes(16), lambda: [(1, 100)])
        endings.size_for(capacity_bytes)
        found = (await endings.load()).objects.keys() | {each.object_id for each in more}
        await endings.begin(more)
        assert found == {ended.object_id}
        await endings.finish()
        endings.close_files()
        return {(directory / name).stat().st_size for name in FILES}

    assert await start(16 * MIB, ended) == {MIB // 4}
    filler = fill(directory)
    for _ in range(3):
        assert await start(64 * MIB) == {MIB // 4}
    filler.unlink()
    assert await start(64 * MIB) == {MIB}
    await device.aclose()
