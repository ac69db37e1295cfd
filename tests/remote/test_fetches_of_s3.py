"""Blocks that another machine has, asked for at an S3 endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.keys import block_name
from kvfs.limits import MIB
from tests.support.gateway import Gateway, fails, gateway
from tests.support.machines import digest_of, payload_of, write_secret
from tests.support.own_ports import own_port
from tests.support.service import Service
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually

COUNT = 24


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """An endpoint of a machine that has none of the blocks; another one has them."""
    base, address = tmp_path_factory.mktemp("machines"), f"127.0.0.1:{own_port()}"
    secret = f"secret_file = '{write_secret(base / 'secret')}'\nmatch_wait_s = 1\n"
    config = base / "other.toml"
    config.write_text(f"[cluster]\nlisten = '{address}'\n{secret}")
    peers = f"[cluster]\npeers = ['{address}']\n{secret}"
    with (
        Service(mode="off", arguments=["--config", str(config)]) as other,
        gateway(mode="off", sections=peers, settings="workers = 1") as here,
    ):
        with other.client() as client, client.blocks(NAMESPACE, bucket="blocks") as blocks:
            digests = [digest_of(number) for number in range(COUNT)]
            payloads = [payload_of(number, MIB) for number in range(COUNT)]
            assert all(blocks.put(digests, payloads, [None, *digests[:-1]]))
        with here.service.client() as client:
            eventually(lambda: client.status()["cluster"]["peers_up"] == 1, "the other machine is up")
            client.blocks(NAMESPACE, bucket="blocks").close()
        yield here
        assert not here.service.complaints()


def cluster(door: Gateway) -> dict[str, Any]:
    with door.service.client() as client:
        return dict(client.status()["cluster"])


def name_of(number: int) -> str:
    return block_name(digest_of(number)).decode()


def read(door: Gateway, number: int) -> bytes:
    found = door.client().get_object(Bucket="blocks", Key=name_of(number))
    return bytes(found["Body"].read())


def test_a_block_of_another_machine_is_read_and_is_here_then(door: Gateway) -> None:
    assert read(door, 0) == payload_of(0, MIB)
    fetched = cluster(door)["fetched_blocks"]
    assert read(door, 0) == payload_of(0, MIB)
    assert cluster(door)["fetched_blocks"] == fetched
    with door.service.client() as client:
        assert client.stat(f"blocks/{name_of(0)}").tier == "dram"


def test_its_size_is_said(door: Gateway) -> None:
    assert door.client().head_object(Bucket="blocks", Key=name_of(1))["ContentLength"] == MIB


def test_many_are_asked_for_at_once(door: Gateway) -> None:
    numbers = [*range(2, COUNT), *range(2, COUNT)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: read(door, number), numbers))
    assert found == [payload_of(number, MIB) for number in numbers]
    assert cluster(door)["fetched_blocks"] <= COUNT


def test_what_nobody_has_is_a_miss(door: Gateway) -> None:
    s3, key = door.client(), block_name(bytes(range(16))).decode()
    fails(lambda: s3.get_object(Bucket="blocks", Key=key), "NoSuchKey", 404)
    fails(lambda: s3.head_object(Bucket="blocks", Key=key), "404", 404)


def test_others_are_asked_for_blocks_of_caches_alone(door: Gateway) -> None:
    """Objects have no content that their names say, and what is fetched into a durable bucket would stay there."""
    s3, before = door.client(), cluster(door)["matches"]
    s3.create_bucket(Bucket="plain")
    fails(lambda: s3.get_object(Bucket="plain", Key=name_of(1)), "NoSuchKey", 404)
    fails(lambda: s3.get_object(Bucket="blocks", Key="kv/another"), "NoSuchKey", 404)
    assert cluster(door)["matches"] == before


def test_a_machine_without_others_has_misses(tmp_path: Path) -> None:
    with gateway(mode="off") as door:
        with door.service.client() as client, client.blocks(NAMESPACE, bucket="blocks") as blocks:
            assert isinstance(blocks, kvfs.Blocks)
        s3 = door.client()
        for _ in range(2):
            fails(lambda: s3.get_object(Bucket="blocks", Key=name_of(1)), "NoSuchKey", 404)
        assert not door.service.complaints()
