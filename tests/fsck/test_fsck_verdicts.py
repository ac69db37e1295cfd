"""What `kvfs fsck` says in the end, in its report and by its exit code: clean, repaired, durable objects lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import trio

from kvfs.cli.offline.fsck_command import Exit
from kvfs.errors import NotFound
from kvfs.formats import RecordType
from tests.support.checked_stores import CACHE, DURABLE, NVME, find_record, flip, fsck, live, serve
from tests.support.nvme_stores import data_of, put, read, running, until_written
from tests.support.seeds import SEED
from tests.support.service import ROOT, run_kvfs
from tiers.model.objects import Name, ObjectInfo


@pytest.mark.seeded
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_a_random_life_leaves_nothing_to_report(fast_path: Path, seed: int, killed: bool) -> None:
    life = live(fast_path, seed, killed=killed)
    found = fsck(fast_path)
    assert found["problems"] == []
    assert found["exit_code"] == Exit.CLEAN
    assert found["records"] > 50
    there, _ = serve(fast_path, life)
    assert {name for name in life.names if name.bucket == DURABLE} <= there.keys()


def test_what_a_stop_or_a_closed_file_writes_to_the_index_alone_is_no_problem(fast_path: Path) -> None:
    """The times of a bucket, and a row that is retired, which a start drops."""

    async def work(*, ends: bool) -> None:
        async with running(fast_path, nvme_bytes=NVME) as store:
            if not ends:
                store.create_bucket(CACHE, uid=0, gid=0)
                put(store, Name(CACHE, b"a"), 5_000)
                return
            put(store, Name(CACHE, b"b"), 5_000)
            info = store.lookup(Name(CACHE, b"a"))
            assert isinstance(info, ObjectInfo)
            await store.journal.persist(info.object_id)
            store.retire(Name(CACHE, b"a"))

    for ends in (False, True):
        trio.run(lambda: work(ends=ends))  # noqa: B023 run at once
        found = fsck(fast_path, repair=False)
        assert found["exit_code"] == Exit.CLEAN, found["problems"]


# --- what durable objects cost -------------------------------------------------------------------------------
async def _one_durable(path: Path, name: Name, *, keep: bool) -> int:
    async with running(path, nvme_bytes=NVME, keep=keep) as store:
        store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
        store.create_bucket(CACHE, uid=0, gid=0)
        info = put(store, name, 50_000)
        put(store, Name(CACHE, b"other"), 10_000)
        await store.journal.settle()
        return info.object_id


def test_a_damaged_durable_object_is_said_to_be_lost_once(fast_path: Path) -> None:
    name = Name(DURABLE, b"dear")
    object_id = trio.run(lambda: _one_durable(fast_path, name, keep=False))
    file, at = find_record(fast_path, RecordType.DATA, object_id)
    flip(file, at + 4096 + 30_000)
    left = fsck(fast_path, repair=False)
    assert left["exit_code"] == Exit.DURABLE_LOST
    [problem] = left["problems"]
    assert not problem["repaired"]
    assert problem["where"] == f"segment {file.name} at {at}"
    assert "durable/dear" in problem["consequence"]
    assert "the durable object is lost" in problem["consequence"]
    assert fsck(fast_path)["exit_code"] == Exit.DURABLE_LOST
    assert fsck(fast_path)["exit_code"] == Exit.CLEAN

    async def look() -> None:
        async with running(fast_path, nvme_bytes=NVME) as store:
            with pytest.raises(NotFound):
                store.lookup(name)
            assert isinstance(store.lookup(Name(CACHE, b"other")), ObjectInfo)

    trio.run(look)


def test_what_dram_has_is_not_lost(fast_path: Path) -> None:
    name = Name(DURABLE, b"dear")
    object_id = trio.run(lambda: _one_durable(fast_path, name, keep=True))
    file, at = find_record(fast_path, RecordType.DATA, object_id)
    flip(file, at + 4096 + 30_000)
    assert fsck(fast_path)["exit_code"] == Exit.REPAIRED
    assert fsck(fast_path)["exit_code"] == Exit.CLEAN

    async def look() -> None:
        async with running(fast_path, nvme_bytes=NVME) as store:
            assert await read(store, name) == data_of(name, 50_000)
            await until_written(store, 2)

    trio.run(look)
    shutil.rmtree(fast_path / "dram", ignore_errors=True)
    shutil.rmtree(fast_path / "index")
    trio.run(look)


# --- the command ---------------------------------------------------------------------------------------------
def test_the_exit_codes_are_those_of_the_help(fast_path: Path) -> None:
    data = fast_path / "data"
    object_id = trio.run(lambda: _one_durable(data, Name(DURABLE, b"dear"), keep=False))

    def run(*arguments: str) -> tuple[int, str]:
        done = run_kvfs("fsck", "--data", str(data), *arguments)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    code, text = run()
    assert (code, text.splitlines()[-1]) == (0, "clean")
    other, at = find_record(data, RecordType.DATA)
    flip(other, at + 4096 + 100)
    code, text = run("--check-only")
    assert code == Exit.LEFT, text
    assert (
        f"segment {other.name} at {at}: its payload does not match its checksum; extent 0 of object" in text
    )
    assert run()[0] == Exit.REPAIRED
    assert run()[0] == Exit.CLEAN
    dear, at = find_record(data, RecordType.DATA, object_id)
    flip(dear, at + 4096 + 100)
    code, text = run("--json")
    assert code == Exit.DURABLE_LOST
    assert json.loads(text)["problems"][0]["cost"] == "durable"
    assert run()[0] == Exit.CLEAN
    assert run_kvfs("fsck", "--nonsense").returncode == 2
    shown = run_kvfs("fsck", "--help").stdout
    documented = (ROOT / "docs" / "fsck.md").read_text()
    for each in Exit:
        assert f"{each.value} " in shown
        assert f"\n| {each.value} | " in documented


def test_it_cannot_run_beside_a_service_or_elsewhere(fast_path: Path) -> None:
    nothing = run_kvfs("fsck", "--data", str(fast_path / "nothing"))
    assert nothing.returncode == Exit.CANNOT_RUN
    assert "not a data directory" in nothing.stderr
    assert not (fast_path / "nothing").exists()

    async def beside() -> None:
        async with running(fast_path, nvme_bytes=NVME):
            done = await trio.to_thread.run_sync(lambda: run_kvfs("fsck", "--data", str(fast_path)))
            assert done.returncode == Exit.CANNOT_RUN
            assert f"process {os.getpid()}" in done.stderr

    trio.run(beside)
    (fast_path / "config.toml").write_text(
        f'[store]\ndata = "{fast_path}"\n[nvme]\npath = "{fast_path}/moved"\n'
    )
    trio.run(lambda: _one_durable(fast_path, Name(DURABLE, b"x"), keep=False))
    (fast_path / "nvme").rename(fast_path / "moved")
    elsewhere = run_kvfs("fsck", "--data", str(fast_path))
    assert elsewhere.returncode == Exit.CANNOT_RUN
    assert "no segments there" in elsewhere.stderr
    assert run_kvfs("fsck", "--config", str(fast_path / "config.toml")).returncode == Exit.CLEAN
    (fast_path / "format.json").write_text('{"format": 999}')
    other = run_kvfs("fsck", "--data", str(fast_path))
    assert other.returncode == Exit.CANNOT_RUN
    assert other.stderr.count("\n") == 1
