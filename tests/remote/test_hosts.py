"""Three services on hosts of a network of their own: all doors, and cables that are pulled, slow, or lead to some only.

What a host says while its cable is pulled is lost without a word: no connection is reset, no process ends. Whatever is
read meanwhile is right or a miss, within a bound, and afterwards all is as before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Final

import pytest

from kvfs import limits
from kvfs.limits import MIB
from tests.support.directory_server import needs_server
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.hosted_services import Host, hosted_services, sees
from tests.support.machines import payload_of
from tests.support.network_hosts import Network, network_or_skip
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.mount,
    needs_server,
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

DIRECTORY: Final = 4
"""The host of the directory."""
SILENT_S: Final = limits.REMOTE_READ_S + limits.REMOTE_SILENCE_S
"""Within this a machine that says nothing more is given up, whatever was asked of it."""
SPARE_S: Final = 12.0
"""For all that a busy machine of the tests takes beside that."""
_numbers = count()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_mount()
    with network_or_skip(DIRECTORY) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with hosted_services(tmp_path_factory.mktemp("hosts"), network, 3) as running:
        yield running


def new(size: int) -> range:
    """Numbers of blocks that no test had before."""
    first = next(_numbers) * 1000
    return range(first, first + size)


def has(host: Host, numbers: range, digests: list[bytes]) -> list[bytes]:
    """Those of these blocks that a host has; each that it has is right."""
    into = bytearray(MIB * len(digests))
    places = [memoryview(into)[i * MIB : (i + 1) * MIB] for i in range(len(digests))]
    with host.blocks() as blocks:
        sizes = blocks.get_into(digests, places)
    assert {*sizes} <= {-1, MIB}
    here = [i for i, size in enumerate(sizes) if size == MIB]
    assert all(bytes(places[i]) == payload_of(numbers[i], MIB) for i in here)
    return [digests[i] for i in here]


def fetched_within(host: Host, digests: list[bytes], most_s: float) -> int:
    began = time.monotonic()
    found = host.fetch(digests)
    assert time.monotonic() - began < most_s + SPARE_S
    return found


def test_each_door_of_each_host_reads_what_another_one_has(hosts: list[Host]) -> None:
    first, second, third = hosts
    numbers = new(8)
    digests = first.put(numbers)
    eventually(lambda: second.finds(first, digests) and third.finds(first, digests), "they are found")
    for number, digest in zip(numbers, digests, strict=True):
        assert second.read_path(digest) == payload_of(number, MIB)
        assert third.read_s3(digest) == payload_of(number, MIB)
    assert all(has(host, numbers, digests) == digests for host in hosts)


def test_a_cable_that_is_pulled_within_a_read(hosts: list[Host], network: Network) -> None:
    first, second, _ = hosts
    numbers = new(48)
    digests = first.put(numbers)
    eventually(lambda: second.finds(first, digests), "they are found")
    fetched = second.cluster()["fetched_blocks"]
    with network.slowed(2, "200mbit"), second.blocks() as blocks:
        began, under_way = time.monotonic(), blocks.fetch(digests)
        eventually(lambda: second.cluster()["fetched_blocks"] > fetched, "a block has come")
        with network.pulled(1):
            found = under_way.result()
            assert time.monotonic() - began < SILENT_S + SPARE_S
            came = has(second, numbers, digests)
            assert 0 < len(came) == found < len(digests), "it was over before the cable was pulled"
            assert fetched_within(second, [each for each in digests if each not in came], SILENT_S) == 0
            linked = first.connections_with(second)
            eventually(
                lambda: first.connections_with(second) < linked, "the holder gives up who takes nothing"
            )
            assert second.open_drafts() == 0
    eventually(lambda: second.fetch(digests) == len(digests), "all of it comes, once the cable is plugged in")
    assert has(second, numbers, digests) == digests


def test_another_holder_is_asked_for_what_a_lost_host_has(hosts: list[Host], network: Network) -> None:
    first, second, third = hosts
    numbers = new(8)
    digests = first.put(numbers)
    third.put(numbers)
    eventually(lambda: second.finds(first, digests) and second.finds(third, digests), "both are found")
    with network.pulled(1):
        assert fetched_within(second, digests, SILENT_S) == len(digests)
    assert has(second, numbers, digests) == digests
    eventually(lambda: second.finds(first, digests), "the lost host is there again")


def test_hosts_that_do_not_reach_each_other_but_all_others(hosts: list[Host], network: Network) -> None:
    """The directory says that both are up, and each has blocks that the other does not get."""
    first, second, third = hosts
    alone, shared = new(4), new(4)
    at_first, at_both = first.put(alone), first.put(shared)
    third.put(shared)
    eventually(lambda: second.finds(first, at_first) and second.finds(third, at_both), "they are found")
    with network.parted(1, 2):
        assert fetched_within(second, at_first, SILENT_S) == 0
        assert fetched_within(second, at_both, SILENT_S) == len(at_both)
        assert third.fetch(at_first) == len(at_first)
        eventually(lambda: second.fetch(at_first) == len(at_first), "the third host has them by now")
    assert has(second, alone, at_first) == at_first


def test_a_host_without_the_directory_goes_on_and_is_there_again(hosts: list[Host], network: Network) -> None:
    """For longer than its lease: others forget what it has, and hear of it when it is back."""
    first, second, third = hosts
    before, meanwhile = new(4), new(4)
    digests = second.put(before)
    eventually(lambda: first.finds(second, digests), "they are found")
    with network.parted(2, DIRECTORY):
        others = (first, third)
        eventually(lambda: all(sees(each, 2) for each in others), "its lease is over", every_s=0.05)
        digests += second.put(meanwhile)
        assert has(second, meanwhile, digests[4:]) == digests[4:]
        assert fetched_within(third, digests, SILENT_S) == 0
    eventually(lambda: first.finds(second, digests), "all that it has is found", every_s=0.05)
    assert first.fetch(digests) == len(digests)


def test_what_nobody_answers_for_is_a_miss_at_each_door(hosts: list[Host], network: Network) -> None:
    first, second, third = hosts
    digests = first.put(new(2))
    eventually(lambda: second.finds(first, digests) and third.finds(first, digests), "they are found")
    with network.pulled(1):
        began = time.monotonic()
        with pytest.raises(FileNotFoundError):
            second.read_path(digests[0])
        with pytest.raises(Exception, match="NoSuchKey"):
            third.read_s3(digests[1])
        with second.blocks() as blocks:
            assert (blocks.fetch(digests).result(), blocks.get(digests)) == (0, [None, None])
        assert time.monotonic() - began < 3 * SILENT_S + SPARE_S
