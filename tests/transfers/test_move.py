"""Moves of a machine's blocks to another one, with both in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.shared.table import TIER_DRAM, TIER_UNVERIFIED
from kvfs.config.settings import ClusterSettings
from kvfs.errors import InvalidRequest
from kvfs.keys import block_name
from kvfs.namespaces import Namespace
from tests.recovery.test_unverified import file_of, flip
from tests.support.directory_server import directed_machines, directory_server, needs_server
from tests.support.machines import Machine, digest_of, machine, machines, onto_nvme, payload_of
from tests.support.rogue_peers import receive, serving, welcome
from tests.support.seeds import rounds
from tests.support.stores import BOUND, NAMESPACE, draft_of
from tests.support.waits import WAIT_S, until
from tiers.model.objects import Bucket, Name
from tiers.remote.order_poller import OrderPoller
from tiers.remote.pull_wire import ASK, HEAD_BYTES, Pull, decode_head, encode_pulled
from tiers.store.store import Store
from tiers.transfers import block_batches, moving
from tiers.transfers.other_machines import BROUGHT, THERE, Pulled
from tiers.transfers.progress import Progress

OTHER = Namespace(**{**NAMESPACE.as_mapping(), "model": "another"})


async def moved(asker: Machine, to: str, buckets: Sequence[Bucket] = ()) -> dict[str, Any]:
    await asker.cluster.move(to, buckets or [asker.bucket])
    return await asker.ended("move")


def here(asker: Machine) -> set[bytes]:
    return set(asker.store.catalog.blocks.digests())


def before_each_answer(at: Machine, act: Callable[[], object]) -> None:
    """Have something happen while a machine answers what it has."""
    pulls = at.cluster._serving._pulls  # type: ignore[union-attr]
    carry_out = pulls.carry_out

    async def and_act(pull: Pull, store_id: bytes) -> Pulled:
        pulled = await carry_out(pull, store_id)
        if pull.kind == ASK:
            act()
        return pulled

    pulls.carry_out = and_act  # type: ignore[method-assign]


def put_under(at: Machine, bucket: bytes, number: int, parent: bytes | None) -> bytes:
    draft = draft_of(at.store, payload_of(number, 4096))
    at.store.seal_block(draft, bucket, digest_of(number), parent=parent, uid=0)
    return digest_of(number)


def pin(at: Machine, digest: bytes) -> None:
    at.store.set_attributes(Name(BOUND, block_name(digest)), pinned=True)


async def test_what_has_come_whole_goes_from_here(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 201))
        second.put([3])
        found = await moved(first, second.address)
        assert (found["state"], found["blocks"], found["there_blocks"]) == ("done", 200, 1)
        assert found["said"] == "200 blocks went from here; 0 stay, of which 0 are not there"
        assert found["removed_blocks"] == 200
        assert here(first) == set()
        assert all(second.read(digest) == payload_of(n, 4096) for n, digest in enumerate(digests, 1))
        assert first.store.usage()["blocks"] == 0
        assert (first.drafts(), second.drafts()) == (0, 0)
        assert await first.fetch(digests[:10]) == 10  # as any block of another machine


async def test_what_is_on_nvme_goes_from_there_too(tmp_path: Path) -> None:
    async with onto_nvme(tmp_path) as (target, source):
        digests = source.put(range(1, 11))
        await until(lambda: source.store.journal.usage()[0]["objects_written"] == 10)
        assert (await moved(source, target.address))["state"] == "done"
        assert (here(source), here(target)) == (set(), set(digests))
        assert source.store.journal.usage()[0]["objects"] == 0


async def test_blocks_of_durable_buckets_never_move(tmp_path: Path) -> None:
    async with onto_nvme(tmp_path, durable=True) as (target, source):
        kept = source.put(range(1, 4))
        with pytest.raises(InvalidRequest, match="durable"):
            await source.cluster.move(target.address, [source.bucket])
        source.store.create_bucket(b"cache", uid=0, gid=0, namespace=NAMESPACE)
        draft = draft_of(source.store, b"a cache's")
        source.store.seal_block(draft, b"cache", digest_of(9), parent=None, uid=0)
        found = await moved(source, target.address, source.store.buckets())
        assert (found["state"], found["of_blocks"]) == ("done", 1)
        assert here(source) == set(kept)


async def test_what_is_pinned_stays_with_all_that_it_follows(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 101))
        pin(first, digests[49])
        found = await moved(first, second.address)
        assert found["said"] == "50 blocks went from here; 50 stay, of which 0 are not there"
        assert here(first) == set(digests[:50])


async def test_blocks_of_other_buckets_keep_what_they_follow(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        first.store.create_bucket(b"other", uid=0, gid=0, namespace=OTHER)
        second.store.create_bucket(b"other", uid=0, gid=0, namespace=OTHER)
        digests = first.put(range(1, 11))
        window = digest_of(1000)
        draft = draft_of(first.store, b"a window's")
        first.store.seal_block(draft, b"other", window, parent=digests[4], uid=0)
        await moved(first, second.address)
        assert here(first) == {*digests[:5], window}
        await moved(first, second.address, first.store.buckets())
        assert here(first) == set()
        assert second.read(window) == b"a window's"


async def test_a_block_that_comes_meanwhile_keeps_what_it_follows(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 11))
        before_each_answer(second, lambda: put_under(first, BOUND, 500, digests[6]))
        assert (await moved(first, second.address))["state"] == "done"
        assert here(first) == {*digests[:7], digest_of(500)}


async def test_a_child_that_a_session_has_sealed_keeps_its_parent(tmp_path: Path) -> None:
    class Seals:
        """As what sessions seal comes into the catalog once it is asked for."""

        def catch_up(self) -> None:
            if digests[-1] not in first.store.catalog.blocks and digest_of(500) not in here(first):
                first.store.catalog.native_seals = before
                put_under(first, BOUND, 500, digests[-2])
                first.store.catalog.native_seals = self  # type: ignore[assignment]

    async with machines(tmp_path, 2) as (first, second):
        digests, before = first.put(range(1, 11)), first.store.catalog.native_seals
        first.store.catalog.native_seals = Seals()  # type: ignore[assignment]
        assert (await moved(first, second.address))["state"] == "done"
        assert here(first) == {*digests[:-1], digest_of(500)}


async def test_a_block_that_a_durable_bucket_has_taken_over_stays(tmp_path: Path) -> None:
    async with onto_nvme(tmp_path) as (target, source):
        digests = source.put(range(1, 4))
        source.store.create_bucket(b"durable", uid=0, gid=0, namespace=NAMESPACE, durable=True)
        before_each_answer(target, lambda: put_under(source, b"durable", 2, digests[0]))
        assert (await moved(source, target.address))["state"] == "done"
        assert here(source) == set(digests[:2])


async def test_what_the_other_machine_has_evicted_since_stays(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 11))
        pulls = second.cluster._serving._pulls  # type: ignore[union-attr]
        carry_out = pulls.carry_out

        async def evict_and_answer(pull: Pull, store_id: bytes) -> Pulled:
            if pull.kind == ASK:
                second.store.remove_block(digests[-1])
            return await carry_out(pull, store_id)

        pulls.carry_out = evict_and_answer  # type: ignore[method-assign]
        found = await moved(first, second.address)
        assert found["said"] == "0 blocks went from here; 10 stay, of which 1 are not there"
        assert here(first) == set(digests)  # the last of a chain, which keeps all before it


async def test_what_the_other_machine_has_not_verified_is_hashed_there_first(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 11))
        second.put(range(1, 11))
        second.store.dram.checksums.wait(WAIT_S)
        for digest in digests:
            entry = second.store.table.get(digest)
            assert entry is not None
            second.store._residency.amend(digest, entry, tiers=entry.tiers & ~TIER_DRAM | TIER_UNVERIFIED)
        flip(file_of(second.store, digests[-1]))
        found = await moved(first, second.address)
        assert (found["state"], found["there_blocks"]) == ("done", 9)
        assert here(first) == set()
        assert second.read(digests[-1]) == payload_of(10, 4096)  # which was brought


async def test_what_came_from_another_machine_goes_on_whole(tmp_path: Path) -> None:
    """A fetch seals blocks as they come, children before their parents too."""
    async with machines(tmp_path, 3) as (first, second, third):
        digests = first.put(range(1, 201))
        for source, target in ((first, second), (second, third)):
            assert (await moved(source, target.address))["removed_blocks"] == 200
            assert here(source) == set()
        assert here(third) == set(digests)


async def test_a_child_in_the_cold_tier_alone_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machines(tmp_path, 2) as (first, second):
        before = put_under(first, BOUND, 600, digest_of(700))
        digests = [put_under(first, BOUND, 700, None), *first.put(range(1, 101))]
        cold = {before, digests[-1], put_under(first, BOUND, 500, digests[50])}

        def is_served(store: Store, digest: bytes) -> bool:
            return not (store is first.store and digest in cold) and block_batches.is_served(store, digest)

        with monkeypatch.context() as patched:
            patched.setattr(moving, "is_served", is_served)
            found = await moved(first, second.address)
        assert (found["state"], found["removed_blocks"]) == ("done", 100)
        assert here(first) == cold


@needs_server
async def test_a_drain_of_the_other_machine_does_not_count_on_what_has_just_gone(tmp_path: Path) -> None:
    with directory_server(tmp_path) as server:
        async with directed_machines(tmp_path, 3, server.url) as (first, second, third):
            digests = first.put(range(1, 201))

            async def holders_before(digests: Sequence[bytes]) -> Sequence[tuple[str, ...]] | None:
                """As a directory that has not heard of the move."""
                return [(first.address,)] * len(digests)

            await moved(first, second.address)
            second.cluster.holders = holders_before  # type: ignore[method-assign]
            await second.cluster.drain()
            assert (await second.ended("drain"))["state"] == "done"
            assert here(first) | here(third) == set(digests)


async def test_a_namespace_that_is_not_taken_stays_and_others_go(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        first.store.create_bucket(b"a-first", uid=0, gid=0, namespace=OTHER)
        draft = draft_of(first.store, b"another's")
        first.store.seal_block(draft, b"a-first", digest_of(900), parent=None, uid=0)
        first.put(range(1, 11))
        found = await moved(first, second.address, first.store.buckets())
        assert (found["state"], found["failed_blocks"]) == ("failed", 1)
        assert found["said"] == "10 blocks went from here; 1 stay, of which 1 are not there"
        assert here(first) == {digest_of(900)}


async def test_without_room_there_nothing_goes_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_BYTES", 1)
    async with machines(tmp_path, 2) as (first, second):
        for digest in second.put(range(1, 5), 3 << 20):
            pin(second, digest)
        digests = first.put([5])
        digests += first.put(range(11, 14), (4 << 20) - 4096)
        found = await moved(first, second.address)
        assert found["state"] == "failed"
        assert "no room there" in found["said"]
        assert here(first) == set(digests)


async def test_a_machine_that_goes_away_before_it_is_asked_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_PAUSE_S", 0.01)

    async def brings_and_goes(stream: trio.SocketStream) -> None:
        await welcome(stream)
        pull = decode_head(await receive(stream, HEAD_BYTES))
        if pull.kind != ASK:
            await receive(stream, pull.rest_bytes)
            await stream.send_all(encode_pulled(pull.number, Pulled(bytes([BROUGHT]) * 3)))

    async with (
        serving(brings_and_goes) as address,
        machine(tmp_path, listen="127.0.0.1:0", peers=[address]) as asker,
    ):
        digests = asker.put([1, 2, 3])
        found = await moved(asker, address)
        assert (found["state"], found["blocks"]) == ("failed", 3)
        assert found["said"].startswith(f"{address}: ")
        assert here(asker) == set(digests)


async def test_a_machine_that_answers_once_more_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_PAUSE_S", 0.01)
    asked = 0

    async def hesitates(stream: trio.SocketStream) -> None:
        nonlocal asked
        await welcome(stream)
        while True:
            pull = decode_head(await receive(stream, HEAD_BYTES))
            await receive(stream, pull.rest_bytes)
            asked += pull.kind == ASK
            if pull.kind == ASK and asked < limits.PULL_TRIES:
                return
            await stream.send_all(encode_pulled(pull.number, Pulled(bytes([THERE]) * 3)))

    async with (
        serving(hesitates) as address,
        machine(tmp_path, listen="127.0.0.1:0", peers=[address]) as asker,
    ):
        asker.put([1, 2, 3])
        assert (await moved(asker, address))["state"] == "done"
        assert here(asker) == set()


async def test_of_two_that_move_to_each_other_neither_loses_anything(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        ones = first.put(range(1, 101))
        second.put(range(1, 101))
        await first.cluster.move(second.address, [first.bucket])
        await second.cluster.move(first.address, [second.bucket])
        failed = [
            found for each in (first, second) if (found := await each.ended("move"))["state"] == "failed"
        ]
        assert failed
        assert all("it moves blocks to another machine, and takes none" in each["said"] for each in failed)
        assert here(first) | here(second) == set(ones)


async def test_a_move_takes_no_orders_meanwhile(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        first.put([1])
        conductor = ClusterSettings(
            conductor="http://127.0.0.1:1", peers=(second.address,), secret_file=tmp_path / "unread"
        )
        orders = OrderPoller(conductor, first.store, first.cluster)
        await first.cluster.move(second.address, [first.bucket])
        assert await orders.look()
        await first.ended("move")
        assert not await orders.look()  # nobody answers


@pytest.mark.parametrize("ends", ["cancelled", "gone"])
async def test_a_move_that_ends_in_the_middle_keeps_the_rest_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(limits, "TASK_LOOKS", 10)
    monkeypatch.setattr(limits, "PULL_PAUSE_S", 0.01)
    async with machines(tmp_path, 2) as (first, second):
        digests, answers = first.put(range(1, 101)), count(1)

        def end() -> None:
            if next(answers) != 4:
                return
            if ends == "cancelled":
                first.cluster._tasks.cancel("move")
            else:
                for digest in digests[:50]:
                    second.store.remove_block(digest)
                second.cluster._tasks.begin(Progress("drain"), trio.sleep_forever)  # refuses what comes

        before_each_answer(second, end)
        found = await moved(first, second.address)
        went = 30 if ends == "cancelled" else 40
        assert (found["state"], found["removed_blocks"]) == ("cancelled" if went == 30 else "failed", went)
        assert here(first) == set(digests[: 100 - went])
        if ends == "cancelled":
            assert (await moved(first, second.address))["removed_blocks"] == 70
            assert (here(first), here(second)) == (set(), set(digests))


async def test_who_cannot_be_moved_to_is_refused_at_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, _):
        with pytest.raises(InvalidRequest, match="is this machine"):
            await first.cluster.move(first.address, [first.bucket])


BLOCKS = st.tuples(st.integers(1, 30), st.integers(0, 30), st.booleans())


def left_of(blocks: list[tuple[int, int, bool]]) -> set[int]:
    """The numbers of the blocks that stay: those that are pinned, and what others follow that stay."""
    left = {number: (parent, pinned) for number, parent, pinned in blocks}
    while True:
        followed = {parent for number, (parent, _) in left.items() if parent != number}
        goes = {number for number, (_, pinned) in left.items() if not pinned and number not in followed}
        if not goes:
            return set(left)
        left = {number: block for number, block in left.items() if number not in goes}


@settings(
    max_examples=rounds(15, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(BLOCKS, max_size=25, unique_by=lambda block: block[0]),
    st.sets(st.integers(1, 30)),
    st.integers(1, 8),
)
def test_no_block_is_lost_and_none_is_left_without_its_parent(
    tmp_path_factory: pytest.TempPathFactory,
    blocks: list[tuple[int, int, bool]],
    there: set[int],
    looks: int,
) -> None:
    """`blocks`: of each its number, its parent's (0: none), and whether it is pinned."""

    async def run(folder: Path) -> None:
        async with machines(folder, 2) as (first, second):
            for number, parent, pinned in blocks:
                digest = put_under(first, BOUND, number, digest_of(parent) if parent else None)
                if pinned:
                    pin(first, digest)
            second.put(sorted(there))
            found = await moved(first, second.address)
            assert (found["state"], found["blocks"]) == ("done", len(blocks))
            assert here(first) == set(map(digest_of, left_of(blocks)))
            assert all(second.read(digest_of(n)) == payload_of(n, 4096) for n, _, _ in blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TASK_LOOKS", looks)
        trio.run(run, tmp_path_factory.mktemp("move"))
