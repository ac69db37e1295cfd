"""Three real services that find each other by a directory, through the client and the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvfs
from tests.support.directory_server import directory_server, needs_server
from tests.support.machines import digest_of, payload_of, write_secret
from tests.support.own_ports import own_port
from tests.support.service import Service, run_kvfs
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S

SIZE_BYTES = 1 << 16
pytestmark = needs_server


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Service]]:
    secret = write_secret(tmp_path / "secret")
    with directory_server(tmp_path) as server, ExitStack() as stack:
        running = []
        for number in (1, 2, 3):
            address = f"127.0.0.{number}:{own_port()}"
            config = tmp_path / f"{number}.toml"
            config.write_text(
                f"[cluster]\nlisten = '{address}'\nsecret_file = '{secret}'\n"
                f"directory = '{server.url}'\nmatch_wait_s = 1\n"
            )
            running.append(stack.enter_context(Service(mode="off", arguments=["--config", str(config)])))
        yield running


def wait_for_members(client: kvfs.Client, count: int) -> dict[str, Any]:
    end = time.monotonic() + WAIT_S
    while (found := client.status()["cluster"]["directory"])["members_count"] != count:
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return dict(found)


def test_a_block_put_on_one_is_read_on_the_others_and_status_shows_them(services: list[Service]) -> None:
    first, second, third = services
    digests = [digest_of(number) for number in range(1, 21)]
    with (
        kvfs.connect(first.data) as here,
        here.blocks(NAMESPACE) as source,
        kvfs.connect(second.data) as there,
        there.blocks(NAMESPACE) as blocks,
    ):
        wait_for_members(there, 3)
        wait_for_members(here, 3)
        payloads = [payload_of(number, SIZE_BYTES) for number in range(1, 21)]
        assert all(source.put(digests, payloads, [None, *digests[:-1]]))
        end = time.monotonic() + WAIT_S
        while not (located := blocks.match_cluster(digests).result()) or max(located.values()) < 20:
            assert time.monotonic() < end, located
            time.sleep(0.01)
        assert blocks.match(digests) == 0
        assert blocks.fetch(digests).result() == 20
        into = bytearray(20 * SIZE_BYTES)
        places = [memoryview(into)[i * SIZE_BYTES : (i + 1) * SIZE_BYTES] for i in range(20)]
        assert blocks.get_into(digests, places) == [SIZE_BYTES] * 20
        assert bytes(into) == b"".join(payloads)
    shown = run_kvfs("cluster", "status", "--at", str(second.data))
    assert shown.returncode == 0, shown.stderr
    assert "joined with epoch" in " ".join(shown.stdout.split())
    [peer] = located
    assert peer.rpartition(":")[0] in shown.stdout
    found = json.loads(run_kvfs("cluster", "status", "--json", "--at", str(third.data)).stdout)
    assert [member["is_self"] for member in found["directory"]["members"]].count(True) == 1
    metrics = run_kvfs("status", "--metrics", "--at", str(second.data)).stdout
    assert "kvfs_directory_members 3.0" in metrics
    third.stop()
    with kvfs.connect(second.data) as there:
        wait_for_members(there, 2)


def test_a_url_that_is_none_and_a_missing_address_stop_the_start(tmp_path: Path) -> None:
    secret = write_secret(tmp_path / "secret")
    for listen, url, says in (
        ("127.0.0.1:1", "http://x", "redis://HOST:PORT/DB"),
        ("0.0.0.0:9400", "redis://127.0.0.1:1/0", "set address"),
    ):
        config = tmp_path / "kvfs.toml"
        config.write_text(f"[cluster]\nlisten = '{listen}'\nsecret_file = '{secret}'\ndirectory = '{url}'\n")
        done = run_kvfs("serve", "--data", str(tmp_path / "data"), "--no-mount", "--config", str(config))
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
