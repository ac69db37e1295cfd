"""The DRAM tier on memory of a node without processors, as CXL's is. Runs in the machine of packaging/rig (`make
test-rig`), whose second node is such memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfs.config.capacities import check_numa_nodes
from kvfs.errors import ConfigError
from kvfs.limits import MIB
from tests.support.stores import BOUND, NAMESPACE, put_block, read
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

if os.uname().nodename != "rig":
    pytest.skip("needs the machine of packaging/rig: make test-rig", allow_module_level=True)

NEAR, FAR = 0, 1
CAPACITY = 128 * MIB
BLOCKS = 64


def shared_bytes(node: int) -> int:
    """The bytes of a node that files in memory take, huge pages among them."""
    for line in Path(f"/sys/devices/system/node/node{node}/meminfo").read_text().splitlines():
        if " Shmem:" in line:
            return int(line.split()[3]) * 1024
    raise AssertionError("the kernel says nothing of Shmem")


def digest_of(number: int) -> bytes:
    return (number + 1).to_bytes(8, "big") * 2


def payload_of(number: int) -> bytes:
    return number.to_bytes(8, "big") * (MIB // 8)


def put(store: Store, numbers: range) -> None:
    for number in numbers:
        put_block(store, digest_of(number), payload_of(number))


def started(path: Path, numa_nodes: tuple[int, ...]) -> Store:
    return open_store(StoreOptions(path, CAPACITY, backing="tmpfs", numa_nodes=numa_nodes))


def test_blocks_lie_on_the_node_that_is_asked_for_whoever_reads_them(tmp_path: Path) -> None:
    before = [shared_bytes(NEAR), shared_bytes(FAR)]
    store = started(tmp_path / "data", (FAR,))
    try:
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
        put(store, range(BLOCKS))
        for number in range(BLOCKS):
            assert read(store, store.lookup_block(digest_of(number))) == payload_of(number)
        assert shared_bytes(FAR) - before[FAR] >= BLOCKS * MIB
        assert shared_bytes(NEAR) - before[NEAR] < BLOCKS * MIB // 8
    finally:
        store.close(keep=True)
    far = shared_bytes(FAR)
    store = started(tmp_path / "data", ())  # what is there stays, what comes lies where it is written
    try:
        put(store, range(BLOCKS, BLOCKS + 16))
        for number in range(BLOCKS + 16):
            assert read(store, store.lookup_block(digest_of(number))) == payload_of(number)
        assert shared_bytes(FAR) - before[FAR] >= BLOCKS * MIB
        assert shared_bytes(FAR) - far < 8 * MIB
        assert shared_bytes(NEAR) - before[NEAR] >= 16 * MIB
    finally:
        store.close(keep=False)


def test_what_comes_in_place_of_what_lies_elsewhere_lies_where_it_is_to(tmp_path: Path) -> None:
    before = [shared_bytes(NEAR), shared_bytes(FAR)]
    store = started(tmp_path / "data", ())
    store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
    put(store, range(BLOCKS))
    store.close(keep=True)
    assert shared_bytes(NEAR) - before[NEAR] >= BLOCKS * MIB
    store = started(tmp_path / "data", (FAR,))
    try:
        for number in range(BLOCKS):
            store.remove_block(digest_of(number))
        put(store, range(BLOCKS, 2 * BLOCKS))
        assert shared_bytes(FAR) - before[FAR] >= BLOCKS * MIB
        assert shared_bytes(NEAR) - before[NEAR] < BLOCKS * MIB // 8
    finally:
        store.close(keep=False)


def test_nodes_in_turn(tmp_path: Path) -> None:
    before = [shared_bytes(NEAR), shared_bytes(FAR)]
    store = started(tmp_path / "data", (NEAR, FAR))
    try:
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
        put(store, range(BLOCKS))
        for node in (NEAR, FAR):
            assert shared_bytes(node) - before[node] >= BLOCKS * MIB // 4
    finally:
        store.close(keep=False)


def test_more_than_the_node_has_is_refused() -> None:
    check_numa_nodes((FAR,), CAPACITY)
    check_numa_nodes((NEAR, FAR), 1024 * MIB)
    with pytest.raises(ConfigError, match=r"numa_nodes = \[1\]: they have .* of memory"):
        check_numa_nodes((FAR,), 1024 * MIB)
    with pytest.raises(
        ConfigError, match=r"node 2 has no memory for this process; those that have: \[0, 1\]"
    ):
        check_numa_nodes((FAR, 2), CAPACITY)
