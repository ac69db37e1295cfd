"""Drafts of objects larger than DRAM takes: each is a bytearray, and what is durable of it is there after a crash."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tiers.nvme.large_buffers
from kvfs import limits
from kvfs.errors import NotFound
from kvfs.limits import MIB
from tests.support.large_objects import EXTENT, NAME, all_is_given_back, content, info_of, read, write
from tests.support.nvme_stores import put, running
from tests.support.seeds import rounds
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name
from tiers.nvme.large_draft import LargeDraft
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

# --- against a bytearray ----------------------------------------------------------------------------------

LIMIT = EXTENT * 5
offsets = st.one_of(
    st.just(0),
    st.integers(0, LIMIT),
    st.builds(lambda n, d: max(n * EXTENT + d, 0), st.integers(0, 5), st.integers(-3, 3)),
)
writes = st.tuples(st.just("write"), offsets, st.one_of(st.integers(1, 5000), st.integers(1, EXTENT * 2)))
steps = st.one_of(
    writes,
    writes,
    st.tuples(st.just("truncate"), offsets, st.just(0)),
    st.tuples(st.just("read"), offsets, st.integers(0, EXTENT * 2)),
    st.tuples(
        st.sampled_from(["flush", "persist", "seal", "rewrite", "abort", "churn"]), st.just(0), st.just(0)
    ),
)


@dataclass
class Model:
    """What a draft and its name should hold."""

    store: Store
    seed: int
    draft: LargeDraft
    now: bytearray = field(default_factory=bytearray)
    sealed: bytes | None = None
    persisted: bytes | None = None
    step: int = 0

    async def run(self, what: str, offset: int, size: int) -> None:
        self.step += 1
        await getattr(self, "_" + what)(offset, size)

    async def _write(self, offset: int, size: int) -> None:
        data = content(self.seed + self.step, size)
        await self.draft.write(offset, data)
        if len(self.now) < offset:
            self.now += bytes(offset - len(self.now))
        self.now[offset : offset + size] = data

    async def _truncate(self, size_bytes: int, _: int) -> None:
        await self.draft.truncate(size_bytes)
        del self.now[size_bytes:]
        self.now += bytes(size_bytes - len(self.now))

    async def _read(self, offset: int, size: int) -> None:
        assert await self.draft.read(offset, size) == self.now[offset : offset + size]

    async def _flush(self, *_: int) -> None:
        await self.draft.flush()
        assert self.draft.is_written

    async def _persist(self, *_: int) -> None:
        await self.store.persist_large(self.draft, NAME, Attributes())
        self.persisted = bytes(self.now)

    async def _seal(self, *_: int) -> None:
        await self.draft.flush()
        assert self.store.seal_large(self.draft, NAME, Attributes()).size_bytes == len(self.now)
        self._close()
        self.sealed, self.persisted = bytes(self.now), None
        assert await read(self.store) == self.sealed
        self.draft, self.now = self.store.begin_large(b"b", uid=0), bytearray()

    async def _rewrite(self, *_: int) -> None:
        """A draft of what is sealed, which stays as it is."""
        await self._abort()
        if self.sealed is not None:
            self.draft.close()
            self.draft = self.store.begin_large(b"b", uid=0, base=info_of(self.store))
            self.now = bytearray(self.sealed)

    async def _abort(self, *_: int) -> None:
        self._close()
        self.persisted = None
        self.draft, self.now = self.store.begin_large(b"b", uid=0), bytearray()

    async def _churn(self, *_: int) -> None:
        """Have segments reclaimed."""
        for number in range(4):
            await write(self.store, Name(b"b", b"churn"), content(number, 2 * MIB))

    def _close(self) -> None:
        self.store.abort_large(self.draft)


@settings(
    max_examples=rounds(30, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(  # cut off and grown again over what is rewritten: zeros
    1,
    [
        ("write", 0, EXTENT * 2),
        ("seal", 0, 0),
        ("rewrite", 0, 0),
        ("truncate", 9, 0),
        ("truncate", EXTENT + 700, 0),
    ],
    False,
)
@example(  # cut off in the middle of what is in memory, and grown again: zeros
    3, [("write", 0, 5000), ("truncate", 9, 0), ("truncate", 5000, 0)], False
)
@example(  # the same of what is on the device
    4, [("write", 0, EXTENT), ("flush", 0, 0), ("truncate", 9, 0), ("truncate", EXTENT, 0)], False
)
@example(  # grown since it was made durable: as large as it was then
    2, [("write", 0, 5000), ("persist", 0, 0), ("write", 5000, EXTENT * 2), ("flush", 0, 0)], True
)
@given(seed=st.integers(0, 1000), plan=st.lists(steps, min_size=8, max_size=40), crash=st.booleans())
def test_a_draft_is_a_bytearray(
    tmp_path_factory: pytest.TempPathFactory, seed: int, plan: list[tuple[str, int, int]], crash: bool
) -> None:
    trio.run(_against_a_bytearray, tmp_path_factory.mktemp("store"), seed, plan, crash)


async def _against_a_bytearray(path: Path, seed: int, plan: list[tuple[str, int, int]], crash: bool) -> None:
    """With few buffers, which hold what somebody else has left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LARGE_DIRTY_EXTENTS", 3)
        patch.setattr(
            tiers.nvme.large_buffers, "extent_memory", lambda size: memoryview(bytearray(b"\xaa" * size))
        )
        await _run_plan(path, seed, plan, crash)


async def _run_plan(path: Path, seed: int, plan: list[tuple[str, int, int]], crash: bool) -> None:
    device = thread_device()
    store = await start_store(
        StoreOptions(
            path,
            dram_bytes=16 * MIB,
            backing="directory",
            nvme=NvmeOptions(device, 24 * MIB, segment_bytes=MIB),
        )
    )
    store.create_bucket(b"b", uid=0, gid=0, durable=True, large=True)
    model = Model(store, seed, store.begin_large(b"b", uid=0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for step in plan:
            await model.run(*step)
        await store.journal.settle()
        assert await model.draft.read(0, LIMIT * 2) == model.now
        if not crash:
            store.abort_large(model.draft)
            model.persisted = None
            await store.journal.settle()
            all_is_given_back(store)
        nursery.cancel_scope.cancel()
    store.close(keep=True)  # without `finish`: what was not written is lost, as in a crash
    await device.aclose()
    shutil.rmtree(path / "index")
    async with running(path, nvme_bytes=24 * MIB, dram_bytes=16 * MIB) as store:
        expected = model.sealed if model.persisted is None else model.persisted
        if expected is None:
            with pytest.raises(NotFound):
                store.lookup(NAME)
        elif model.persisted is None:
            assert await read(store) == expected
        else:  # written to since then: of what was not persisted any part may be there
            assert info_of(store).size_bytes == len(expected)
            assert len(await read(store)) == len(expected)
        all_is_given_back(store)
    shutil.rmtree(path)


# --- what is durable of a draft ---------------------------------------------------------------------------
OTHER = Name(b"b", b"other")
SYNCED = content(1, EXTENT * 2 + 5)


@asynccontextmanager
async def crashing(
    path: Path, *, durable: bool = False, admits_all: bool = True
) -> AsyncIterator[tuple[Store, LargeDraft]]:
    """A store with a draft that is durable as NAME and was written to since, which ends without its clean stop."""
    device = thread_device()
    store = await start_store(
        StoreOptions(
            path,
            dram_bytes=16 * MIB,
            backing="directory",
            nvme=NvmeOptions(device, 24 * MIB, segment_bytes=MIB),
        )
    )
    store.create_bucket(b"b", uid=0, gid=0, durable=durable, admits_all=admits_all, large=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        draft = store.begin_large(b"b", uid=0)
        yield store, draft
        nursery.cancel_scope.cancel()
    store.close(keep=True)
    await device.aclose()


async def make_durable(store: Store, draft: LargeDraft) -> None:
    await draft.write(0, SYNCED)
    await store.persist_large(draft, NAME, Attributes())
    await draft.write(len(SYNCED), content(2, EXTENT))
    await draft.flush()


def lose_index(path: Path, lost: bool) -> None:
    if lost:
        shutil.rmtree(path / "index")


@pytest.mark.parametrize("lost", [False, True])
async def test_what_is_durable_of_a_draft_moves_with_its_name(tmp_path: Path, lost: bool) -> None:
    async with crashing(tmp_path) as (store, draft):
        await make_durable(store, draft)
        store.rename_large(draft, OTHER, Attributes())
        await store.journal.settle()
    lose_index(tmp_path, lost)
    async with running(tmp_path, nvme_bytes=24 * MIB) as store:
        assert await read(store, OTHER) == SYNCED
        with pytest.raises(NotFound):
            store.lookup(NAME)


@pytest.mark.parametrize("lost", [False, True])
async def test_what_is_durable_of_a_draft_ends_with_its_name(tmp_path: Path, lost: bool) -> None:
    async with crashing(tmp_path) as (store, draft):
        await make_durable(store, draft)
        store.journal.removed(draft.object_id)
        await store.journal.settle()
        await draft.write(0, b"x")  # it is open all the same
        await draft.flush()
        assert await draft.read(0, len(SYNCED)) == b"x" + SYNCED[1:]
    lose_index(tmp_path, lost)
    async with running(tmp_path, nvme_bytes=24 * MIB) as store:
        with pytest.raises(NotFound):
            store.lookup(NAME)
        all_is_given_back(store)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("bucket", [{}, {"durable": True}, {"admits_all": False}])
async def test_what_is_durable_of_a_draft_counts_before_what_came_under_its_name_earlier(
    tmp_path: Path, lost: bool, bucket: dict[str, bool]
) -> None:
    """Though the draft is older, and also where only DRAM and the index have what came."""
    async with crashing(tmp_path, **bucket) as (store, draft):
        if bucket.get("admits_all", True):
            await write(store, NAME, content(3, EXTENT))
        else:
            put(store, NAME, EXTENT)
        await store.journal.settle()
        await make_durable(store, draft)
    lose_index(tmp_path, lost)
    async with running(tmp_path, nvme_bytes=24 * MIB) as store:
        assert await read(store) == SYNCED
