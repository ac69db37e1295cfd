"""Epochs, leases and stores that are there twice, on a real server; and answers that are none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs.errors import ProtocolError
from tests.support.directory_server import DirectoryServer, connected, directory_server, needs_server
from tests.support.machines import digest_of
from tests.support.waits import WAIT_S
from tiers.cluster.changes import Manifest, PendingChanges
from tiers.cluster.location_format import BUCKETS, decode_holders, encode_changes
from tiers.cluster.membership import Membership
from tiers.cluster.redis_server import RedisServer
from tiers.cluster.scripts import BEAT, CHANGE, LOOKUP, RELEASE
from tiers.remote.holders import leading, runs

ONE, OTHER = b"1" * 16, b"2" * 16
A, B = "10.0.0.1:9400", "10.0.0.2:9400"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DirectoryServer]:
    with directory_server(tmp_path) as running:
        yield running


async def beat(server: RedisServer, membership: Membership) -> bool:
    return membership.take(await server.call(BEAT, *membership.arguments({"blocks": 7})))


@needs_server
async def test_members_see_each_other_with_their_epochs_and_reports(server: DirectoryServer) -> None:
    one, other = Membership(ONE, A, 5), Membership(OTHER, B, 9)
    async with connected(server.url) as redis:
        assert await beat(redis, one)
        assert await beat(redis, other)
        assert not await beat(redis, one)
        assert {each.address: each.epoch for each in one.members.values()} == {A: 5, B: 9}
        assert {each.report["blocks"] for each in one.members.values()} == {7}
        numbers = sorted(one.members)
        assert one.addresses([*numbers, 77]) == (B,)
        await redis.call(RELEASE, OTHER, b"9")
        await beat(redis, one)
        assert one.addresses(numbers) == ()
        assert await beat(redis, other)
        assert sorted(other.members) == numbers  # its number stays


@needs_server
async def test_numbers_are_the_same_again_after_all_was_lost(server: DirectoryServer) -> None:
    """In whatever order machines come back; two whose ids begin alike have two numbers."""
    stores = [bytes([first, 7]) + bytes([at]) * 14 for at, first in enumerate([0, 255, 1, 1])]
    found = []
    async with connected(server.url) as redis:
        for order in (stores, stores[2:] + stores[:2]):
            server.empty()
            members = {each: Membership(each, f"10.0.0.{stores.index(each)}:9400", 5) for each in order}
            for membership in members.values():
                await beat(redis, membership)
            found.append([members[each].number for each in stores])
    assert found[0] == found[1]
    assert len(set(found[0])) == len(stores)
    assert all(0 < int.from_bytes(number, "big") < 1 << 16 for number in found[0])


@needs_server
async def test_a_lease_that_was_thought_lost_is_followed_by_a_manifest(server: DirectoryServer) -> None:
    one = Membership(ONE, A, 5)
    async with connected(server.url) as redis:
        assert await beat(redis, one)
        one.lapse()  # a write from before the beat was refused, and its answer is read after the beat's
        assert not one.is_joined
        assert await beat(redis, one)
        assert one.is_joined
        assert not await beat(redis, one)


@needs_server
async def test_an_epoch_that_another_start_overtook_is_refused(
    server: DirectoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Membership(ONE, A, 5), Membership(ONE, A, 6)
    async with connected(server.url) as redis:
        await beat(redis, before)
        assert await beat(redis, after)
        assert not await beat(redis, before)
        assert before.state == "refused"
        assert before.is_overtaken
        assert "has started elsewhere since" in caplog.text
        assert await redis.call(CHANGE, ONE, b"5", encode_changes([(digest_of(1), True)])) == -1
        assert await redis.call(CHANGE, ONE, b"6", encode_changes([(digest_of(1), True)])) == 0
        own = (int.from_bytes(after.number, "big"),)
        assert decode_holders(await redis.look_up(LOOKUP, digest_of(1)[:10], 1), 1) == [own]


@needs_server
async def test_a_start_whose_clock_is_behind_takes_the_next_epoch(server: DirectoryServer) -> None:
    first, second = Membership(ONE, A, 50), Membership(ONE, A, 40)
    async with connected(server.url) as redis:
        await beat(redis, first)
        assert not await beat(redis, second)
        assert await beat(redis, second)
        assert (second.epoch, second.state) == (51, "joined")


@needs_server
async def test_one_store_at_two_addresses_is_refused_and_both_say_so(
    server: DirectoryServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, copy = Membership(ONE, A, 5), Membership(ONE, B, 6)
    async with connected(server.url) as redis:
        await beat(redis, first)
        assert not await beat(redis, copy)
        assert copy.state == "refused"
        assert A in copy.trouble
        await beat(redis, first)
        assert (first.state, first.rivals) == ("joined", 1)
        assert B in first.trouble
        assert [record.levelno for record in caplog.records if "one data directory" in record.message] == [
            logging.ERROR,
            logging.ERROR,
        ]
        assert not await beat(redis, Membership(OTHER, A, 7))  # nor another store at its address
        await redis.call(RELEASE, ONE, b"5")
        assert await beat(redis, copy)
        assert copy.trouble == ""


@needs_server
async def test_no_more_machines_than_the_limit(
    server: DirectoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CLUSTER_NODES", 1)
    async with connected(server.url) as redis:
        await beat(redis, Membership(ONE, A, 5))
        late = Membership(OTHER, B, 5)
        assert not await beat(redis, late)
        assert "1 machines" in late.trouble


@needs_server
async def test_a_lease_ends_by_itself(server: DirectoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIRECTORY_LEASE_S", 0.05)
    one, other = Membership(ONE, A, 5), Membership(OTHER, B, 5)
    async with connected(server.url) as redis:
        await beat(redis, one)
        with trio.fail_after(WAIT_S):
            while True:
                await beat(redis, other)
                if len(other.members) == 1:
                    break
        assert await beat(redis, one)  # the same epoch may come back


@example([b"", b"", b""])
@given(
    st.one_of(
        st.none(),
        st.integers(),
        st.binary(),
        st.lists(st.one_of(st.binary(max_size=12), st.none(), st.lists(st.binary(max_size=4))), max_size=6),
    )
)
def test_an_answer_that_is_none_is_a_protocol_error_or_changes_nothing_else(answer: object) -> None:
    with pytest.raises(ProtocolError):
        Membership(ONE, A, 5).take(answer)


@given(
    st.one_of(st.none(), st.lists(st.one_of(st.binary(max_size=6), st.integers(), st.lists(st.none())))),
    st.integers(0, 4),
)
def test_holders_of_any_answer_are_as_many_as_asked_or_an_error(answer: object, count: int) -> None:
    with suppress(ProtocolError):
        assert len(decode_holders(answer, count)) == count


HOLDERS = st.lists(st.lists(st.sampled_from("abc"), unique=True).map(tuple), max_size=12)


@given(HOLDERS)
def test_runs_cover_what_somebody_holds_once(holders: list[tuple[str, ...]]) -> None:
    covered = [at for run, _ in runs(holders) for at in run]
    assert covered == [at for at, some in enumerate(holders) if some]
    assert all(set(common) <= set(holders[at]) and common for run, common in runs(holders) for at in run)
    for address, count in leading(holders).items():
        assert all(address in some for some in holders[:count])
        assert count == len(holders) or address not in holders[count]


def test_pending_changes_keep_the_latest_state_and_are_dropped_past_the_bound() -> None:
    pending = PendingChanges(most=2)
    assert pending.note(b"a", True, 1.0)
    assert pending.note(b"b", True, 2.0)
    assert pending.note(b"a", False, 3.0)
    assert pending.lag_s(4.0) == 3.0
    assert not pending.note(b"c", True, 5.0)
    assert (len(pending), pending.dropped) == (0, 3)
    pending.note(b"a", False, 6.0)
    assert pending.take() == [(b"a", False)]


@given(st.sets(st.binary(min_size=16, max_size=16), max_size=50), st.integers(0, 3000))
@settings(max_examples=20)
def test_a_manifest_names_each_held_block_once_in_parts(digests: set[bytes], entries: int) -> None:
    manifest, named, reach = Manifest(), [], 0
    manifest.note(digests)
    while not manifest.is_sent:
        part = manifest.take(lambda digest: digest[15] % 2 == 0)
        assert part.first == reach
        reach = part.first + part.count
        named += part.digests
        manifest.sent(part, entries)
    assert reach == BUCKETS
    assert sorted(named) == sorted(digest for digest in digests if digest[15] % 2 == 0)
