"""The RDMA cards that bytes go by, on machines that are described by files as the kernel's."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import ConfigError
from kvfs.system.topology import RdmaPort, list_numbers, nearest_ports, node_distances, rdma_ports
from tiers.remote.connections import fabric
from tiers.remote.connections.fabric import near_devices

TWO_SOCKETS = {0: "10 21", 1: "21 10"}


def described(root: Path, cards: Mapping[str, tuple[int | None, str]], nodes: Mapping[int, str]) -> Path:
    """Write files as of a machine: of each card its node and the states of its ports, of each node its distances."""
    for name, (node, states) in cards.items():
        card = root / "class/infiniband" / name
        for number, state in enumerate(states.split(), 1):
            (card / f"ports/{number}").mkdir(parents=True)
            (card / f"ports/{number}/state").write_text({"up": "4: ACTIVE\n", "down": "1: DOWN\n"}[state])
        if node is not None:
            (card / "device").mkdir()
            (card / "device/numa_node").write_text(f"{node}\n")
    for node, distances in nodes.items():
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
        (root / f"devices/system/node/node{node}/distance").write_text(f"{distances}\n")
    if nodes:
        (root / "devices/system/node/online").write_text(",".join(map(str, nodes)) + "\n")
    return root


def test_ports_that_are_up_and_their_nodes_are_read(tmp_path: Path) -> None:
    cards = {"mlx5_1": (1, "up down"), "mlx5_0": (0, "up"), "rxe0": (None, "up"), "mlx5_2": (-1, "up")}
    assert rdma_ports(described(tmp_path, cards, {})) == [
        RdmaPort("mlx5_0:1", 0),
        RdmaPort("mlx5_1:1", 1),
        RdmaPort("mlx5_2:1", None),
        RdmaPort("rxe0:1", None),
    ]


def test_distances_are_those_of_the_nodes_that_are_online(tmp_path: Path) -> None:
    nodes = {0: "10 21 31", 2: "21 10 31", 5: "31 31 10"}
    assert node_distances(described(tmp_path, {}, nodes)) == {
        0: {0: 10, 2: 21, 5: 31},
        2: {0: 21, 2: 10, 5: 31},
        5: {0: 31, 2: 31, 5: 10},
    }
    assert node_distances(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("nodes", "devices"),
    [
        ((), None),
        ((0,), "mlx5_0:1"),
        ((1,), "mlx5_1:1,mlx5_1:2"),
        ((0, 1), None),
        ((7,), None),  # of which nothing is known
    ],
)
def test_the_cards_of_the_slots_socket_are_named(
    tmp_path: Path, nodes: tuple[int, ...], devices: str | None
) -> None:
    root = described(tmp_path, {"mlx5_0": (0, "up"), "mlx5_1": (1, "up up")}, TWO_SOCKETS)
    assert near_devices(nodes, root) == ({} if devices is None else {"UCX_NET_DEVICES": devices})


def test_the_next_node_counts_where_the_nearest_has_no_card(tmp_path: Path) -> None:
    """As of CXL memory, which has no card and no processor."""
    nodes = {0: "10 21 14", 1: "21 10 24", 2: "14 24 10"}
    root = described(tmp_path, {"mlx5_0": (0, "up"), "mlx5_1": (1, "up")}, nodes)
    assert near_devices((2,), root) == {"UCX_NET_DEVICES": "mlx5_0:1"}


def test_a_card_that_is_down_is_passed_over(tmp_path: Path) -> None:
    root = described(tmp_path, {"mlx5_0": (0, "down"), "mlx5_1": (1, "up")}, TWO_SOCKETS)
    assert near_devices((0,), root) == {}
    assert near_devices((0,), tmp_path / "none") == {}


def test_a_card_whose_place_is_unknown_is_as_near_as_any(tmp_path: Path) -> None:
    cards = {"mlx5_0": (0, "up"), "mlx5_1": (1, "up"), "rxe0": (None, "up")}
    root = described(tmp_path, cards, TWO_SOCKETS)
    assert near_devices((1,), root) == {"UCX_NET_DEVICES": "mlx5_1:1,rxe0:1"}


@pytest.mark.parametrize(("said", "used"), [("eth0", "eth0"), (None, "mlx5_1:1")])
def test_what_the_environment_says_counts_before(
    monkeypatch: pytest.MonkeyPatch, said: str | None, used: str
) -> None:
    def is_missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(os, "environ", {} if said is None else {"UCX_NET_DEVICES": said})
    monkeypatch.setattr(
        fabric, "near_devices", lambda nodes: {"UCX_NET_DEVICES": "mlx5_1:1"} if nodes else {}
    )
    monkeypatch.setattr(importlib, "import_module", is_missing)
    with pytest.raises(ConfigError):
        fabric.load_fabric((1,))
    assert os.environ["UCX_NET_DEVICES"] == used


PORTS = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.none(), st.integers(0, 3))),
    unique_by=lambda p: p[0],
    max_size=6,
)


@given(
    PORTS,
    st.lists(st.lists(st.integers(10, 40), min_size=4, max_size=4), min_size=4, max_size=4),
    st.sets(st.integers(0, 4)),
)
def test_no_port_that_is_left_out_is_nearer_than_one_that_is_used(
    described_ports: list[tuple[int, int | None]], rows: list[list[int]], nodes: set[int]
) -> None:
    ports = [RdmaPort(f"mlx5_{number}:1", node) for number, node in described_ports]
    distances = {node: dict(enumerate(row)) for node, row in enumerate(rows)}
    used = nearest_ports(ports, nodes, distances)
    assert bool(used) == bool(ports)
    assert used == [each for each in ports if each in used]
    for node in nodes & distances.keys():
        placed = [each for each in ports if each.numa_node is not None]
        for left_out in (each for each in placed if each not in used):
            assert any(
                distances[node][each.numa_node] < distances[node][left_out.numa_node]
                for each in used
                if each.numa_node is not None and left_out.numa_node is not None
            )
    assert all(each in used for each in ports if each.numa_node is None)


def test_lists_of_the_kernel() -> None:
    assert list_numbers("0-1,3\n") == {0, 1, 3}
    assert list_numbers("\n") == set()
