"""Reads of what only NVMe has while DRAM is full of leases: at every door the bytes, and never a miss."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import kvfs
from kvfs import errors, limits
from kvfs._native.blocks.pieces import Pieces
from kvfs._native.blocks.reader import BELOW, MISS
from kvfs.client.read_path import ServedReader
from kvfs.client.transport import Deadline
from kvfs.keys import block_name
from kvfs.protocol.messages import ExtentResult, Op
from tests.support.door import need_mount
from tests.support.gateway import Gateway, gateway
from tests.support.nvme_stores import data_of as bytes_of
from tests.support.nvme_stores import put, running, until_written
from tests.support.service import sink
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually
from tiers.model.objects import Name, ObjectInfo
from tiers.model.tier import Extent
from tiers.sessions.answers import send_objects
from tiers.sessions.channel import OpenedFrame, close_all
from tiers.store.store import Store

MIB = 1 << 20
BLOCK_BYTES, BLOCKS = 256 << 10, 24
FILES = [f"files/f{number}" for number in range(8)]
LARGE, LARGE_BYTES = "files/large", 8 * MIB
"""Few of which take up the memory beside DRAM."""
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""botocore leaves sockets to the garbage collector."""


def data_of(what: object) -> bytes:
    return random.Random(str(what)).randbytes(BLOCK_BYTES)


KEYS = [bytes([number + 1]) * 16 for number in range(BLOCKS)]


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    """An endpoint whose DRAM is full of what somebody has open, with blocks and files on NVMe."""
    need_mount()
    sections = '[session]\nquota = "1GiB"'
    with (
        gateway(dram="32MiB", nvme="256MiB", sections=sections, arguments=("--slots", "4096")) as found,
        ExitStack() as leases,
    ):
        client = leases.enter_context(found.service.client())
        client.create_bucket("files")
        client.create_bucket("held")
        with client.blocks(NAMESPACE) as writer:  # whose spare drafts, with pages or without, end with it
            writer.put(KEYS, [data_of(key) for key in KEYS])
        blocks = leases.enter_context(client.blocks(NAMESPACE))
        # Each before room is made for the next: what NVMe does not have yet would be evicted from the store.
        sink(client, [f"{blocks.bucket}/{block_name(key).decode()}" for key in KEYS])
        for name in FILES:
            client.put(name, data_of(name))
        sink(client, FILES)
        client.put(LARGE, bytes(LARGE_BYTES))
        sink(client, [LARGE])
        leases.enter_context(full(client, blocks))
        yield found
        assert not found.service.complaints()


@contextmanager
def full(client: kvfs.Client, blocks: kvfs.Blocks) -> Iterator[None]:
    """Every byte of DRAM is of an object that somebody has open, or promised to a draft."""
    with ExitStack() as leases:
        with suppress(errors.NoSpace, errors.NotFound):  # evicted at once, for the headroom
            for number in itertools.count():
                client.put(f"held/{number}", bytes(MIB))
                leases.callback(os.close, client.open(f"held/{number}"))
        drafts: list[kvfs.Draft | None] = []
        for size_bytes in (MIB, 64 << 10, 4 << 10):
            with suppress(errors.NoSpace):
                while True:
                    drafts += blocks.reserve([os.urandom(16)], [size_bytes])
        leases.callback(blocks.abort, drafts)
        yield


def test_blocks_are_read_into_memory_and_as_views(door: Gateway) -> None:
    with door.service.client() as client, client.blocks(NAMESPACE) as blocks:
        assert blocks.match(KEYS) == BLOCKS
        into = [bytearray(BLOCK_BYTES) for _ in KEYS]
        assert blocks.get_into(KEYS, into) == [BLOCK_BYTES] * BLOCKS
        assert [bytes(each) for each in into] == [data_of(key) for key in KEYS]
        views = blocks.get(KEYS)
        assert [bytes(view) if view is not None else None for view in views] == [data_of(key) for key in KEYS]


def test_names_are_read_by_the_client(door: Gateway) -> None:
    with door.service.client() as client:
        for name in FILES:
            assert client.get(name) == data_of(name)


def test_names_are_read_on_the_mount(door: Gateway) -> None:
    for name in FILES:
        path = Path(door.service.mount) / name
        assert path.read_bytes() == data_of(name)
        with path.open("rb") as file:
            assert os.pread(file.fileno(), 100, 1000) == data_of(name)[1000:1100]


def test_names_are_read_by_s3(door: Gateway) -> None:
    s3 = door.client(max_pool_connections=8)
    with ThreadPoolExecutor(8) as pool:
        bodies = pool.map(lambda name: s3.get_object(Bucket="files", Key=name[6:])["Body"].read(), FILES * 3)
        assert list(bodies) == [data_of(name) for name in FILES * 3]


def test_memory_beside_dram_is_limited_and_waited_for(door: Gateway) -> None:
    """One uid may hold half of it: what is more waits until its time is over, and is read once others have ended."""
    with door.service.client() as client, client.blocks(NAMESPACE) as blocks:
        most = limits.READ_AROUND_BYTES // 2 // LARGE_BYTES
        with ExitStack() as held:
            for _ in range(most):
                held.callback(os.close, client.open(LARGE))
            with pytest.raises(errors.Busy):
                client.open(FILES[0])
            assert blocks.get_into(KEYS[:1], [bytearray(BLOCK_BYTES)], timeout_s=0.5) == [-1]
            status = client.status()
            assert status["read_around_bytes"] == limits.READ_AROUND_BYTES // 2
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(blocks.get_into, KEYS[:1], [bytearray(BLOCK_BYTES)], timeout_s=20)
                held.close()
                assert waiting.result() == [BLOCK_BYTES]
    with door.service.client() as client:
        eventually(lambda: client.status()["read_around_bytes"] == 0, "its memory is given back")


def test_what_leaves_dram_before_its_turn_is_read_back(tmp_path: Path) -> None:
    """Between the look at what has to be leased and the socket's turn anybody may evict it."""
    name = Name(b"b", b"name")
    read: list[bytes] = []

    async def check() -> None:
        async with running(tmp_path) as store:
            store.create_bucket(b"b", uid=0, gid=0)
            put(store, name, 1000)
            await until_written(store, 1)
            session: Any = SimpleNamespace(store=store, caller=SimpleNamespace(uid=0))

            class Evicts:
                """A door at which all leaves DRAM while it waits for the socket."""

                async def send_opened(self, prepare: Callable[[], OpenedFrame]) -> OpenedFrame:
                    store.evict(names=[name])
                    frame = prepare()
                    read.extend(os.pread(descriptor, 1001, 0) for descriptor in frame.descriptors)
                    close_all(frame.descriptors)
                    return frame

            def find(name: Name) -> ObjectInfo:
                found = store.lookup(name)
                assert isinstance(found, ObjectInfo)
                return found

            reply: Any = Evicts()
            await send_objects(session, Op.OPEN_NAMED, [name], find, reply)

    trio.run(check)
    assert read == [bytes_of(name, 1000)]


def test_one_object_too_large_to_be_read_now_costs_the_others_of_its_batch_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a full DRAM so many bytes are read at most: a larger object is Busy, its neighbours are read."""
    names = [Name(b"b", b"%d" % number) for number in range(3)]
    sizes = [MIB // 4, MIB, MIB // 4]
    monkeypatch.setattr(limits, "READ_AROUND_BYTES", MIB)
    statuses: list[int] = []
    read: list[bytes] = []

    async def check() -> None:
        async with running(tmp_path) as store:
            store.create_bucket(b"b", uid=0, gid=0)
            for name, size in zip(names, sizes, strict=True):
                put(store, name, size)
            await until_written(store, 3)
            store.evict(names=names)
            held: list[int] = []
            with suppress(errors.NoSpace):
                for number in itertools.count():
                    name = Name(b"b", b"held%d" % number)
                    put(store, name, MIB)
                    held.append(store.open_read(find(store, name), uid=0))
            with pytest.raises(errors.Busy, match="DRAM has no room"):
                await store.lease(find(store, names[1]), uid=0)
            session: Any = SimpleNamespace(store=store, caller=SimpleNamespace(uid=0))

            class Keeps:
                async def send_opened(self, prepare: Callable[[], OpenedFrame]) -> OpenedFrame:
                    frame = prepare()
                    statuses.extend(entry.status for entry in frame.answer.entries)
                    read.extend(os.pread(descriptor, MIB, 0) for descriptor in frame.descriptors)
                    close_all(frame.descriptors)
                    return frame

            reply: Any = Keeps()
            await send_objects(session, Op.OPEN_NAMED, names, lambda name: find(store, name), reply)
            close_all(held)

    def find(store: Store, name: Name) -> ObjectInfo:
        found = store.lookup(name)
        assert isinstance(found, ObjectInfo)
        return found

    trio.run(check)
    assert statuses == [0, errno.EAGAIN, 0]
    assert read == [bytes_of(names[0], sizes[0]), bytes_of(names[2], sizes[2])]


def test_reads_of_one_moment_look_once_at_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs the service's thread milliseconds. Who writes has everything looked at all the same."""
    names = [Name(b"b", b"%d" % number) for number in range(3)]

    def find(store: Store, name: Name) -> ObjectInfo:
        found = store.lookup(name)
        assert isinstance(found, ObjectInfo)
        return found

    async def check() -> None:
        async with running(tmp_path) as store:
            store.create_bucket(b"b", uid=0, gid=0)
            for name in names:
                put(store, name, MIB // 4)
            await until_written(store, 3)
            store.evict(names=names)
            held: list[int] = []
            with suppress(errors.NoSpace):
                for number in itertools.count():
                    name = Name(b"b", b"held%d" % number)
                    put(store, name, MIB // 4)
                    held.append(store.open_read(find(store, name), uid=0))
            looked: Counter[Extent] = Counter()
            is_held = store.dram.held

            def count(extent: Extent) -> bool:
                looked[extent] += 1
                return is_held(extent)

            monkeypatch.setattr(store.dram, "held", count)
            monkeypatch.setattr(limits, "HELD_LOOKS", 1e9)
            store.evict(1)  # by whom else the room was looked for does not matter
            assert set(looked.values()) == {1}
            looked.clear()
            for name in names[:2]:
                info, descriptor = await store.lease(find(store, name), uid=0)
                assert info.extent is None
                assert os.pread(descriptor, MIB, 0) == bytes_of(name, MIB // 4)
                held.append(descriptor)
            assert not looked
            with pytest.raises(errors.NoSpace):
                store.reserve(MIB // 4, uid=0)
            assert len(looked) >= len(held) - 3
            close_all(held)
            monkeypatch.setattr(limits, "HELD_LOOKS", 0)
            store.evict(1)
            info, descriptor = await store.lease(find(store, names[2]), uid=0)
            os.close(descriptor)
            assert info.extent is not None

    trio.run(check)


@pytest.mark.parametrize("status", [errno.EAGAIN, errno.EIO, errno.ENOSPC])
def test_what_one_block_is_refused_for_is_no_miss_of_the_others(status: int) -> None:
    """As a client sees it: the answer for one block says nothing of its neighbours."""
    sealed = [os.memfd_create("block") for _ in range(2)]
    for descriptor in sealed:
        os.write(descriptor, b"bytes")
    answers: list[tuple[ExtentResult, int | None]] = [
        (ExtentResult(0, 1, size_bytes=5), sealed[0]),
        (ExtentResult(status), None),
        (ExtentResult(0, 2, size_bytes=5), sealed[1]),
    ]
    session: Any = SimpleNamespace(run=lambda do, deadline: answers)
    into = [bytearray(5) for _ in answers]
    found = ServedReader(session).read(b"".join(KEYS[:3]), Pieces(into, 3, True), Deadline.after(1.0))
    assert (found[0], found[2]) == (5, 5)
    assert found[1] == (BELOW if status == errno.EAGAIN else MISS)
    assert [bytes(into[0]), bytes(into[2])] == [b"bytes", b"bytes"]
