"""Real services whose blocks go by UCX, and settings that ask for it where it cannot be had."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

import kvfs
from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError
from tests.support.machines import payload_of, write_secret
from tests.support.peer_services import peer_services, put, wait_for_peers
from tests.support.service import run_kvfs
from tests.support.stores import NAMESPACE
from tests.support.ucx import fabric_or_skip
from tiers.remote.connections.fabric import load_fabric

MIB = 1 << 20


def bytes_of(blocks: kvfs.Blocks, digests: list[bytes]) -> list[bytes]:
    into = bytearray(len(digests) * MIB)
    places = [memoryview(into)[i * MIB : (i + 1) * MIB] for i in range(len(digests))]
    assert blocks.get_into(digests, places) == [MIB] * len(digests)
    return [bytes(place) for place in places]


def test_services_read_by_ucx_and_outlive_a_peer_that_stops_or_is_killed(tmp_path: Path) -> None:
    fabric_or_skip()
    with peer_services(tmp_path, transport="ucx") as [first, second, third]:
        with kvfs.connect(first.data) as here, here.blocks(NAMESPACE) as source:
            digests = put(source, 24, MIB)
        with kvfs.connect(third.data) as here, here.blocks(NAMESPACE) as source:
            put(source, 4, MIB)
        with kvfs.connect(second.data) as there, there.blocks(NAMESPACE) as blocks:
            [peer, *_] = wait_for_peers(there, 2)["peers"]
            assert blocks.fetch(digests[8:], hint=peer["address"]).result() == 16
            assert bytes_of(blocks, digests[8:]) == [payload_of(i, MIB) for i in range(8, 24)]
            assert there.status()["cluster"]["peers"][0]["transport"] == "ucx"
            assert " ucx " in run_kvfs("cluster", "status", "--at", str(second.data)).stdout
            with first.paused():
                began_s = time.monotonic()
                assert blocks.fetch(digests[:4]).result() == 4  # of the other holder
                assert time.monotonic() - began_s < limits.REMOTE_READ_S
            first.kill()
            assert blocks.fetch(digests[:8]).result() == 4
            assert there.status()["open_drafts"] == 0
        with kvfs.connect(third.data) as there, there.blocks(NAMESPACE) as blocks:
            assert blocks.fetch(digests[8:20]).result() == 12
            assert bytes_of(blocks, digests[8:20]) == [payload_of(i, MIB) for i in range(8, 20)]


def test_a_service_without_a_device_for_it_does_not_start(tmp_path: Path) -> None:
    fabric_or_skip()
    config = tmp_path / "kvfs.toml"
    secret = write_secret(tmp_path / "secret")
    config.write_text(f"[cluster]\npeers = ['127.0.0.1:1']\nsecret_file = '{secret}'\ntransport = 'ucx'\n")
    data = str(tmp_path / "data")
    arguments = ("serve", "--data", data, "--no-mount", "--nvme", "0", "--config", str(config))
    done = run_kvfs(*arguments, environment={"UCX_TLS": "nothing"})
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "kvfs: [cluster] transport = 'ucx': UCX cannot be used here: No such device"
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'kvfs._native.remote.ucx'"), "libucx-dev"),
        (ImportError("libucp.so.0: cannot open shared object file"), "libucx0): libucp.so.0: cannot open"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, error: ImportError, says: str) -> None:
    def fail(name: str) -> None:
        assert name == "kvfs._native.remote.ucx"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError) as raised:
        load_fabric()
    assert str(raised.value).startswith("[cluster] transport = 'ucx': ")
    assert says in str(raised.value)


def test_what_would_not_be_encrypted_is_refused(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("secret_file", "certificate", "key", "authorities")}
    with pytest.raises(ValueError, match="not encrypted"):
        ClusterSettings.model_validate({"peers": ("a:1",), "transport": "ucx", **files})
    assert ClusterSettings.model_validate({"peers": ("a:1",), **files}).transport == "tcp"
