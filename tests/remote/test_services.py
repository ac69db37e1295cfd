"""Three real services that read each other's blocks, through the client."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import limits
from tests.support.machines import digest_of, payload_of, write_secret
from tests.support.peer_services import peer_services, put, wait_for_peers
from tests.support.service import Service, run_kvfs
from tests.support.session_answers import ALICE, BOB
from tests.support.sessions import fork
from tests.support.stores import NAMESPACE

MIB = 1 << 20


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Service]]:
    with peer_services(tmp_path) as running:
        yield running


def test_a_client_has_blocks_fetched_and_reads_them_here(services: list[Service]) -> None:
    first, second, _ = services
    with (
        kvfs.connect(first.data) as here,
        here.blocks(NAMESPACE) as source,
        kvfs.connect(second.data) as there,
        there.blocks(NAMESPACE) as blocks,
    ):
        wait_for_peers(there, 2)
        digests = put(source, 20, MIB)
        assert blocks.match(digests) == 0
        [(peer, count)] = blocks.match_cluster(digests).result().items()
        assert count == 20
        assert blocks.fetch(digests[:4], hint=peer).result() == 4
        assert blocks.fetch([*digests, digest_of(99)]).result() == 20
        into = bytearray(20 * MIB)
        places = [memoryview(into)[i * MIB : (i + 1) * MIB] for i in range(20)]
        assert blocks.get_into(digests, places) == [MIB] * 20
        assert all(bytes(places[i]) == payload_of(i, MIB) for i in range(20))
        status = there.status()["cluster"]
        assert status["fetched_bytes"] == 20 * MIB
        assert here.status()["cluster"]["served_bytes"] == 20 * MIB
        assert status["peers_up"] == status["peers_configured"] == 2
        with pytest.raises(kvfs.KvfsError, match="hint"):
            blocks.fetch(digests, hint="127.0.0.9:1").result()
    shown = run_kvfs("cluster", "status", "--at", str(second.data))
    assert shown.returncode == 0, shown.stderr
    assert peer in shown.stdout
    metrics = run_kvfs("status", "--metrics", "--at", str(second.data)).stdout
    assert "kvfs_cluster_fetched_bytes_total 2.097152e+07" in metrics


def test_a_killed_and_a_stopped_peer_cost_a_bounded_wait_and_a_miss(services: list[Service]) -> None:
    first, second, third = services
    with kvfs.connect(first.data) as here, here.blocks(NAMESPACE) as source:
        digests = put(source, 8, MIB)
    with kvfs.connect(third.data) as here, here.blocks(NAMESPACE) as source:
        put(source, 4, MIB)
    with kvfs.connect(second.data) as there, there.blocks(NAMESPACE) as blocks:
        wait_for_peers(there, 2)
        assert blocks.fetch(digests[:1], hint=there.status()["cluster"]["peers"][0]["address"]).result() == 1
        with first.paused():
            began = time.monotonic()
            assert blocks.fetch(digests[1:]).result() == 3  # of the other holder
            assert time.monotonic() - began < limits.REMOTE_READ_S
            assert there.status()["cluster"]["deadlines"] >= 1
        first.kill()
        assert blocks.fetch(digests).result() == 4
        assert there.status()["open_drafts"] == 0


def test_an_address_in_use_and_a_missing_secret_stop_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = tmp_path / "kvfs.toml"
        for secret, says in (
            (write_secret(tmp_path / "secret"), "in use"),
            (tmp_path / "none", "No such file"),
        ):
            config.write_text(f"[cluster]\nlisten = '{address}'\nsecret_file = '{secret}'\n")
            done = run_kvfs(
                "serve",
                "--data",
                str(tmp_path / "data"),
                "--no-mount",
                "--nvme",
                "0",
                "--config",
                str(config),
            )
            assert done.returncode == 2, done.stderr
            assert done.stderr.splitlines()[-1].startswith("kvfs: [cluster] ")
            assert says in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")
def test_fetching_into_a_durable_bucket_takes_the_right_to_write() -> None:
    def fetch(service: Service, uid: int) -> Any:
        def run(_: socket.socket) -> None:
            with kvfs.connect(service.data) as client, client.blocks(NAMESPACE, bucket="kept") as blocks:
                blocks.fetch([digest_of(1)]).result()

        return fork(run, uid=uid, gid=uid).result()

    with Service(mode="off", nvme="128MiB") as service:
        with kvfs.connect(service.data) as client:
            client.create_bucket("kept", durable=True, mode=0o775)
            client.set_attributes("kept", uid=ALICE, gid=ALICE)
            with client.blocks(NAMESPACE, bucket="kept") as blocks:
                assert blocks.match([digest_of(1)]) == 0
        with pytest.raises(kvfs.AccessDenied, match="write"):
            fetch(service, BOB)
        with pytest.raises(kvfs.Unsupported):  # the rights are there, a cluster is not
            fetch(service, ALICE)
