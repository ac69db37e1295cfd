"""A drive that does not answer, through each door: who reads what only it has is told so, and gets it later."""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from kvfs import limits
from kvfs.errors import DeviceAway, KvfsError, NotFound
from kvfs.keys import block_name
from tests.support.door import ON_DIRECTORY
from tests.support.gateway import Gateway, gateway
from tests.support.service import Service, sink
from tests.support.silent_service import MODULE, VARIABLE
from tests.support.small_store import watched
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Read = Callable[[Gateway, str], bytes]
KEY = bytes(range(1, 17))
BLOCK = f"blocks/{block_name(KEY).decode()}"
DATA = {"cached/a": b"a" * 70_001, "durable/a": b"d" * 70_001, BLOCK: b"b" * 70_001}


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that silences the drive."""
    return tmp_path_factory.mktemp("silent") / "flag"


@pytest.fixture(scope="module")
def door(flag: Path) -> Iterator[Gateway]:
    environment = {VARIABLE: str(flag)}
    with gateway(mode="auto", dram="64MiB", nvme="128MiB", module=MODULE, environment=environment) as running:
        with running.service.client() as client:
            for bucket in ("cached", "durable"):
                client.create_bucket(bucket, durable=bucket == "durable")
                client.put(f"{bucket}/a", DATA[f"{bucket}/a"])
            with client.blocks(NAMESPACE, bucket="blocks") as blocks:
                blocks.put([KEY], [DATA[BLOCK]], [None])
        with watched(running.service):
            yield running
        assert "Traceback" not in running.service.log()


def by_mount(door: Gateway, name: str) -> bytes:
    return (door.service.mount / name).read_bytes()


def by_s3(door: Gateway, name: str) -> bytes:
    bucket, _, key = name.partition("/")
    return bytes(door.client().get_object(Bucket=bucket, Key=key)["Body"].read())


def by_session(door: Gateway, name: str) -> bytes:
    with door.service.client() as client:
        return bytes(client.get(name))


def answer(read: Read, door: Gateway, name: str) -> object:
    """Read; return the bytes or what was told instead, as the door tells it."""
    try:
        return read(door, name)
    except OSError as error:
        return error.errno
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"]
    except KvfsError as error:
        return type(error)


def is_away(service: Service) -> bool:
    with service.client() as client:
        return client.status()["tiers"][1]["away_since_ns"] is not None


@pytest.mark.parametrize(
    ("read", "away", "missing"),
    [
        pytest.param(by_mount, errno.EHOSTDOWN, errno.ENOENT, id="mount"),
        pytest.param(by_s3, 503, 404, id="s3"),
        pytest.param(by_session, DeviceAway, NotFound, id="session"),
    ],
)
@pytest.mark.parametrize("first", DATA, ids=["cached", "durable", "block"])
def test_a_read_is_answered_while_the_drive_is_silent_and_has_the_bytes_later(
    door: Gateway, flag: Path, first: str, read: Read, away: object, missing: object
) -> None:
    """Whoever reads first finds out about the drive; who comes later is told at once."""
    with door.service.client() as client:
        sink(client, list(DATA))
    flag.touch()
    began_s = time.monotonic()
    for name in sorted(DATA, key=lambda name: name != first):
        assert answer(read, door, name) == (away if name.startswith("durable") else missing)
    assert time.monotonic() - began_s < limits.CLIENT_TIMEOUT_S
    assert is_away(door.service)
    flag.unlink()
    door.service.running.send_signal(signal.SIGUSR1)
    eventually(lambda: not is_away(door.service), "the drive is back")
    for name, data in DATA.items():
        assert read(door, name) == data
