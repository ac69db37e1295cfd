"""The engines' client on a whole service: a mount as the address, both tiers, a service that goes and comes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import kvfs
from kvfs import errors, limits
from kvfs.client import write_path
from kvfs.client.write_path import seal_rest
from kvfs.connectors.common import LowerTiers
from kvfs.keys import block_name
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.service import Service, run_kvfs, sink
from tests.support.small_store import checksums
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

KIB = 1 << 10


@pytest.fixture
def service() -> Iterator[Service]:
    need_mount()
    with Service(dram="64MiB", nvme="128MiB") as running:
        yield running
        assert not running.complaints()


@pytest.fixture
def client(service: Service) -> Iterator[kvfs.Client]:
    with kvfs.connect(service.mount, timeout_s=WAIT_S) as connected:
        yield connected


def data_of(key: bytes, size: int = 64 * KIB) -> bytes:
    return (key * (size // 16 + 1))[:size]


def keys_of(count: int) -> list[bytes]:
    return [b"\1" + os.urandom(15) for _ in range(count)]


def put(blocks: kvfs.Blocks, keys: list[bytes]) -> list[bool]:
    return blocks.put(keys, [data_of(key) for key in keys], [None, *keys[:-1]])


def names_of(blocks: kvfs.Blocks, keys: list[bytes]) -> list[str]:
    return [f"{blocks.bucket}/{block_name(key).decode()}" for key in keys]


# --- both tiers ------------------------------------------------------------------------------------------
def test_what_is_on_nvme_only_is_a_hit(client: kvfs.Client) -> None:
    with client.blocks(NAMESPACE) as blocks:
        keys = keys_of(12)
        put(blocks, keys)
        sink(client, names_of(blocks, keys))
        assert blocks.match(keys) == 12
        into = [bytearray(64 * KIB) for _ in range(13)]
        assert blocks.get_into([*keys[:3], bytes(16)], into[:4], timeout_s=0) == [-1] * 4
        assert blocks.get_into([keys[0], bytes(16)], into[:2]) == [64 * KIB, -1]
        assert bytes(into[0]) == data_of(keys[0])
        views = blocks.get_async(keys[:4]).result(WAIT_S)
        assert [bytes(view) for view in views if view is not None] == [data_of(key) for key in keys[:4]]
        assert blocks.prefetch([*keys, bytes(16)]).result(WAIT_S) == 12
        tiers = {client.stat(name).tier for name in names_of(blocks, keys)}
        assert tiers == {"dram"}
        assert blocks.get_into(keys, into[:12], timeout_s=0) == [64 * KIB] * 12
        assert [bytes(each) for each in into[:12]] == [data_of(key) for key in keys]


def test_a_large_put_is_shared_out_and_each_block_has_its_own_checksum(client: kvfs.Client) -> None:
    """More than 2 MiB, which other threads help to write; what comes up from NVMe is compared with the checksum."""
    with client.blocks(NAMESPACE) as blocks:
        for turn in range(2):
            keys, sizes = keys_of(48), [turn * 4096 + 100_000 + 3_000 * number for number in range(48)]
            contents = [os.urandom(size) for size in sizes]
            cut = [[content[:5000], content[5000:]] for content in contents]
            assert blocks.put(keys, cut) == [True] * 48
            sink(client, names_of(blocks, keys))
            into = [bytearray(size) for size in sizes]
            assert blocks.get_into(keys, into) == sizes
            assert into == contents
            blocks.remove(keys)


def test_what_does_not_come_up_is_a_miss_until_it_does(service: Service, client: kvfs.Client) -> None:
    """The service does not answer: a connector's second look-up finds what is in DRAM alone."""
    with client.blocks(NAMESPACE) as blocks:
        keys, lower = keys_of(6), LowerTiers()
        joined = b"".join(keys)
        put(blocks, keys)
        sink(client, names_of(blocks, keys))
        assert blocks.prefetch(keys[:2]).result(WAIT_S) == 2
        assert blocks.below_dram(keys) == [False] * 2 + [True] * 4
        assert lower.readable(blocks, joined) == 6
        with service.paused():
            into = [bytearray(64 * KIB) for _ in keys]
            assert blocks.get_into(keys, into, timeout_s=1.0) == [64 * KIB] * 2 + [-1] * 4
            lower.failed(blocks, b"".join(keys[2:]))
            assert lower.readable(blocks, joined) == 2
        eventually(lambda: lower.readable(blocks, joined) == 6, "what was missed comes up again")
        assert blocks.get_into(keys, into) == [64 * KIB] * 6


def test_loads_that_do_not_come_up_take_one_deadline_together(
    service: Service, client: kvfs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones have all threads until their deadline; then nothing is left of it for the others."""
    given: list[float] = []

    def note(name: str) -> None:
        call = getattr(kvfs.Blocks, name)

        def noted(blocks: kvfs.Blocks, *some: Any, timeout_s: float) -> Any:
            given.append(timeout_s)
            return call(blocks, *some, timeout_s=timeout_s)

        monkeypatch.setattr(kvfs.Blocks, name, noted)

    with client.blocks(NAMESPACE) as blocks:
        sunk, [there] = keys_of(40), keys_of(1)
        put(blocks, sunk)
        sink(client, names_of(blocks, sunk))
        put(blocks, [there])
        into = bytearray(64 * KIB)
        note("get")
        note("get_into")
        with service.paused():
            half = len(sunk) // 2
            loads = [
                blocks.get_into_async([key], [bytearray(64 * KIB)], timeout_s=1.0) for key in sunk[:half]
            ]
            views = [blocks.get_async([key], timeout_s=1.0) for key in sunk[half:]]
            last = blocks.get_into_async([there], [into], timeout_s=1.0)
            assert [load.result(WAIT_S) for load in loads] == [[-1]] * half
            assert [view.result(WAIT_S) for view in views] == [[None]] * half
            assert last.result(WAIT_S) == [64 * KIB]
        assert len(given) == len(sunk) + 1
        assert len([each for each in given if each > 0.5]) <= limits.CLIENT_THREADS
        assert bytes(into) == data_of(there)


def test_blocks_of_a_durable_bucket_are_durable_when_put_returns(client: kvfs.Client) -> None:
    client.create_bucket("kept", durable=True, mode=0o770)
    with client.blocks(NAMESPACE, bucket="kept") as blocks:
        keys = keys_of(3)
        assert put(blocks, keys) == [True] * 3
        assert client.status()["tiers"][1]["objects_written"] >= 3
        assert put(blocks, keys) == [False] * 3


def test_a_bucket_says_what_its_namespace_holds(service: Service, client: kvfs.Client) -> None:
    def held(name: str) -> tuple[int, int]:
        [bucket] = [bucket for bucket in client.buckets() if bucket.name == name]
        assert bucket.model == NAMESPACE.model
        return bucket.blocks, bucket.block_bytes

    with client.blocks(NAMESPACE) as blocks:
        keys = keys_of(5)
        put(blocks, keys)
        assert held(blocks.bucket) == (5, 5 * 64 * KIB)
        assert blocks.remove(keys[3:]) == 2
        assert held(blocks.bucket) == (3, 3 * 64 * KIB)
        listed = run_kvfs("ls", "-l", "--at", str(service.mount)).stdout
        assert f"{NAMESPACE.digest.hex()}, {NAMESPACE.model}: 3 blocks, 192 KiB" in listed


def test_a_block_is_a_file_at_once(service: Service, client: kvfs.Client) -> None:
    with client.blocks(NAMESPACE) as blocks:
        for key in keys_of(20):
            put(blocks, [key])
            path = service.mount / names_of(blocks, [key])[0]
            assert path.read_bytes() == data_of(key)
            assert blocks.remove([key]) == 1
            eventually(lambda path=path: not path.exists(), "the kernel knows of it")


# --- a service that goes and comes back ------------------------------------------------------------------
def test_reads_go_on_while_no_service_runs(service: Service, client: kvfs.Client) -> None:
    with client.blocks(NAMESPACE) as blocks:
        keys = keys_of(8)
        put(blocks, keys)
        eventually(lambda: all(checksums(service)), "every slot has its checksum")
        [leased] = blocks.get(keys[:1])
        assert leased is not None
        service.kill()
        into = bytearray(64 * KIB)
        assert blocks.match(keys) == 8
        assert blocks.get_into(keys[:1], [into]) == [64 * KIB]
        with pytest.raises((errors.SessionClosed, errors.DeadlinePassed)):
            blocks.put(keys_of(1), [b"x"], timeout_s=0.2)
        with pytest.raises((errors.SessionClosed, errors.DeadlinePassed)):
            blocks.remove(keys, timeout_s=0.2)
        service.restart()
        assert bytes(leased) == data_of(keys[0])
        assert blocks.match(keys[1:]) == 7
        for key in keys[1:]:
            assert blocks.get_into([key], [into]) == [64 * KIB]
            assert bytes(into) == data_of(key)
        assert put(blocks, keys_of(40)) == [True] * 40
        assert blocks.remove(keys[1:]) == 7


def test_the_first_put_of_a_session_is_sealed_by_the_sealing_thread(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has closed its own descriptors of the drafts by then."""
    statuses: list[int] = []

    def note(live: Any, put: Any, blocks: Any, drafts: Any, found: list[int]) -> list[bool]:
        statuses.extend(found)
        return seal_rest(live, put, blocks, drafts, found)

    monkeypatch.setattr(write_path, "seal_rest", note)
    for _ in range(20):
        with kvfs.connect(service.mount) as client, client.blocks(NAMESPACE) as blocks:
            assert all(put(blocks, keys_of(8)))
    assert statuses == [0] * 160


def test_a_draft_does_not_outlive_its_session(service: Service, client: kvfs.Client) -> None:
    with client.blocks(NAMESPACE) as blocks:
        keys = keys_of(2)
        drafts = blocks.reserve(keys, [16, 16])
        assert drafts[0] is not None
        drafts[0].write(b"x" * 16)
        service.kill()
        service.restart()
        with pytest.raises(errors.SessionClosed):
            blocks.seal(drafts)
        assert blocks.exists(keys) == [False, False]
        assert put(blocks, keys) == [True, True]


def test_another_store_at_the_same_place_is_all_misses_until_it_is_filled(
    service: Service, client: kvfs.Client
) -> None:
    """The mount stays an address; what was there is not."""
    with client.blocks(NAMESPACE) as blocks:
        keys = keys_of(3)
        put(blocks, keys)
        service.stop()
        assert service.cli("drop", str(service.data)).returncode == 0
        into = bytearray(64 * KIB)
        assert blocks.get_into(keys[:1], [into], timeout_s=0.1) == [-1]
        assert blocks.match(keys) == 0
        service.restart()
        found = blocks.get_into(keys, [bytearray(64 * KIB) for _ in keys])
        assert found in ([64 * KIB] * 3, [-1] * 3)  # on NVMe, if they were written in time
        assert put(blocks, keys_of(3)) == [True] * 3


def test_a_restart_in_the_middle_of_batches(service: Service, client: kvfs.Client) -> None:
    """Threads that put and get go on through two kills; every byte that is read is right."""
    stop, wrong = threading.Event(), list[str]()
    done = {"put": 0, "hit": 0}

    def work(blocks: kvfs.Blocks) -> None:
        into = [bytearray(64 * KIB) for _ in range(8)]
        while not stop.is_set():
            keys = keys_of(8)
            try:
                blocks.put(keys, [data_of(key) for key in keys])
                done["put"] += 8
            except errors.KvfsError as error:
                wrong.append(f"put: {error!r}")
            for key, size, found in zip(keys, blocks.get_into(keys, into), into, strict=True):
                if size >= 0 and (size != 64 * KIB or found != data_of(key)):
                    wrong.append(f"{key.hex()}: {size} bytes")
                done["hit"] += size >= 0

    with client.blocks(NAMESPACE) as blocks:
        threads = [threading.Thread(target=work, args=[blocks]) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                before = done["hit"]
                eventually(lambda before=before: done["hit"] > before + 100, "work goes on")
                service.kill()
                service.restart()
            before = done["put"]
            eventually(lambda: done["put"] > before + 100, "work goes on")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not wrong, wrong[:5]


def test_futures_end_when_the_service_does(service: Service, client: kvfs.Client) -> None:
    with client.blocks(NAMESPACE) as blocks:
        keys = keys_of(4)
        put(blocks, keys)
        sink(client, names_of(blocks, keys))
        service.kill()
        into = [bytearray(64 * KIB) for _ in keys]
        read: Future[list[int]] = blocks.get_into_async(keys, into, timeout_s=1.0)
        assert read.result(WAIT_S) == [-1] * 4
        with pytest.raises((errors.SessionClosed, errors.DeadlinePassed)):
            blocks.prefetch(keys, timeout_s=1.0).result(WAIT_S)
        service.restart()
        assert blocks.prefetch(keys).result(WAIT_S) == 4
