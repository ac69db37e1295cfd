"""Blocks of another machine by UCX's reliable connections over RDMA: soft-RoCE. Runs in the machine of packaging/rig
(`make test-rig`)."""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path

import pytest

from kvfs import limits
from kvfs._native.remote.stream import FOUND
from kvfs.errors import ConfigError
from kvfs.system.topology import rdma_ports
from tests.rig.nvme_target import RXE, add_rxe
from tests.support.machines import SECRET, machines, payload_of
from tiers.remote.connections.fabric import Fabric, load_fabric, near_devices
from tiers.remote.connections.identity import Identity
from tiers.remote.link import Want
from tiers.remote.peer import UcxOpener

if os.uname().nodename != "rig":
    pytest.skip("needs the machine of packaging/rig: make test-rig", allow_module_level=True)

SIZE = (3 << 20) + 5
WAIT_S = 50.0


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    add_rxe()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # Both ends of the connection have the same address, which UCX takes for somebody else's packets.
    os.environ |= {
        "UCX_NET_DEVICES": "rxe0:1",
        "UCX_TLS": "rc_v",
        "UCX_UD_VERBS_ETH_DGID_CHECK": "n",
    }
    for name in ("REMOTE_PROBE_S", "REMOTE_GREETING_S", "MAX_REMOTE_MATCH_S"):
        monkeypatch.setattr(limits, name, WAIT_S)  # the machine is twenty times slower than others
    try:
        return load_fabric()
    except ConfigError as error:
        pytest.skip(str(error))


def counted() -> Counter[str]:
    """Return what the device has counted: packets, and what became of those that were lost."""
    counters = (RXE / "ports/1/hw_counters").iterdir()
    return Counter({each.name: int(each.read_text()) for each in counters if each.name != "lifespan"})


def test_the_kernel_says_which_ports_there_are() -> None:
    """One, of software, which is as near to each node as any."""
    add_rxe()
    assert [each.name for each in rdma_ports()] == ["rxe0:1"]
    assert near_devices([0]) == {}


async def test_blocks_come_whole_over_rdma(tmp_path: Path, fabric: Fabric) -> None:
    async with machines(tmp_path, 1, transport="ucx") as [server]:
        digests = server.put([1, 2, 3], SIZE)
        host, _, port = server.address.rpartition(":")
        link, _ = await UcxOpener(fabric)(host, int(port), Identity(b"an asker's store", SECRET))
        assert link.transport == "ucx"
        paths = [tmp_path / digest.hex() for digest in digests]
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        wants = [
            Want(digest, SIZE, lambda path=path: os.open(path, flags))
            for digest, path in zip(digests, paths, strict=True)
        ]
        before = counted()
        reads, error = await link.read(server.bucket.namespace or b"", wants, WAIT_S, urgent=True)
        went = counted() - before
        assert error is None, went
        assert [read.status for read in reads] == [FOUND] * 3
        assert [path.read_bytes() for path in paths] == [payload_of(n, SIZE) for n in (1, 2, 3)]
        assert went["sent_pkts"] >= 3 * SIZE // 4096  # what went over the device
        link.close()
