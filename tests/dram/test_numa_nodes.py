"""The NUMA nodes that the DRAM tier is to lie on: what is refused, and what its tmpfs is told. Where memory lies then,
tests/rig/test_far_memory.py looks at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfs.config import capacities
from kvfs.config.capacities import check_numa_nodes
from kvfs.config.load import load
from kvfs.errors import ConfigError
from kvfs.limits import MAX_NUMA_NODES, MIB
from kvfs.service import check_room
from tests.support.service import Service, run_kvfs
from tests.support.stores import BOUND, NAMESPACE, put_block
from tiers.dram import tmpfs
from tiers.dram.tier import DramTier
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
has_nodes = pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").is_dir(), reason="this kernel knows no NUMA nodes"
)
STORE = b"0123456789abcdef"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of nodes 0 and 2 with 8 and 64 MiB, and 1 without memory; this process may use 0, 1 and 2 of 0 to 3."""
    for node, memory_kib in ((0, 8 << 10), (1, 0), (2, 64 << 10), (3, 64 << 10)):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(
            f"Node {node} MemTotal:  {memory_kib} kB\nNode {node} MemFree:  4 kB\n"
        )
    (tmp_path / "node" / "has_memory").write_text("0,2-3\n")
    (tmp_path / "status").write_text("Name:\tkvfs\nMems_allowed:\t00000007\nMems_allowed_list:\t0-2\n")
    monkeypatch.setattr(capacities, "_NODES", tmp_path / "node")
    monkeypatch.setattr(capacities, "_STATUS", tmp_path / "status")
    return tmp_path


@pytest.mark.parametrize(
    ("nodes", "capacity_bytes"), [((0,), 8 * MIB), ((2,), 64 * MIB), ((0, 2), 72 * MIB), ((2, 2), 64 * MIB)]
)
def test_nodes_that_have_the_memory_are_taken(
    machine: Path, nodes: Sequence[int], capacity_bytes: int
) -> None:
    check_numa_nodes(nodes, capacity_bytes)
    with pytest.raises(ConfigError, match="of memory, less than"):
        check_numa_nodes(nodes, capacity_bytes + 1)


@pytest.mark.parametrize("node", [1, 3, 4])
def test_a_node_without_memory_for_this_process_is_refused(machine: Path, node: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"node {node} has no memory for this process; those that have: \[0, 2\]"
    ):
        check_numa_nodes((0, node), MIB)


def test_a_kernel_without_cpusets_allows_all(machine: Path) -> None:
    (machine / "status").write_text("Name:\tkvfs\n")
    check_numa_nodes((0, 2, 3), 136 * MIB)
    with pytest.raises(ConfigError, match=r"those that have: \[0, 2, 3\]"):
        check_numa_nodes((1,), MIB)


def test_a_kernel_without_nodes_has_none(machine: Path) -> None:
    (machine / "node" / "has_memory").unlink()
    with pytest.raises(ConfigError, match=r"node 0 has no memory for this process; those that have: \[\]"):
        check_numa_nodes((0,), MIB)


@pytest.mark.parametrize(
    ("text", "nodes"), [("2", (2,)), ("[0, 2]", (0, 2)), ("[]", ()), (f"{MAX_NUMA_NODES - 1}", (1023,))]
)
def test_the_setting_is_a_number_or_a_list(tmp_path: Path, text: str, nodes: tuple[int, ...]) -> None:
    (tmp_path / "kvfs.toml").write_text(f"[dram]\nnuma_nodes = {text}\n")
    assert load(tmp_path / "kvfs.toml").dram.numa_nodes == nodes


@pytest.mark.parametrize("text", ["-1", f"{MAX_NUMA_NODES}", "true", "1.5", '"0"', "[[0]]"])
def test_what_is_no_node_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "kvfs.toml").write_text(f"[dram]\nnuma_nodes = {text}\n")
    with pytest.raises(ConfigError, match="numa_nodes"):
        load(tmp_path / "kvfs.toml")


def test_a_directory_has_no_nodes(tmp_path: Path, machine: Path) -> None:
    (tmp_path / "kvfs.toml").write_text(
        f'[store]\ndata = "{tmp_path}"\n[dram]\ncapacity = "16MiB"\nbacking = "directory"\nnuma_nodes = 2\n'
    )
    with pytest.raises(ConfigError, match=r"numa_nodes = \[2\]: a directory has none"):
        check_room(load(tmp_path / "kvfs.toml"))


def test_a_start_looks_at_the_nodes(tmp_path: Path, machine: Path) -> None:
    (tmp_path / "kvfs.toml").write_text(
        f'[store]\ndata = "{tmp_path}"\n[dram]\ncapacity = "16MiB"\nnuma_nodes = 0\n[nvme]\ncapacity = 0\n'
    )
    with pytest.raises(
        ConfigError, match=r"numa_nodes = \[0\]: they have 8 MiB of memory, less than .* '16 MiB'"
    ):
        check_room(load(tmp_path / "kvfs.toml"))


def policy(root: Path) -> str:
    """What the tmpfs at a place was told."""
    [line] = [each for each in Path("/proc/mounts").read_text().splitlines() if each.split()[1] == str(root)]
    return next((each for each in line.split()[3].split(",") if each.startswith("mpol=")), "")


@needs_mount
@has_nodes
@pytest.mark.mount
def test_the_tmpfs_is_told_at_each_start(tmp_path: Path) -> None:
    root = tmp_path / "dram"
    for nodes, expected in (
        ((), ""),
        ((0,), "mpol=prefer:0"),
        ((0, 0), "mpol=interleave:0"),
        ((), "mpol=local"),
    ):
        tier = DramTier.open(root, 16 * MIB, store_id=STORE, mode="tmpfs", numa_nodes=nodes)
        assert policy(root) == expected
        tier.close(keep=True)
    DramTier.open(root, 16 * MIB, store_id=STORE, mode="tmpfs").close()
    assert not tmpfs.is_mounted(root)


@needs_mount
@has_nodes
@pytest.mark.mount
def test_nodes_that_the_kernel_refuses_stop_the_start_and_leave_what_was_there(tmp_path: Path) -> None:
    root = tmp_path / "dram"
    DramTier.open(root, 16 * MIB, store_id=STORE, mode="tmpfs").close(keep=True)
    with pytest.raises(ConfigError, match=r"on NUMA nodes \[1000\]"):
        DramTier.open(root, 16 * MIB, store_id=STORE, mode="tmpfs", numa_nodes=(1000,))
    tier = DramTier.open(root, 16 * MIB, store_id=STORE, mode="tmpfs")
    assert policy(root) == ""
    tier.close()


@needs_mount
@has_nodes
@pytest.mark.mount
def test_what_comes_in_place_of_what_lies_elsewhere_has_a_file_of_its_own(tmp_path: Path) -> None:
    """A file has the nodes that it was made for."""

    def started(*nodes: int) -> Store:
        return open_store(StoreOptions(tmp_path, 16 * MIB, max_slots=64, backing="tmpfs", numa_nodes=nodes))

    def files() -> set[int]:
        return {each.stat().st_ino for each in (tmp_path / "dram" / "slots").iterdir()}

    def put_anew(store: Store) -> None:
        for digest in digests:
            store.remove_block(digest)
            put_block(store, digest, b"x" * 5000)

    digests = [bytes([number]) * 16 for number in range(1, 33)]
    store = started()
    store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
    for digest in digests:
        put_block(store, digest, b"x" * 5000)
    store.close(keep=True)
    before = files()
    store = started(0)
    assert files() == before
    put_anew(store)
    moved = files()
    assert not moved & before
    put_anew(store)
    assert files() == moved
    store.close(keep=True)
    store = started(0)  # where they are to be
    put_anew(store)
    assert files() == moved
    store.close()


@needs_mount
@has_nodes
@pytest.mark.mount
def test_a_service_lies_on_the_nodes_of_its_configuration(tmp_path: Path) -> None:
    (config := tmp_path / "kvfs.toml").write_text("[dram]\nnuma_nodes = 1000\n")
    options = ("--no-mount", f"--config={config}", f"--data={tmp_path / 'data'}", "--nvme=0", "--dram=16MiB")
    done = run_kvfs("serve", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "numa_nodes = [1000]: node 1000 has no memory for this process" in done.stderr
    assert not (tmp_path / "data").exists()
    config.write_text("[dram]\nnuma_nodes = [0]\n")
    with Service(mode="off", nvme="0", dram="16MiB", arguments=("--config", str(config))) as service:
        assert policy(service.data / "dram") == "mpol=prefer:0"
