"""How the blocks of one fetch are cut into reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.limits import KIB, MIB
from tests.support.machines import SECRET
from tiers.remote.connections.identity import Identity
from tiers.remote.fetch import Holder, batches
from tiers.remote.peer import Peer


def holder(sizes: list[int], streams: int = limits.REMOTE_STREAMS) -> Holder:
    peer = Peer("peer:1", "peer", 1, Identity(b"m" * 16, SECRET))
    peer._streams.wanted = streams
    return Holder(peer, sizes)


@given(
    sizes=st.lists(st.sampled_from([0, 4 * KIB, MIB, 5 * MIB, 64 * MIB]), max_size=limits.MAX_FETCH_BLOCKS),
    streams=st.lists(st.integers(1, limits.MAX_REMOTE_STREAMS), min_size=1, max_size=limits.MAX_PEERS),
)
def test_each_block_is_in_one_read_and_no_read_is_too_large(sizes: list[int], streams: list[int]) -> None:
    cut = batches([holder(sizes, each) for each in streams])
    assert [i for each in cut for i in each] == list(range(len(sizes)))
    assert len(cut) <= limits.MAX_REMOTE_READS
    least = -(-len(sizes) // limits.MAX_REMOTE_READS)
    for each in cut:
        size_bytes = sum(sizes[i] for i in each)
        assert 1 <= len(each) <= limits.REMOTE_READ_BLOCKS
        assert (
            len(each) <= least or size_bytes * max(*streams, limits.REMOTE_STREAMS) <= limits.MAX_REMOTE_BYTES
        )


@pytest.mark.parametrize(
    ("count", "size_bytes", "streams", "reads"),
    [
        (64, 64 * KIB, 4, 4),
        (64, MIB, 4, 4),
        (64, MIB, 8, 8),
        (64, 4 * MIB, 4, 16),
        (64, 4 * MIB, 8, 32),
        (64, 4 * MIB, 1, 16),
        (1_024, 64 * KIB, 4, 64),
        (1_024, 5 * MIB, 4, 64),
        (1, 64 * MIB, 8, 1),
    ],
)
def test_as_many_reads_as_there_are_streams_fit_under_way(
    count: int, size_bytes: int, streams: int, reads: int
) -> None:
    assert len(batches([holder([size_bytes] * count, streams)])) == reads


def test_nothing_is_read_from_nobody() -> None:
    assert batches([]) == []
