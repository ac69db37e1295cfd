"""Blocks that other machines read count as hits in the order of eviction."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs import limits
from kvfs.limits import MIB
from tests.support.machines import Machine, digest_of, machines, payload_of
from tests.support.waits import until
from tiers.model.tier import StoreKey


def hits(machine: Machine, digest: bytes) -> int:
    entry = machine.store.table.get(digest)
    return 0 if entry is None else entry.hits


async def test_a_block_that_a_machine_reads_again_and_again_outlives_others_of_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOTE_HITS_S", 0.001)
    async with machines(tmp_path, 2) as (first, second):
        [wanted], *others = [first.put([number], MIB) for number in range(1, 9)]  # each a chain of its own
        for times in (1, 2, 3):
            assert await second.fetch([wanted, digest_of(99)]) == 1
            second.store.remove_block(wanted)
            await until(lambda times=times: hits(first, wanted) == times)
        assert [hits(first, other) for [other] in others] == [0] * 7
        assert first.store.usage()["hits"] == 3
        first.store.evict(4 * MIB)
        assert first.read(wanted) == payload_of(1, MIB)
        assert [first.read(other) is None for [other] in others] == [True] * 4 + [False] * 3


async def test_the_blocks_of_one_read_are_hits_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several connections too: the order of eviction takes such a row for what one prompt asked for."""
    monkeypatch.setattr(limits, "REMOTE_HITS_S", 0.001)
    async with machines(tmp_path, 2) as (first, second):
        digests = first.put(range(1, 41), 4096)
        touch, reported = first.store.touch, []

        def note(key: StoreKey) -> None:
            reported.append(key.digest)
            touch(key)

        monkeypatch.setattr(first.store, "touch", note)
        assert await second.fetch(digests) == 40
        await until(lambda: len(reported) == 40)
        assert sorted(reads_of(reported)) == sorted(reads_of(digests))


def reads_of(digests: list[bytes]) -> list[list[bytes]]:
    """Cut 40 blocks into the reads of a fetch of them."""
    return [digests[at : at + 10] for at in range(0, 40, 40 // limits.REMOTE_STREAMS)]
