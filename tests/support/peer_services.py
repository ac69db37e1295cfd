"""Real services that are each other's peers, on loopback addresses, and what tests of them do most."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import kvfs
from kvfs import limits
from tests.support.certificates import ClusterTls
from tests.support.machines import digest_of, payload_of, write_secret
from tests.support.own_ports import own_port
from tests.support.service import Service


@contextmanager
def peer_services(
    folder: Path,
    count: int = 3,
    directory: str = "",
    module: str = "kvfs",
    tls: ClusterTls | None = None,
    transport: str = "tcp",
) -> Iterator[list[Service]]:
    """Run services that know each other, themselves included, by their settings or by a directory. `module`: what is
    run."""
    addresses = [f"127.0.0.{number}" for number in range(1, count + 1)]
    addresses = [f"{host}:{own_port()}" for host in addresses]
    secret = write_secret(folder / "secret")
    files = f"transport = '{transport}'\n"
    files += "" if tls is None else "".join(f"{name} = '{path}'\n" for name, path in tls._asdict().items())
    with ExitStack() as stack:
        running = []
        for number, address in enumerate(addresses):
            config = folder / f"{number}.toml"
            known = f"directory = '{directory}'" if directory else f"peers = {list(addresses)}"
            config.write_text(
                f"[cluster]\nlisten = '{address}'\n{known}\nsecret_file = '{secret}'\nmatch_wait_s = 1\n{files}"
            )
            service = Service(mode="off", arguments=["--config", str(config)], module=module)
            running.append(stack.enter_context(service))
        yield running


def wait_for_peers(client: kvfs.Client, count: int) -> dict[str, Any]:
    """Return the cluster's status once so many peers are up: those that started later are tried again in a while."""
    end = time.monotonic() + limits.MAX_REMOTE_BACKOFF_S
    while (cluster := client.status()["cluster"])["peers_up"] != count:
        assert time.monotonic() < end, cluster
        time.sleep(0.02)
    return dict(cluster)


def put(blocks: kvfs.Blocks, count: int, size_bytes: int, first: int = 0) -> list[bytes]:
    """Put blocks with the numbers from `first` on, each the child of the one before; return their digests."""
    numbers = range(first, first + count)
    digests = [digest_of(number) for number in numbers]
    payloads = [payload_of(number, size_bytes) for number in numbers]
    assert all(blocks.put(digests, payloads, [None, *digests[:-1]]))
    return digests


def have(service: Service, digests: list[bytes], namespace: kvfs.Namespace, size_bytes: int) -> bool:
    """Return whether a service has all of the blocks that `put` made, with the right bytes."""
    with kvfs.connect(service.data) as client, client.blocks(namespace) as blocks:
        into = bytearray(len(digests) * size_bytes)
        places = [memoryview(into)[i * size_bytes : (i + 1) * size_bytes] for i in range(len(digests))]
        if blocks.get_into(digests, places) != [size_bytes] * len(digests):
            return False
    return bytes(into) == b"".join(payload_of(number, size_bytes) for number in range(len(digests)))
