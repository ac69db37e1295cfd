"""What a start takes over from DRAM: slots that nobody can write and whose payload holds, each with all it had."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from kvfs import limits
from kvfs.errors import NotFound
from kvfs.index.environment import NameEnvironment
from kvfs.index.names import NameIndex
from kvfs.system import linux
from tests.support.damage import flip
from tests.support.door import need_mount
from tests.support.killed_stores import crash, filled, names_of, open_again, slot_file
from tests.support.posix import pattern
from tests.support.processes import Helper
from tests.support.seeds import SEED
from tests.support.store_writer import UNIT
from tests.support.stores import BOUND, BUCKET, draft_of, keys, put, put_block, read, verified
from tests.support.waits import WAIT_S
from tiers.dram import tmpfs
from tiers.model.objects import Attributes, Directory, Name, ObjectInfo
from tiers.recovery.startup import Startup


@pytest.mark.parametrize("clean", [True, False])
def test_everything_is_as_it_was(data: Path, backing: str, clean: bool) -> None:
    with open_again(data, backing=backing) as store:
        before = store.seal(
            draft_of(store, b"first" * 1000, uid=5),
            Name(BUCKET, b"a/b"),
            Attributes(0o640, 5, 6, 7, ino=99, user_metadata=b"meta"),
        )
        for _ in range(3):
            store.touch(before.key)
        block = put_block(store, b"\7" * 16, b"block", parent=b"\6" * 16)
        store.set_attributes(Name(BOUND, b"kv/07/" + b"07" * 16), pinned=True)
        store.touch(block.key)
        store.make_directory(Name(BUCKET, b"empty/"), Attributes(mode=0o711))
        ids = {row.name: row.bucket_id for row in store.buckets()}
        if clean:
            store.close(keep=True)
        else:
            crash(store)
        with open_again(data, backing=backing) as again:
            found = again.lookup(Name(BUCKET, b"a/b"))
            assert isinstance(found, ObjectInfo)
            assert (found.extent, found.tier) == (None, "dram")
            found = verified(again, found)
            assert found == ObjectInfo(
                **{**{name: getattr(before, name) for name in before.__slots__}, "hits": 3}
            )
            assert read(again, found) == b"first" * 1000
            here = again.lookup_block(b"\7" * 16)
            assert (here.hits, here.pinned, here.size_bytes, here.mtime_ns) == (1, True, 5, block.mtime_ns)
            assert again.match(b"\7" * 16) == 1
            assert {row.name: row.bucket_id for row in again.buckets()} == ids
            assert isinstance(again.lookup(Name(BUCKET, b"empty/")), Directory)
            assert put(again, b"next", b"next").object_id > block.object_id


def test_a_slot_that_somebody_can_write_is_not_taken_over(data: Path, backing: str) -> None:
    with open_again(data, backing=backing) as store:
        for key in (b"kept", b"written"):
            put(store, key, b"sealed" * 1000)
        writer = os.open(slot_file(store, b"written"), os.O_RDWR)
        draft = store.reserve(uid=9)
        drafter = store.open_draft(draft)
        os.write(drafter, b"draft" * 1000)
        crash(store)
        with open_again(data, backing=backing) as again:
            assert names_of(again) == {b"kept": b"sealed" * 1000}
            assert again.dram.usage().held_bytes == 2 * 8192
            os.pwrite(writer, b"x" * 6000, 0)
            os.pwrite(drafter, b"x" * 6000, 0)
            refilled = {b"%d" % i: bytes([i]) * 6000 for i in range(20)}
            for key, payload in refilled.items():
                put(again, key, payload)
            os.pwrite(writer, b"y" * 6000, 0)
            assert names_of(again) == {b"kept": b"sealed" * 1000, **refilled}
            os.close(writer)
            os.close(drafter)
            again.maintain()
            assert again.dram.usage().held_bytes == 0


WRITER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mapping = mmap.mmap(fd, 0)
os.close(fd)
print("mapped", flush=True)
sys.stdin.readline()
"""


def test_nor_one_that_another_process_has_mapped_to_write(data: Path, backing: str) -> None:
    with open_again(data, backing=backing) as store:
        put(store, b"key", b"sealed" * 1000)
        with Helper(WRITER, slot_file(store, b"key")) as writer:
            writer.expect("mapped")
            crash(store)
            with open_again(data, backing=backing) as again:
                assert names_of(again) == {}


def test_readers_keep_an_adopted_slot_and_one_that_is_not(data: Path, backing: str) -> None:
    with open_again(data, backing=backing) as store:
        put(store, b"kept", b"kept" * 2000)
        put(store, b"lost", b"lost" * 2000)
        held = [store.open_read(store.lookup(Name(BUCKET, key)), uid=0) for key in (b"kept", b"lost")]  # type: ignore[arg-type]
        crash(store)
        NameIndex.open(data / "index").remove(BUCKET, b"lost")
        with open_again(data, backing=backing) as again:
            info = again.lookup(Name(BUCKET, b"kept"))
            assert isinstance(info, ObjectInfo)
            info = verified(again, info)
            assert info.extent is not None
            assert again.dram.held(info.extent)
            assert again.dram.usage().held_bytes == 8192
            assert [os.pread(fd, 9000, 0) for fd in held] == [b"kept" * 2000, b"lost" * 2000]
            os.close(held[0])
            assert not again.dram.held(info.extent)
            os.close(held[1])


def test_more_holders_than_descriptors_are_swept_later(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_again(data)
    held = []
    for i in range(6):
        put(store, b"%d" % i, bytes([i]) * 5000)
        held.append(store.open_read(store.lookup(Name(BUCKET, b"%d" % i)), uid=0))  # type: ignore[arg-type]
    crash(store)
    (data / "index/data.mdb").unlink()
    monkeypatch.setattr(limits, "MAX_HELD_SLOTS", 2)
    with open_again(data) as again:
        assert again.dram.usage().held_bytes == 6 * 8192
        assert [os.pread(fd, 1, 4999) for fd in held] == [bytes([i]) for i in range(6)]
        for fd in held:
            os.close(fd)
        again.maintain()
        assert again.dram.usage().held_bytes == 0
        for i in range(20):
            put(again, b"%d" % i, b"new" * 1000)
        assert set(names_of(again).values()) == {b"new" * 1000}


def test_what_has_no_checksum_yet_is_not_taken_over(data: Path) -> None:
    store = open_again(data)
    put(store, b"early", b"early")
    store.dram.checksums.wait(WAIT_S)
    store.dram.checksums.thread.close()
    put(store, b"late", b"late")
    crash(store, wait=False)
    with open_again(data) as again:
        assert names_of(again) == {b"early": b"early"}


def test_a_clean_stop_waits_for_checksums_and_leaves_no_drafts(data: Path, backing: str) -> None:
    store = open_again(data, backing=backing)
    for i in range(50):
        put(store, b"%d" % i, bytes([i]) * 200_000)
    draft_of(store, b"draft" * 1000)
    directory = store.dram.directory
    store.close(keep=True)
    assert sum(1 for file in directory.iterdir() if file.stat().st_size) == 50
    with open_again(data, backing=backing) as again:
        assert len(names_of(again)) == 50


@pytest.mark.seeded
def test_a_flipped_bit_of_a_payload_is_a_miss(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(SEED)
    with open_again(data) as store:
        contents = {b"%d" % i: pattern(i, 1 + chance.randrange(300_000)) for i in range(20)}
        files = {}
        for key, payload in contents.items():
            put(store, key, payload)
            files[key] = slot_file(store, key)
        crash(store)
        for key in chance.sample(sorted(contents), 5):
            flip(files[key], chance.randrange(len(contents.pop(key))), chance)
        with open_again(data) as again:
            assert names_of(again) == contents
            assert caplog.text.count("does not match its checksum") == 5


@pytest.mark.parametrize("size", ["longer", "shorter", "gone"])
def test_a_payload_of_another_size_is_a_miss(data: Path, size: str) -> None:
    with open_again(data) as store:
        put(store, b"right", b"right")
        put(store, b"wrong", b"wrong")
        file = slot_file(store, b"wrong")
        crash(store)
        if size == "gone":
            file.unlink()
        else:
            os.truncate(file, 6 if size == "longer" else 4)
        with open_again(data) as again:
            assert names_of(again) == {b"right": b"right"}


def test_a_unit_that_lost_a_file_goes_with_its_directory(data: Path) -> None:
    whole, unit = b"f" * 32 + b"/", UNIT.encode()
    store = open_again(data)
    for directory in (whole, unit):
        store.make_directory(Name(BUCKET, directory), Attributes())
        for i in range(3):
            put(store, directory + b"%d" % i, b"data" * 100)
    file = slot_file(store, unit + b"1")
    crash(store)
    flip(file, 7, random.Random(0))
    with open_again(data) as again:
        damaged = again.lookup(Name(BUCKET, unit + b"1"))
        assert isinstance(damaged, ObjectInfo)
        with pytest.raises(NotFound):
            read(again, damaged)
        assert keys(again) == [whole, *(whole + b"%d" % i for i in range(3))]
        assert again.find_path(Name(BUCKET, unit[:-1])) is None


def test_another_backing_drops_what_the_first_kept(data: Path) -> None:
    need_mount()
    for first, second in (("tmpfs", "directory"), ("directory", "tmpfs")):
        store = open_again(data, backing=first)
        put(store, b"key", b"data")
        store.close(keep=True)
        with open_again(data, backing=second) as again:
            assert again.dram.backing == second
            assert names_of(again) == {}
        assert not tmpfs.is_mounted(data / "dram")
        assert list((data / "dram").iterdir()) == []


@pytest.mark.parametrize("clean", [True, False])
def test_after_a_boot_only_a_clean_stop_is_believed(
    data: Path, clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a plain directory, whose files are still there."""
    store = open_again(data)
    put(store, b"key", b"data")
    if clean:
        store.close(keep=True)
    else:
        crash(store)
    monkeypatch.setattr(linux, "boot_id", lambda: "another boot")
    with open_again(data) as again:
        assert names_of(again) == ({b"key": b"data"} if clean else {})


def test_after_a_boot_without_the_tmpfs_no_name_is_without_bytes(data: Path) -> None:
    need_mount()
    store = open_again(data, backing="tmpfs")
    put(store, b"key", b"data")
    put(store, UNIT.encode() + b"0", b"data")
    store.mark_directory(Name(BUCKET, UNIT.encode()), Attributes())
    store.make_directory(Name(BUCKET, b"kept/"), Attributes())
    store.close(keep=True)
    tmpfs.unmount(data / "dram")
    with open_again(data, backing="tmpfs") as again:
        assert keys(again) == [b"kept/"]
        assert [key for _, key, _ in again.names.rows()] == [b"kept/"]


# --- starts that do not end ---------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["begin", "put_meta", "begun", "choose", "build"])
def test_a_start_that_is_killed_costs_nothing(
    data: Path, backing: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each step of a start."""
    store = open_again(data, backing=backing)
    put(store, b"key", b"data")
    crash(store)
    from tiers.data_dir import Home

    owner: Any = {"put_meta": NameEnvironment, "choose": Startup, "build": Startup}.get(step, Home)
    real = getattr(owner, step)
    for after in (False, True):
        monkeypatch.setattr(owner, step, dying(real, after))
        child = os.fork()
        if child == 0:
            try:
                open_again(data, backing=backing)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 9
        monkeypatch.undo()
        with monkeypatch.context():
            again = open_again(data, backing=backing)
            assert names_of(again) == {b"key": b"data"}
            crash(again)


def dying(real: Any, after: bool) -> Any:
    def step(*values: Any, **named: Any) -> None:
        if after:
            real(*values, **named)
        os.kill(os.getpid(), 9)

    return step


def test_a_start_that_fails_keeps_what_there_is(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = filled(data)
    with monkeypatch.context() as patched:
        patched.setattr(Startup, "build", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_again(data)
    with open_again(data) as store:
        assert names_of(store) == contents
