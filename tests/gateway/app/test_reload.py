"""SIGHUP to a service with an S3 endpoint: certificates and credentials are read again, by all workers or by none."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from tests.support.certificates import certificate
from tests.support.gateway import ACCESS, OTHER_ACCESS, OTHER_SECRET, Gateway, gateway, until
from tests.support.waits import WAIT_S

CONNECTIONS = 24
"""So many that each of two workers gets one: that none does has a chance of 2 ** -23."""
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def pairs(tmp_path: Path) -> list[tuple[Path, Path]]:
    """Two certificates with their keys."""
    made = []
    for name in "ab":
        (tmp_path / name).mkdir()
        made.append(certificate(tmp_path / name))
    return made


@pytest.fixture
def used(pairs: list[tuple[Path, Path]], tmp_path: Path) -> tuple[Path, Path]:
    """The files that the endpoint is configured with: the first pair, to begin with."""
    files = tmp_path / "used.pem", tmp_path / "used.key"
    replace(files, pairs[0])
    return files


def replace(files: tuple[Path, Path], by: tuple[Path, Path]) -> None:
    for file, source in zip(files, by, strict=True):
        shutil.copy(source, file)


def der(pair: tuple[Path, Path]) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair[0].read_text())


@pytest.fixture
def door(used: tuple[Path, Path], workers: int) -> Iterator[Gateway]:
    with gateway(certificate=used, settings=f"workers = {workers}") as found:
        yield found
        assert "Traceback" not in found.service.log()


def connect(door: Gateway) -> http.client.HTTPSConnection:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    found = http.client.HTTPSConnection(door.host, door.port, context=context, timeout=WAIT_S)
    found.connect()
    return found


def shown(connection: http.client.HTTPSConnection) -> bytes | None:
    assert isinstance(connection.sock, ssl.SSLSocket)
    return connection.sock.getpeercert(binary_form=True)


def shown_to_all(door: Gateway) -> set[bytes | None]:
    """What new connections are shown."""
    found = set()
    for _ in range(CONNECTIONS):
        connection = connect(door)
        found.add(shown(connection))
        connection.close()
    return found


def reload(door: Gateway, line: str, count: int) -> None:
    """Have files read again, and wait until `count` workers have logged `line`."""
    before = door.service.log().count(line)
    door.service.running.send_signal(signal.SIGHUP)
    until(lambda: door.service.log().count(line) >= before + count, door)


def answers(connection: http.client.HTTPSConnection) -> int:
    """The status of an unsigned request, on this very connection."""
    sock = connection.sock
    connection.request("GET", "/")
    answer = connection.getresponse()
    answer.read()
    assert connection.sock is sock, "the endpoint has closed the connection"
    return answer.status


# --- certificates ------------------------------------------------------------------------------------------
def test_new_connections_see_the_new_certificate_and_old_ones_go_on(
    door: Gateway, used: tuple[Path, Path], pairs: list[tuple[Path, Path]], workers: int
) -> None:
    old = [connect(door) for _ in range(8)]
    assert {shown(each) for each in old} == {der(pairs[0])}
    assert {answers(each) for each in old} == {403}
    replace(used, pairs[1])
    assert shown_to_all(door) == {der(pairs[0])}
    reload(door, "was read again", workers)
    assert shown_to_all(door) == {der(pairs[1])}
    assert {answers(each) for each in old} == {403}
    assert {shown(each) for each in old} == {der(pairs[0])}
    for each in old:
        each.close()


@pytest.mark.parametrize("how", ["no certificate", "another's key", "no file"])
def test_a_broken_certificate_leaves_the_old_one_in_use(
    door: Gateway, used: tuple[Path, Path], pairs: list[tuple[Path, Path]], workers: int, how: str
) -> None:
    pids = door.worker_pids()
    if how == "no certificate":
        used[0].write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    elif how == "another's key":
        replace(used, (pairs[1][0], pairs[0][1]))
    else:
        used[0].unlink()
    reload(door, "the old certificate stays in use", workers)
    assert str(used[0]) in door.service.log()
    assert shown_to_all(door) == {der(pairs[0])}
    assert door.worker_pids() == pids
    replace(used, pairs[1])
    reload(door, "was read again", workers)
    assert shown_to_all(door) == {der(pairs[1])}


# --- credentials -------------------------------------------------------------------------------------------
def code(door: Gateway, access: str, secret: str) -> str:
    """How ListBuckets ends, of new connections: one code from all of them."""
    found = set()
    for _ in range(CONNECTIONS // 2):
        client = door.client(access, secret)
        try:
            client.list_buckets()
            found.add("OK")
        except ClientError as error:
            found.add(error.response["Error"]["Code"])
        finally:
            client.close()
    [only] = found
    return str(only)


def test_credentials_are_read_again(workers: int) -> None:
    with gateway(settings=f"workers = {workers}") as door:
        file = door.service.base / "kvfs.toml"
        first = file.read_text()
        assert [code(door, OTHER_ACCESS, OTHER_SECRET), code(door, "LATER", OTHER_SECRET)] == [
            "OK",
            "InvalidAccessKeyId",
        ]
        file.write_text(first.replace(OTHER_ACCESS, "LATER"))
        reload(door, "credentials were read again", workers)
        changed = ["InvalidAccessKeyId", "OK"]
        assert [code(door, OTHER_ACCESS, OTHER_SECRET), code(door, "LATER", OTHER_SECRET)] == changed
        for broken in ("[s3", first.replace(ACCESS, "")):
            file.write_text(broken)
            reload(door, "the old ones stay in use", workers)
            assert [code(door, OTHER_ACCESS, OTHER_SECRET), code(door, "LATER", OTHER_SECRET)] == changed
        assert OTHER_SECRET not in door.service.log()


def test_a_worker_that_is_started_again_does_not_take_revoked_credentials() -> None:
    with gateway() as door:
        file = door.service.base / "kvfs.toml"
        file.write_text(file.read_text().replace(OTHER_ACCESS, "LATER"))
        reload(door, "credentials were read again", 1)
        file.write_text("[s3")
        [pid] = door.worker_pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: door.worker_pids() not in ([], [pid]) and _listens(door), door)
        assert code(door, "LATER", OTHER_SECRET) == "OK"
        assert code(door, OTHER_ACCESS, OTHER_SECRET) == "InvalidAccessKeyId"


def _listens(door: Gateway) -> bool:
    try:
        door.client("LATER", OTHER_SECRET).list_buckets()
    except EndpointConnectionError:
        return False
    except ClientError:
        return True
    return True
