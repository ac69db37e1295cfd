"""Drains of one machine among others, all in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.keys import block_name
from kvfs.namespaces import Namespace
from tests.support.machines import Machine, digest_of, machine, machines, onto_nvme, payload_of
from tests.support.own_ports import own_port
from tests.support.rogue_peers import receive, serving, welcome
from tests.support.seeds import rounds
from tests.support.stores import BOUND, NAMESPACE, draft_of, put
from tests.support.waits import until
from tiers.model.objects import Name
from tiers.remote.order_poller import OrderPoller
from tiers.remote.pull_wire import HEAD_BYTES, PULL, decode_head, encode_pulled
from tiers.remote.wire import HELLO_BYTES
from tiers.transfers.other_machines import MISSING, Pulled

OTHER = Namespace(**{**NAMESPACE.as_mapping(), "model": "another"})
COUNT = 3
NUMBERS = st.sets(st.integers(1, 40), max_size=12)


async def drained(asker: Machine) -> dict[str, Any]:
    await asker.cluster.drain()
    return await asker.ended("drain")


def held(running: list[Machine], number: int) -> list[Machine]:
    return [each for each in running if each.read(digest_of(number)) == payload_of(number, 4096)]


async def test_what_one_machine_alone_has_is_spread_and_chains_stay_whole(tmp_path: Path) -> None:
    async with machines(tmp_path, COUNT) as (first, *others):
        one, two = range(1, 81), range(101, 181)
        first.put(one)
        first.put(two)
        others[1].put(one[:10])
        found = await drained(first)
        assert (found["state"], found["blocks"], found["there_blocks"]) == ("done", 160, 10)
        assert found["said"].startswith("nothing is here alone; 0 named objects and 0 blocks")
        assert all(held(others, number) == [others[1]] for number in one)  # where its first ten were
        assert {id(each) for number in two for each in held(others, number)} == {id(others[0])}
        assert [each.drafts() for each in (first, *others)] == [0] * COUNT
        assert first.store.usage()["blocks"] == 160


@settings(
    max_examples=rounds(5, 15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(NUMBERS, min_size=COUNT, max_size=COUNT), st.booleans())
def test_no_block_is_lost_with_a_machine_that_was_drained(
    tmp_path_factory: pytest.TempPathFactory, has: list[set[int]], small: bool
) -> None:
    async def run(folder: Path) -> None:
        async with machines(folder, COUNT) as running:
            for each, numbers in zip(running, has, strict=True):
                each.put(sorted(numbers))
            found = await drained(running[0])
            assert (found["state"], found["blocks"]) == ("done", len(has[0]))
            assert found["there_blocks"] == len(has[0] & (has[1] | has[2]))
            for number in has[0] | has[1] | has[2]:
                assert held(running[1:], number)
            assert all(held(running[:1], number) for number in has[0])

    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(limits, "PULL_BYTES", 10_000)
            patch.setattr(limits, "TASK_LOOKS", 3)
        trio.run(run, tmp_path_factory.mktemp("drain"))


async def test_what_one_machine_has_no_room_for_goes_to_another(tmp_path: Path) -> None:
    async with machines(tmp_path, COUNT) as (first, full, other):
        fill(full)
        first.put(range(11, 14), (4 << 20) - 4096)
        found = await drained(first)
        assert found["state"] == "done", found
        assert all(other.read(digest_of(number)) is not None for number in range(11, 14))


async def test_what_nobody_has_room_for_is_named(tmp_path: Path) -> None:
    async with machines(tmp_path, COUNT) as (first, *others):
        for each in others:
            fill(each)
        first.put(range(11, 14), (4 << 20) - 4096)
        found = await drained(first)
        assert found["state"] == "failed"
        assert found["said"].startswith(f"{found['failed_blocks']} blocks are here alone")
        reason = found["failures"][0][0]
        assert all(f"{each.address}: no room there" in reason for each in others)


def fill(full: Machine) -> None:
    """Pin blocks until no other one has room."""
    for digest in full.put(range(1, 5), 3 << 20):
        full.store.set_attributes(Name(BOUND, block_name(digest)), pinned=True)


async def test_a_namespace_without_a_bucket_elsewhere_is_named(tmp_path: Path) -> None:
    async with machines(tmp_path, COUNT) as (first, *others):
        first.store.create_bucket(b"other", uid=0, gid=0, namespace=OTHER)
        for number in (1, 2):
            draft = draft_of(first.store, b"another's")
            first.store.seal_block(draft, b"other", digest_of(number), parent=None, uid=0)
        first.put([3])
        found = await drained(first)
        assert (found["state"], found["blocks"], found["failed_blocks"]) == ("failed", 1, 2)
        for each in others:
            assert f"{each.address}: no bucket there is bound to namespace" in found["failures"][0][0]


async def test_names_stay_and_are_counted(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        put(first.store, b"x", b"a name's")
        first.put([1])
        found = await drained(first)
        assert found["state"] == "done"
        assert "1 named objects and 0 blocks of durable buckets stay" in found["said"]
        assert second.store.usage()["objects"] == 0


async def test_blocks_of_durable_buckets_stay_and_are_counted(tmp_path: Path) -> None:
    async with onto_nvme(tmp_path, durable=True) as (other, first):
        first.put(range(1, 4))
        found = await drained(first)
        assert (found["state"], found["of_blocks"], found["blocks"]) == ("done", 0, 0)
        assert "3 blocks of durable buckets stay" in found["said"]
        assert other.store.usage()["blocks"] == 0


async def test_machines_are_given_as_much_as_each_other(tmp_path: Path) -> None:
    async with machines(tmp_path, COUNT) as (first, *others):
        for number in range(1, 41):  # each its own chain
            first.put([number])
        assert (await drained(first))["state"] == "done"
        assert [each.store.usage()["blocks"] for each in others] == [20, 20]


async def test_what_is_put_while_it_drains_is_brought_by_the_next_walk(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        first.put(range(1, 4))
        pulls = second.cluster._serving._pulls  # type: ignore[union-attr]
        carry_out, late = pulls.carry_out, [7, 8]

        async def with_puts(*arguments: Any) -> Any:
            if late:
                first.put([late.pop()])
            return await carry_out(*arguments)

        pulls.carry_out = with_puts  # type: ignore[method-assign]
        found = await drained(first)
        assert (found["state"], found["blocks"], found["of_blocks"]) == ("done", 5, 5)
        assert held([second], 7)
        assert held([second], 8)


async def test_blocks_that_go_again_as_fast_as_they_come_end_the_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machines(tmp_path, 2) as (first, second):
        [digest] = first.put([1])
        pulls = second.cluster._serving._pulls  # type: ignore[union-attr]
        carry_out = pulls.carry_out

        async def and_evict(*arguments: Any) -> Any:
            pulled = await carry_out(*arguments)
            if digest in second.store.catalog.blocks:
                second.store.remove_block(digest)
            return pulled

        pulls.carry_out = and_evict  # type: ignore[method-assign]
        found = await drained(first)
        assert found["state"] == "failed"
        assert "for want of room" in found["said"]


@asynccontextmanager
async def beside(tmp_path: Path, rogue: str) -> AsyncIterator[tuple[Machine, Machine]]:
    """Run two machines, of which the first one has a rogue as its first peer."""
    addresses = [f"{host}:{own_port()}" for host in ("127.0.0.2", "127.0.0.3")]
    async with (
        machine(tmp_path / "1", listen=addresses[1], peers=addresses) as second,
        machine(tmp_path / "0", listen=addresses[0], peers=[rogue, *addresses]) as first,
    ):
        await until(
            lambda: second.cluster.status()["peers_up"] == first.cluster.status()["peers_up"] - 1 == 1
        )
        yield first, second


async def test_what_a_machine_does_not_take_before_it_goes_away_is_given_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_PAUSE_S", 0.01)
    kinds: list[int] = []

    async def goes(stream: trio.SocketStream) -> None:
        if not (await welcome(stream)).purpose:
            await trio.sleep_forever()
        while data := await receive(stream, HEAD_BYTES):
            head = decode_head(data)
            await receive(stream, head.rest_bytes)
            kinds.append(head.kind)
            if head.kind == PULL:
                return
            await stream.send_all(encode_pulled(head.number, Pulled(bytes([MISSING]) * head.blocks)))

    async with serving(goes) as rogue, beside(tmp_path, rogue) as (first, second):
        for number in range(1, 21):  # each its own chain, so that both machines have their turn
            first.put([number])
        found = await drained(first)
        assert (found["state"], found["blocks"]) == ("done", 20), found
        assert kinds.count(PULL) == limits.PULL_TRIES
        assert all(held([second], number) for number in range(1, 21))


async def test_a_machine_whose_answers_are_none_is_asked_once_in_a_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TASK_LOOKS", 3)
    asked = []

    async def raves(stream: trio.SocketStream) -> None:
        if (await welcome(stream)).purpose:
            asked.append(await receive(stream, HEAD_BYTES))
            await stream.send_all(bytes(1000))
        await trio.sleep_forever()

    async with serving(raves) as rogue, beside(tmp_path, rogue) as (first, second):
        first.put(range(1, 11))
        assert (await drained(first))["state"] == "done"
        assert len(asked) == 2
        assert all(held([second], number) for number in range(1, 11))


async def test_a_machine_of_an_earlier_version_is_named_where_there_is_no_other(tmp_path: Path) -> None:
    async def earlier(stream: trio.SocketStream) -> None:
        hello = await receive(stream, HELLO_BYTES)
        if hello[12:16] == bytes(4):
            await trio.sleep_forever()

    async with serving(earlier) as address, machine(tmp_path, listen="127.0.0.1:0", peers=[address]) as asker:
        asker.put([1])
        found = await drained(asker)
        assert found["state"] == "failed"
        [[reason, _]] = found["failures"]
        assert reason.startswith(f"{address}: it fetches nothing when asked")


async def test_while_it_drains_a_machine_is_read_from_and_fetches_nothing(tmp_path: Path) -> None:
    async def hangs(stream: trio.SocketStream) -> None:
        await welcome(stream)
        await trio.sleep_forever()

    async with serving(hangs) as rogue, beside(tmp_path, rogue) as (first, second):
        first.put([1])
        second.put([2])
        await first.cluster.drain()
        assert await first.fetch([digest_of(2)]) == 0
        assert await second.fetch([digest_of(1)], hint=first.address) == 1
        assert await first.fetch([digest_of(1)]) == 1
        conductor = ClusterSettings(
            conductor="http://127.0.0.1:1", peers=(rogue,), secret_file=tmp_path / "unread"
        )
        orders = OrderPoller(conductor, first.store, first.cluster)
        assert await orders.look()
        await second.cluster.copy(first.address, [second.bucket])
        found = await second.ended("copy")
        assert found["state"] == "failed"
        assert "it drains itself" in found["said"]
        await first.cluster.cancel("drain")
        assert (await first.ended("drain"))["state"] == "cancelled"
        assert await first.fetch([digest_of(2)], hint=second.address) == 1
        assert not await orders.look()  # nobody answers
