"""Tasks of real services, by the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from tests.support import patient_peers
from tests.support.directory_server import directory_server, needs_server
from tests.support.peer_services import have, peer_services, put, wait_for_peers
from tests.support.service import Service, run_kvfs, running_kvfs
from tests.support.session_answers import ALICE
from tests.support.sessions import fork
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually

SIZE_BYTES = 1 << 16


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Service]]:
    with peer_services(tmp_path, 2, module=patient_peers.MODULE) as running:
        yield running


def prepared(source: Service, target: Service, count: int = 100) -> tuple[list[bytes], str]:
    """Put blocks on one service and make their bucket on another; return their digests and the other's address."""
    with kvfs.connect(target.data) as there, there.blocks(NAMESPACE):
        wait_for_peers(there, 1)
    with kvfs.connect(source.data) as here, here.blocks(NAMESPACE) as blocks:
        status = wait_for_peers(here, 1)
        digests = put(blocks, count, SIZE_BYTES)
    [address] = [peer["address"] for peer in status["peers"] if not peer["is_self"]]
    return digests, address


def test_a_copy_is_followed_to_its_end(services: list[Service]) -> None:
    first, second = services
    digests, address = prepared(first, second)
    done = run_kvfs("cluster", "copy", "--to", address, "--at", str(first.data))
    assert done.returncode == 0, done.stderr
    assert "copy 1" in done.stdout
    assert "100 of 100 blocks" in " ".join(done.stdout.split())
    first.kill()
    assert have(second, digests, NAMESPACE, SIZE_BYTES)
    metrics = run_kvfs("status", "--metrics", "--at", str(second.data)).stdout
    assert "kvfs_cluster_pulled_blocks_total 100.0" in metrics


def test_a_move_takes_what_has_arrived_from_here(services: list[Service]) -> None:
    first, second = services
    digests, address = prepared(first, second)
    done = run_kvfs("cluster", "move", "--to", address, "--bucket", bucket_of(first), "--at", str(first.data))
    assert done.returncode == 0, done.stderr
    assert "100 blocks went from here; 0 stay, of which 0 are not there" in " ".join(done.stdout.split())
    with kvfs.connect(first.data) as client, client.blocks(NAMESPACE) as blocks:
        assert blocks.match(digests) == 0
    first.kill()
    assert have(second, digests, NAMESPACE, SIZE_BYTES)


def test_a_machine_that_is_killed_in_the_middle_is_named_and_tasks_are_shown(services: list[Service]) -> None:
    first, second = services
    _, address = prepared(first, second)
    at = ("--at", str(first.data))
    with second.paused():
        begun = run_kvfs("cluster", "copy", "--to", address, "--bucket", bucket_of(first), "--no-wait", *at)
        assert begun.returncode == 0, begun.stderr
        assert f"copy 1 to {address} runs" in run_kvfs("cluster", "status", *at).stdout
        assert run_kvfs("cluster", "copy", "--to", address, *at).returncode == 1
    second.kill()
    eventually(lambda: shown(first)["state"] == "failed", "the copy has failed")
    assert address in shown(first)["said"]
    tasks = run_kvfs("cluster", "tasks", *at)
    assert "failed" in tasks.stdout
    assert "blocks:" in tasks.stdout


def test_the_end_of_following_is_not_the_end_of_the_task_and_cancel_is(services: list[Service]) -> None:
    first, second = services
    _, address = prepared(first, second)
    at = ("--at", str(first.data))
    with second.paused(), running_kvfs("cluster", "copy", "--to", address, *at) as (process, _):
        eventually(lambda: bool(tasks(first)), "the copy has begun")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 130
        assert shown(first)["state"] == "runs"
        cancelled = run_kvfs("cluster", "cancel", "copy", *at)
        assert cancelled.returncode == 0, cancelled.stderr
        eventually(lambda: shown(first)["state"] == "cancelled", "the copy is cancelled")
        assert run_kvfs("cluster", "cancel", "copy", *at).returncode == 3


def test_nothing_is_lost_with_a_machine_that_was_drained_and_killed(tmp_path: Path) -> None:
    with peer_services(tmp_path, 3) as running:
        check_drain(running, 2)


@needs_server
def test_a_drain_asks_the_directory_who_has_what(tmp_path: Path) -> None:
    with directory_server(tmp_path) as server, peer_services(tmp_path, 3, server.url) as running:
        for service in running:
            eventually(lambda at=service: members(at) == 3, "all are members")
        check_drain(running, 0)


def members(service: Service) -> int:
    with kvfs.connect(service.data) as client:
        return int(client.status()["cluster"]["directory"]["members_count"])


def check_drain(services: list[Service], peers: int) -> None:
    """Drain one of three services of which another one has some of the blocks, kill it, and read all on the third."""
    first, second, third = services
    for service in (second, third):
        with kvfs.connect(service.data) as client, client.blocks(NAMESPACE) as blocks:
            if peers:
                wait_for_peers(client, peers)
            if service is second:
                put(blocks, 30, SIZE_BYTES)
    with kvfs.connect(first.data) as client, client.blocks(NAMESPACE) as blocks:
        if peers:
            wait_for_peers(client, peers)
        digests = put(blocks, 100, SIZE_BYTES)
        client.create_bucket("names")
        client.put("names/x", b"a name's")
        if not peers:
            eventually(
                lambda: 30 in blocks.match_cluster(digests[:30]).result().values(), "the directory knows them"
            )
    done = run_kvfs("cluster", "drain", "--at", str(first.data))
    assert done.returncode == 0, done.stderr
    assert "nothing is here alone; 1 named objects and 0 blocks of durable buckets stay" in " ".join(
        done.stdout.split()
    )
    assert shown(first)["there_blocks"] == 30
    first.kill()
    with kvfs.connect(third.data) as client, client.blocks(NAMESPACE) as blocks:
        assert blocks.fetch(digests).result() == 100
    assert have(third, digests, NAMESPACE, SIZE_BYTES)


def test_a_service_stops_within_its_bound_while_it_copies(services: list[Service]) -> None:
    first, second = services
    _, address = prepared(first, second)
    with second.paused():
        with kvfs.connect(first.data) as client:
            assert client.copy_blocks(address)["state"] == "runs"
        first.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")
def test_only_root_and_the_services_user_begin_and_cancel_tasks(services: list[Service]) -> None:
    first, second = services
    _, address = prepared(first, second, 1)

    def ask(_: socket.socket) -> None:
        with kvfs.connect(first.data) as client:
            with pytest.raises(kvfs.NotPermitted, match="copy blocks to other machines"):
                client.copy_blocks(address)
            with pytest.raises(kvfs.NotPermitted, match="move blocks to other machines"):
                client.move_blocks(address)
            with pytest.raises(kvfs.NotPermitted, match="drain the machine"):
                client.drain()
            with pytest.raises(kvfs.NotPermitted, match="cancel tasks"):
                client.cancel_task("copy")

    fork(ask, uid=ALICE, gid=ALICE).result()
    assert tasks(first) == []


def test_what_cannot_be_copied_is_refused_with_its_name(services: list[Service]) -> None:
    first, second = services
    _, address = prepared(first, second, 1)
    with kvfs.connect(first.data) as client:
        client.create_bucket("plain")
        with pytest.raises(kvfs.InvalidRequest, match="bound to a namespace"):
            client.copy_blocks(address, bucket="plain")
        with pytest.raises(kvfs.InvalidRequest, match="bound to a namespace"):
            client.copy_blocks(address, namespace=bytes(16))
        with pytest.raises(kvfs.InvalidRequest, match="not both"):
            client.copy_blocks(address, bucket="plain", namespace=bytes(16))
        with pytest.raises(kvfs.BucketNotFound):
            client.copy_blocks(address, bucket="none")
        with pytest.raises(kvfs.InvalidRequest, match="no blocks to move"):
            client.move_blocks(address, bucket="plain")
        assert client.copy_blocks(address, namespace=NAMESPACE.digest)["of_blocks"] in (0, 1)
    assert (
        run_kvfs("cluster", "copy", "--to", address, "--namespace", "x", "--at", str(first.data)).returncode
        == 1
    )


def tasks(service: Service) -> list[dict[str, Any]]:
    found = run_kvfs("cluster", "tasks", "--json", "--at", str(service.data))
    assert found.returncode == 0, found.stderr
    return list(json.loads(found.stdout))


def shown(service: Service) -> dict[str, Any]:
    [found] = tasks(service)
    return found


def bucket_of(service: Service) -> str:
    with kvfs.connect(service.data) as client:
        [bucket] = [each.name for each in client.buckets() if each.namespace is not None]
    return bucket
