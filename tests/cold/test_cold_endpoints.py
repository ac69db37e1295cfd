"""The cold tier over real S3 servers: moto's, and kvfs's own gateway; servers that die, break off and hang."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest

import kvfs
from kvfs import limits
from kvfs.config.settings import ColdSettings
from kvfs.errors import ConfigError, Corrupt, InvalidRequest, NotFound, TierUnreachable
from tests.support.cold import FolderBucket
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.gateway import ACCESS, SECRET, gateway
from tests.support.held_ports import HeldPort
from tests.support.processor_waits import within
from tests.support.service import Service
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually
from tiers.cold.bucket import ColdBucket, S3Bucket, open_bucket

moto_server = pytest.importorskip("moto.server", reason="moto's server is not installed")

HANG_S = 60


class Server:
    """An S3 server: where it is, and how it ends and comes back."""

    def __init__(self, url: str, access: str, secret: str) -> None:
        self.url, self.access, self.secret = url, access, secret
        self.bucket = f"cold-{os.urandom(4).hex()}"
        """Of its own: other tests have used the server, and what moto's keeps outlives it."""

    def settings(self, **values: Any) -> ColdSettings:
        given = {
            "bucket": self.bucket,
            "endpoint": self.url,
            "access_key": self.access,
            "secret_key": self.secret,
            "timeout_s": 2.0,
        }
        return ColdSettings.model_validate(given | values)

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )


@contextmanager
def moto(port: int = 0) -> Iterator[Server]:
    running = moto_server.ThreadedMotoServer("127.0.0.1", port, verbose=False)
    running.start()
    try:
        host, found = running.get_host_and_port()
        yield Server(f"http://{host}:{found}", "test", "test-secret-0123456789")
    finally:
        running.stop()


@contextmanager
def own_gateway() -> Iterator[Server]:
    need_mount()
    with gateway(dram="64MiB") as running:
        yield Server(running.url, ACCESS, SECRET)


SERVERS = {"moto": moto, "gateway": own_gateway}
PARAMS = [
    pytest.param("moto"),
    pytest.param("gateway", marks=[pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only once")]),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[str], Server]]:
    """One server of each kind, begun when it is first asked for, with the name of another bucket each time."""
    running: dict[str, Server] = {}
    with ExitStack() as alive:

        def find(kind: str) -> Server:
            if kind not in running:
                running[kind] = alive.enter_context(SERVERS[kind]())
            known = running[kind]
            return Server(known.url, known.access, known.secret)

        yield find


@pytest.fixture(params=PARAMS)
def server(request: pytest.FixtureRequest, shared: Callable[[str], Server]) -> Server:
    found = shared(request.param)
    found.client().create_bucket(Bucket=found.bucket)
    return found


@pytest.fixture(params=["folder", *PARAMS])
def bucket(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared: Callable[[str], Server],
) -> ColdBucket:
    """What the tier relies on, over each kind of bucket; pages of three names."""
    monkeypatch.setattr(limits, "MAX_LIST_ENTRIES", 3)
    if request.param == "folder":
        return FolderBucket(tmp_path / "bucket", page_size=3)
    found = shared(request.param)
    found.client().create_bucket(Bucket=found.bucket)
    return open_bucket(found.settings())


def get(bucket: ColdBucket, name: str, head_bytes: int, size_bytes: int) -> tuple[bytes, bytes, int]:
    head, payload = bytearray(head_bytes), bytearray(size_bytes)
    found = bucket.get(name, head, memoryview(payload))
    return bytes(head), bytes(payload), found


def test_a_bucket_keeps_and_lists_what_was_put(bucket: ColdBucket) -> None:
    names = [f"objects/{number:04x}" for number in range(8)]
    for number, name in enumerate(names):
        bucket.put(name, [b"head", memoryview(b"x" * number)])
    assert get(bucket, names[5], 4, 5) == (b"head", b"xxxxx", 9)
    assert get(bucket, names[5], 4, 7)[2] == 9
    assert get(bucket, names[0], 4, 0) == (b"head", b"", 4)
    assert bucket.read(names[5], 6) == b"headxx"
    found, after, more = [], "", True
    while more:
        page, more = bucket.page("objects/", after)
        assert len(page) <= 3
        found += page
        after = page[-1][0]
    assert found == [(name, 4 + number) for number, name in enumerate(names)]
    assert bucket.page("blocks/", "") == ([], False)
    assert bucket.delete([names[0], names[1], "objects/nothing"]) == []
    assert bucket.page("objects/", "")[0][0][0] == names[2]
    with pytest.raises(NotFound, match=names[0]):
        get(bucket, names[0], 4, 0)
    with pytest.raises(NotFound):
        bucket.read(names[0], 10)


def test_the_first_to_create_an_object_wins(bucket: ColdBucket) -> None:
    assert bucket.create("owner.json", b"first")
    assert not bucket.create("owner.json", b"second")
    assert bucket.read("owner.json", 100) == b"first"


def test_a_large_object_goes_up_and_down_whole(bucket: ColdBucket) -> None:
    data = os.urandom((8 << 20) + 5)
    bucket.put("objects/large", [b"h" * 128, memoryview(data)])
    head, payload, found = get(bucket, "objects/large", 128, len(data))
    assert (head, payload, found) == (b"h" * 128, data, 128 + len(data))


def test_more_bytes_than_were_asked_for_are_refused(server: Server) -> None:
    bucket = open_bucket(server.settings())
    bucket.put("objects/1", [b"head", b"payload"])
    with pytest.raises(Corrupt, match="more than 8"):
        get(bucket, "objects/1", 4, 4)


def test_a_prefix_hides_what_is_beside_it(server: Server) -> None:
    server.client().put_object(Bucket=server.bucket, Key="other/objects/1", Body=b"x")
    one, two = (open_bucket(server.settings(prefix=prefix)) for prefix in ("one/", "two/"))
    one.put("objects/1", [b"1"])
    two.put("objects/2", [b"22"])
    assert one.page("", "") == ([("objects/1", 1)], False)
    assert two.page("", "") == ([("objects/2", 2)], False)
    keys = {each["Key"] for each in server.client().list_objects_v2(Bucket=server.bucket)["Contents"]}
    assert keys == {"one/objects/1", "two/objects/2", "other/objects/1"}


@pytest.mark.mount
@pytest.mark.skipif(ON_DIRECTORY, reason="only once")
def test_whom_the_server_does_not_let_in_cannot_use_it(shared: Callable[[str], Server]) -> None:
    server = shared("gateway")
    bucket = open_bucket(server.settings(secret_key="another-secret-0123456789"))
    with pytest.raises(TierUnreachable, match="SignatureDoesNotMatch") as caught:
        bucket.put("objects/1", [b"x"])
    assert "another-secret" not in str(caught.value)
    with pytest.raises(TierUnreachable, match="NoSuchBucket"):
        open_bucket(server.settings()).read("objects/1", 1)


def test_what_the_server_will_never_take_is_told_apart() -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with answering(answer) as url, pytest.raises(InvalidRequest):
        open_bucket(Server(url, "a", "b" * 16).settings()).put("objects/1", [b"x"])


def test_an_answer_that_makes_no_sense_is_a_failure_like_others() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>") as url:
        bucket = open_bucket(Server(url, "a", "b" * 16).settings())
        with pytest.raises(TierUnreachable):
            bucket.page("", "")
        with pytest.raises(TierUnreachable):
            bucket.delete(["objects/1"])


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", None]
)
def test_a_server_that_fails_is_given_up_in_time(answer: bytes | None) -> None:
    """It closes at once, answers 500, or never answers."""
    with answering(answer) as url:
        bucket = open_bucket(Server(url, "a", "b" * 16).settings(timeout_s=0.5))
        start = time.monotonic()
        with pytest.raises(TierUnreachable):
            get(bucket, "objects/1", 4, 4)
        assert time.monotonic() - start < 20


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TierUnreachable):
            open_bucket(Server(url, "a", "b" * 16).settings()).page("", "")


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nConnection: close\r\n\r\nheadpayload"
    answers = [whole[:-3], whole]
    with answering(lambda: answers.pop(0)) as url:
        bucket = open_bucket(Server(url, "a", "b" * 16).settings())
        assert get(bucket, "objects/1", 4, 7) == (b"head", b"payload", 11)
    with answering(whole[:-3]) as url, pytest.raises(TierUnreachable):
        get(open_bucket(Server(url, "a", "b" * 16).settings()), "objects/1", 4, 7)


@contextmanager
def answering(answer: bytes | Callable[[], bytes] | None) -> Iterator[str]:
    """A server that gives every request this answer, or none."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                if answer is None:
                    held.append(connection)
                    continue
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer() if callable(answer) else answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


def test_without_boto3_the_configuration_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.cold.bucket.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kvfs\[cold\]"):
        open_bucket(ColdSettings(bucket="somewhere"))


def test_the_place_names_no_secret(server: Server) -> None:
    bucket = S3Bucket(server.settings())
    assert bucket.place == f"{server.url}/{server.bucket}/kvfs/"
    assert server.secret not in repr(server.settings())


# --- a whole service --------------------------------------------------------------------------------------
def configuration(server: Server) -> str:
    return (
        f'[cold]\nbucket = "{server.bucket}"\nendpoint = "{server.url}"\nadmit = "all"\ntimeout_s = 20\n'
        f'access_key = "{server.access}"\nsecret_key = "{server.secret}"\n'
    )


@contextmanager
def service_over(server: Server, *, nvme: str = "0") -> Iterator[Service]:
    need_mount()
    service = Service(dram="64MiB", nvme=nvme)
    file = service.base / "kvfs.toml"
    file.write_text(configuration(server))
    service.arguments = ["--config", str(file)]
    watchdog = threading.Timer(HANG_S, service.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        with service:
            yield service
    finally:
        watchdog.cancel()


def cold(service: Service) -> dict[str, Any]:
    with service.client() as client:
        return next(tier for tier in client.status()["tiers"] if tier["name"] == "cold")


def sent(service: Service, count: int) -> None:
    eventually(lambda: cold(service)["uploads"] >= count, f"{count} objects are sent")


def evict(service: Service, count: int) -> None:
    """Empty DRAM; what was just sent may be held for another moment."""

    def is_done() -> bool:
        with service.client() as client:
            client.evict(size_bytes=1 << 30)
            return bool(client.status()["demotions"] >= count)

    eventually(is_done, f"{count} objects have left DRAM")


def outcome(path: Path) -> bytes | None:
    """What a reader gets; None for a miss."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@pytest.mark.mount
@pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")
def test_files_and_blocks_of_a_service_come_back_after_a_kill(server: Server) -> None:
    with service_over(server) as service:
        (service.mount / "b").mkdir()
        path = service.mount / "b" / "file"
        data = os.urandom((3 << 20) + 1)
        path.write_bytes(data)
        keys = [os.urandom(16) for _ in range(5)]
        with kvfs.connect(service.mount) as client, client.blocks(NAMESPACE) as blocks:
            assert all(blocks.put(keys, [key * 4096 for key in keys], [None, *keys[:-1]]))
        sent(service, 6)
        evict(service, 6)
        assert os.getxattr(path, "user.kvfs.tier") == b"cold"
        assert path.read_bytes() == data
        service.kill()
        service.restart()
        eventually(lambda: cold(service)["is_up"], "the endpoint was looked at")
        evict(service, 1)
        assert path.read_bytes() == data
        with kvfs.connect(service.mount) as client, client.blocks(NAMESPACE) as blocks:
            assert blocks.match(keys) == 5
            for key in keys:
                into = bytearray(16 * 4096)
                assert blocks.get_into([key], [into]) == [len(into)]
                assert into == key * 4096
        assert not service.complaints()


@pytest.mark.mount
@pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")
def test_a_server_that_dies_and_comes_back_costs_a_service_misses() -> None:
    with HeldPort() as port, ExitStack() as alive:
        server = alive.enter_context(moto(port.number))
        server.client().create_bucket(Bucket=server.bucket)
        with service_over(server) as service:
            (service.mount / "b").mkdir()
            old, new = service.mount / "b" / "old", service.mount / "b" / "new"
            old.write_bytes(b"old")
            sent(service, 1)
            evict(service, 1)
            alive.close()
            assert outcome(old) is None
            assert service.process is not None
            with within(1.0, service.process.pid):  # known to be down, it is not asked
                assert outcome(old) is None
            new.write_bytes(b"new")
            assert new.read_bytes() == b"new"
            assert not cold(service)["is_up"]
            assert cold(service)["trouble"]
            with moto(port.number):
                eventually(lambda: cold(service)["is_up"], "it is back")
                assert outcome(old) == b"old"
                sent(service, 2)
            assert not service.complaints()


@pytest.mark.mount
@pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")
def test_the_s3_door_reads_through_to_the_bucket() -> None:
    need_mount()
    with ExitStack() as alive:
        server = alive.enter_context(moto())
        server.client().create_bucket(Bucket=server.bucket)
        with gateway(settings=configuration(server), dram="64MiB") as running:
            client = running.client()
            client.create_bucket(Bucket="front")
            client.put_object(Bucket="front", Key="a", Body=b"bytes", Metadata={"colour": "blue"})
            sent(running.service, 1)
            evict(running.service, 1)
            found = client.head_object(Bucket="front", Key="a")
            assert found["ResponseMetadata"]["HTTPHeaders"]["x-kvfs-tier"] == "cold"
            found = client.get_object(Bucket="front", Key="a")
            assert found["Body"].read() == b"bytes"
            assert found["Metadata"] == {"colour": "blue"}
            evict(running.service, 2)
            alive.close()
            with pytest.raises(client.exceptions.NoSuchKey):
                client.get_object(Bucket="front", Key="a")
            client.put_object(Bucket="front", Key="a", Body=b"other")
            assert client.get_object(Bucket="front", Key="a")["Body"].read() == b"other"
