"""Copies of a machine's blocks to another one, with both in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs import limits
from kvfs.errors import Busy, InvalidRequest, NotFound, Unsupported
from kvfs.keys import block_name
from kvfs.namespaces import Namespace
from tests.support.machines import (
    Machine,
    digest_of,
    machine,
    machines,
    onto_nvme,
    payload_of,
)
from tests.support.rogue_peers import receive, serving, welcome
from tests.support.stores import BOUND, NAMESPACE, draft_of
from tests.support.waits import until
from tiers.model.objects import Bucket, Name
from tiers.remote.wire import HELLO_BYTES

OTHER = Namespace(**{**NAMESPACE.as_mapping(), "model": "another"})


async def copied(asker: Machine, to: str, buckets: Sequence[Bucket] = ()) -> dict[str, Any]:
    await asker.cluster.copy(to, buckets or [asker.bucket])
    return await asker.ended("copy")


async def test_blocks_come_whole_with_their_parents_and_only_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 151))
        second.put([3])
        found = await copied(first, second.address)
        assert (found["state"], found["blocks"], found["of_blocks"], found["there_blocks"]) == (
            "done",
            150,
            150,
            1,
        )
        assert (found["bytes"], found["failed_blocks"], found["gone_blocks"]) == (150 * 4096, 0, 0)
        for number, digest in enumerate(digests, 1):
            assert second.read(digest) == payload_of(number, 4096)
        info = second.store.catalog.blocks.get(digests[-1])
        assert info is not None
        assert info.parent == digests[-2]
        assert (first.drafts(), second.drafts()) == (0, 0)
        assert second.cluster.status()["pulled_blocks"] == 149
        assert (await copied(first, second.address))["there_blocks"] == 150
        status = first.cluster.status()
        assert (status["task_blocks"], status["task_bytes"]) == (300, 300 * 4096)
        assert [each["number"] for each in status["tasks"]] == [2]


async def test_a_pull_has_no_more_than_its_bytes_or_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_BYTES", 10_000)
    async with machines(tmp_path, 2) as (first, second):
        first.put(range(1, 5), 4096)
        first.put([5], 20_000)
        assert (await copied(first, second.address))["state"] == "done"
        assert second.cluster.status()["pulls"] == 3


async def test_a_namespace_without_a_bucket_there_is_named_and_others_go_on(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        first.store.create_bucket(b"a-first", uid=0, gid=0, namespace=OTHER)
        for number in range(1, 100):
            draft = draft_of(first.store, b"another's")
            first.store.seal_block(draft, b"a-first", digest_of(number), parent=None, uid=0)
        first.put(range(101, 111))
        found = await copied(first, second.address, first.store.buckets())
        assert (found["state"], found["blocks"], found["failed_blocks"]) == ("failed", 10, 99)
        says = f"no bucket there is bound to namespace {OTHER.digest.hex()}"
        assert found["failures"] == [[says, 99]]
        assert second.cluster.status()["refused_pulls"] == 1


async def test_without_room_there_the_copy_ends_and_nothing_pinned_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_BYTES", 1)
    async with machines(tmp_path, 2) as (first, second):
        kept = second.put(range(1, 5), 3 << 20)
        for digest in kept:
            second.store.set_attributes(Name(BOUND, block_name(digest)), pinned=True)
        first.put(range(11, 14), (4 << 20) - 4096)
        found = await copied(first, second.address)
        assert (found["state"], found["blocks"], found["failed_blocks"]) == ("failed", 0, 1)
        [[reason, _]] = found["failures"]
        assert "no room there" in reason
        assert found["said"] == f"{second.address}: {reason}"
        assert all(second.read(digest) is not None for digest in kept)
        assert second.drafts() == 0


async def test_a_block_that_another_bucket_there_has_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_PAUSE_S", 0.01)
    async with machines(tmp_path, 2) as (first, second):
        second.store.create_bucket(b"other", uid=0, gid=0, namespace=OTHER)
        draft = draft_of(second.store, b"another's")
        second.store.seal_block(draft, b"other", digest_of(2), parent=None, uid=0)
        first.put(range(1, 4))
        found = await copied(first, second.address)
        assert (found["state"], found["blocks"], found["failed_blocks"]) == ("failed", 2, 1)


async def test_blocks_that_go_meanwhile_are_no_failure(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 131))
        pull = second.cluster._serving._pulls.carry_out  # type: ignore[union-attr]

        async def carry_out(*arguments: Any) -> Any:
            for digest in [*digests[10:20], *digests[100:110]]:
                if digest in first.store.catalog.blocks:
                    first.store.remove_block(digest)
            return await pull(*arguments)

        second.cluster._serving._pulls.carry_out = carry_out  # type: ignore[union-attr,method-assign]
        found = await copied(first, second.address)
        assert (found["state"], found["blocks"], found["gone_blocks"]) == ("done", 110, 20)


async def test_copies_go_to_nvme_where_the_bucket_admits_what_is_wanted_again(tmp_path: Path) -> None:
    async with onto_nvme(tmp_path, admits_all=False) as (first, second):
        first.put(range(1, 11))
        assert (await copied(first, second.address))["blocks"] == 10
        await until(lambda: second.store.journal.usage()[0]["objects_written"] == 10)


async def test_a_durable_bucket_takes_no_copies_and_what_it_has_is_there(tmp_path: Path) -> None:
    async with onto_nvme(tmp_path, durable=True) as (first, second):
        first.put(range(1, 4))
        second.put([2])
        found = await copied(first, second.address)
        assert (found["state"], found["there_blocks"], found["failed_blocks"]) == ("failed", 1, 2)
        assert found["failures"] == [["bucket bound there is durable, and takes no copies", 2]]
        second.store.create_bucket(b"zcache", uid=0, gid=0, namespace=NAMESPACE)
        found = await copied(first, second.address)
        assert (found["state"], found["blocks"], found["there_blocks"]) == ("done", 3, 1)


async def test_a_machine_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    async def earlier(stream: trio.SocketStream) -> None:
        hello = await receive(stream, HELLO_BYTES)
        if hello[12:16] == bytes(4):  # what is the purpose now had to be zero
            await trio.sleep_forever()

    async with serving(earlier) as address, machine(tmp_path, listen="127.0.0.1:0", peers=[address]) as asker:
        asker.put([1])
        found = await copied(asker, address)
        assert (found["state"], found["failed_blocks"]) == ("failed", 1)
        assert "earlier version" in found["said"]
        assert found["said"].startswith(address)


async def test_a_machine_that_goes_away_in_the_middle_ends_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_PAUSE_S", 0.01)

    async def goes(stream: trio.SocketStream) -> None:
        await welcome(stream)
        await receive(stream, 40)

    async with serving(goes) as address, machine(tmp_path, listen="127.0.0.1:0", peers=[address]) as asker:
        asker.put(range(1, 100))
        found = await copied(asker, address)
        assert (found["state"], found["blocks"], found["failed_blocks"]) == ("failed", 0, limits.PULL_BLOCKS)
        assert "the connection" in found["said"]


async def test_a_copy_is_cancelled_and_one_runs_at_a_time(tmp_path: Path) -> None:
    async def hangs(stream: trio.SocketStream) -> None:
        await welcome(stream)
        await trio.sleep_forever()

    async with serving(hangs) as address, machine(tmp_path, listen="127.0.0.1:0", peers=[address]) as asker:
        asker.put([1])
        with pytest.raises(NotFound, match="no copy is under way"):
            await asker.cluster.cancel("copy")
        await asker.cluster.copy(address, [asker.bucket])
        with pytest.raises(Busy, match="as task 1"):
            await asker.cluster.copy(address, [asker.bucket])
        assert asker.cluster.status()["tasks_running"] == 1
        await asker.cluster.cancel("copy")
        assert (await asker.ended("copy"))["state"] == "cancelled"
        assert asker.cluster.status()["tasks_running"] == 0
        await asker.cluster.copy(address, [asker.bucket])  # which the stop ends


async def test_who_cannot_be_copied_to_is_refused_at_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second):
        with pytest.raises(InvalidRequest, match=r"127\.0\.0\.9:1.* is neither"):
            await first.cluster.copy("127.0.0.9:1", [first.bucket])
        with pytest.raises(InvalidRequest, match="is this machine"):
            await first.cluster.copy(first.address, [first.bucket])
        async with machine(tmp_path / "reads", peers=[second.address]) as reader:
            with pytest.raises(Unsupported, match="no machine can fetch from it"):
                await reader.cluster.copy(second.address, [reader.bucket])
