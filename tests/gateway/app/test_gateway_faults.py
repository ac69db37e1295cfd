"""The S3 endpoint when things end in the middle: clients, workers, the service; and under load.

KVFS_TEST_LOAD_S: how long the load test runs (default: 8 s).
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from tests.support.gateway import ACCESS, SECRET, Gateway, gateway, listening_ports, until
from tests.support.raw_s3 import UNSIGNED, RawClient, raw_client, signed_head
from tests.support.service import ROOT, Service, run_kvfs
from tests.support.waits import WAIT_S

MIB = 1 << 20
BUCKET = "faults"
LOAD_S = float(os.environ.get("KVFS_TEST_LOAD_S", "8"))
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway(dram="512MiB") as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        log = found.service.log()
        assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


def status(door: Gateway) -> dict[str, Any]:
    with door.service.client() as client:
        return client.status()


def dram_bytes(door: Gateway) -> int:
    return int(next(tier for tier in status(door)["tiers"] if tier["name"] == "dram")["used_bytes"])


def is_quiet(door: Gateway) -> bool:
    """Whether no draft is open."""
    return bool(status(door)["open_drafts"] == 0)


def quiet_dram_bytes(door: Gateway) -> int:
    """What DRAM holds at a moment when no draft is open. One of an earlier client, whose bytes came late, may be there
    before and after."""
    found: list[int] = []

    def look() -> bool:
        seen = status(door)
        found.append(next(tier for tier in seen["tiers"] if tier["name"] == "dram")["used_bytes"])
        return bool(seen["open_drafts"] == 0)

    until(look, door)
    return found[-1]


# --- clients that go away ------------------------------------------------------------------------------------
def test_an_upload_that_ends_at_any_byte_leaves_nothing(door: Gateway, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="kept", Body=b"before")
    until(lambda: is_quiet(door), door)
    before = dram_bytes(door), status(door)["objects"]
    body = b"y" * 40
    request = signed_head(door, "PUT", f"/{BUCKET}/kept", body=body, payload=UNSIGNED) + body
    for cut in range(len(request)):
        with raw_client(door) as client:
            client.send(request[:cut])
    # Of the last connections the gateway may not have read anything yet.
    until(lambda: is_quiet(door) and (dram_bytes(door), status(door)["objects"]) == before, door)
    assert s3.get_object(Bucket=BUCKET, Key="kept")["Body"].read() == b"before"


@pytest.mark.parametrize("cut", [0, 1, 65_536, MIB, 3 * MIB])
def test_a_large_upload_that_ends_early_leaves_nothing(door: Gateway, s3: Any, cut: int) -> None:
    before = quiet_dram_bytes(door)
    body = bytes(4 * MIB)
    with raw_client(door) as client:
        client.send(signed_head(door, "PUT", f"/{BUCKET}/early", body=body, payload=UNSIGNED) + body[:cut])
        until(lambda: not is_quiet(door), door)
    until(lambda: is_quiet(door), door)
    until(lambda: dram_bytes(door) <= before, door)
    with pytest.raises(ClientError):
        s3.head_object(Bucket=BUCKET, Key="early")


def test_a_body_shorter_than_its_length_is_no_object(door: Gateway, s3: Any) -> None:
    with raw_client(door) as client:
        client.send(signed_head(door, "PUT", f"/{BUCKET}/short", body=b"x" * 10, payload=UNSIGNED) + b"x" * 5)
        client.socket.shutdown(1)
        answer = client.response()
        assert (answer.status, answer.code) == (400, "IncompleteBody")
    with pytest.raises(ClientError):
        s3.head_object(Bucket=BUCKET, Key="short")


# --- readers -----------------------------------------------------------------------------------------------
def test_what_is_read_stays_while_it_is_replaced_and_removed(door: Gateway, s3: Any) -> None:
    old, new = os.urandom(32 * MIB), os.urandom(MIB)
    s3.put_object(Bucket=BUCKET, Key="moving", Body=old)
    with raw_client(door) as client:
        client.socket.setsockopt(1, 8, 1 << 16)
        client.send(signed_head(door, "GET", f"/{BUCKET}/moving"))
        first = client.socket.recv(65_536)
        s3.put_object(Bucket=BUCKET, Key="moving", Body=new)
        assert s3.get_object(Bucket=BUCKET, Key="moving")["Body"].read() == new
        s3.delete_object(Bucket=BUCKET, Key="moving")
        client._data = first
        assert hashlib.sha256(client.response().body).digest() == hashlib.sha256(old).digest()
    until(lambda: next(t for t in status(door)["tiers"] if t["name"] == "dram")["held_bytes"] == 0, door)


def test_a_reader_that_leaves_lets_go(door: Gateway, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="left", Body=os.urandom(32 * MIB))
    before = dram_bytes(door)
    with raw_client(door) as client:
        client.send(signed_head(door, "GET", f"/{BUCKET}/left"))
        client.socket.recv(100)
        s3.delete_object(Bucket=BUCKET, Key="left")
        assert dram_bytes(door) == before
    until(lambda: dram_bytes(door) <= before - 32 * MIB, door)


# --- workers and services that end -------------------------------------------------------------------------
def new_worker(door: Gateway, old: int) -> None:
    until(lambda: door.worker_pids() not in ([], [old]), door)

    def answers() -> bool:
        try:
            door.client().list_buckets()
        except (EndpointConnectionError, OSError):
            return False
        except Exception as error:
            if "onnect" not in str(error):
                raise
            return False
        return True

    until(answers, door)


def test_a_worker_that_is_killed_leaves_nothing(door: Gateway, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="during", Body=os.urandom(32 * MIB))
    until(lambda: is_quiet(door), door)
    before = dram_bytes(door)
    [pid] = door.worker_pids()
    with raw_client(door) as reader, raw_client(door) as writer:
        reader.send(signed_head(door, "GET", f"/{BUCKET}/during"))
        reader.socket.recv(100)
        body = bytes(8 * MIB)
        writer.send(signed_head(door, "PUT", f"/{BUCKET}/w", body=body, payload=UNSIGNED) + body[: 4 * MIB])
        until(lambda: not is_quiet(door), door)
        os.kill(pid, signal.SIGKILL)
        new_worker(door, pid)
    until(lambda: is_quiet(door) and dram_bytes(door) == before, door)
    s3.delete_object(Bucket=BUCKET, Key="during")
    until(lambda: dram_bytes(door) <= before - 32 * MIB, door)


def test_an_upload_goes_on_with_another_worker(door: Gateway, s3: Any) -> None:
    made = s3.create_multipart_upload(Bucket=BUCKET, Key="worker")
    upload = {"Bucket": BUCKET, "Key": "worker", "UploadId": made["UploadId"]}
    tag = s3.upload_part(**upload, PartNumber=1, Body=b"one")["ETag"]
    [pid] = door.worker_pids()
    os.kill(pid, signal.SIGKILL)
    new_worker(door, pid)
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": tag}]})
    assert s3.get_object(Bucket=BUCKET, Key="worker")["Body"].read() == b"one"


def test_a_clean_stop_ends_requests_first() -> None:
    with gateway() as door:
        s3 = door.client()
        s3.create_bucket(Bucket=BUCKET)
        body = os.urandom(MIB)
        with raw_client(door) as client, raw_client(door) as idle:
            idle.ask("GET", "/")
            client.send(signed_head(door, "PUT", f"/{BUCKET}/k", body=body, payload=UNSIGNED) + body[:1000])
            until(lambda: not is_quiet(door), door)
            [worker] = door.worker_pids()
            os.kill(worker, signal.SIGTERM)
            assert idle.at_end()
            client.send(body[1000:])
            answer = client.response()
            assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_several_workers_share_a_port_and_admin_ports_say_so(tmp_path: Path) -> None:
    with gateway(settings='workers = 2\nadmin = "127.0.0.1:0"') as door:
        assert len(door.worker_pids()) == 2
        s3 = door.client()
        s3.create_bucket(Bucket=BUCKET)
        for n in range(20):
            door.client().put_object(Bucket=BUCKET, Key=f"k{n}", Body=b"x")
        assert s3.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 20
        ports = listening_ports(door) - {door.port}
        assert len(ports) == 2
        for port in ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
                assert answer.read() == b"ok\n"
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                text = answer.read().decode()
            assert "kvfs_store_objects 20" in text
            assert "kvfs_s3_connected_bool 1" in text


# --- load --------------------------------------------------------------------------------------------------
class Load:
    """Fast and slow clients until the time is up."""

    def __init__(self, door: Gateway) -> None:
        self.door = door
        self.stop = threading.Event()
        self.done = 0
        self.failures: list[str] = []
        self.body = os.urandom(MIB // 4)

    def fast(self, n: int) -> None:
        self._guarded(self._fast, n)

    def slow(self, n: int) -> None:
        self._guarded(self._slow, n)

    def _guarded(self, work: Callable[[int], None], n: int) -> None:
        try:
            work(n)
        except Exception as error:
            if not self.stop.is_set():
                self.failures.append(repr(error))

    def _fast(self, n: int) -> None:
        with raw_client(self.door) as client:
            while True:  # once at least, however late this thread comes to run
                assert client.ask("PUT", f"/{BUCKET}/fast-{n}", self.body).status == 200
                assert client.ask("GET", f"/{BUCKET}/fast-{n}").body == self.body
                self.done += 1
                if self.stop.is_set():
                    return

    def _slow(self, n: int) -> None:
        """One byte of an upload now and then, or an answer that is not read."""
        while not self.stop.is_set():
            with raw_client(self.door) as client:
                if n % 2:
                    client.send(signed_head(self.door, "GET", f"/{BUCKET}/big"))
                    self.stop.wait(1.0)
                    client.socket.recv(1000)
                    continue
                body = b"s" * 200
                client.send(signed_head(self.door, "PUT", f"/{BUCKET}/slow-{n}", body=body, payload=UNSIGNED))
                self._trickle(client, body)

    def _trickle(self, client: RawClient, body: bytes) -> None:
        for at in range(0, len(body), 10):
            if self.stop.wait(0.1):
                return
            client.send(body[at : at + 10])
        assert client.response().status == 200


def memory_bytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


def test_two_hundred_connections_half_of_them_slow(door: Gateway, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="big", Body=os.urandom(32 * MIB))
    [pid] = door.worker_pids()
    load = Load(door)
    threads = [threading.Thread(target=load.fast if n % 2 else load.slow, args=(n,)) for n in range(200)]
    before = memory_bytes(pid)
    for thread in threads:
        thread.start()
    most, end = before, time.monotonic() + LOAD_S
    while (time.monotonic() < end or load.done < 100) and not load.failures:
        most = max(most, memory_bytes(pid))
        time.sleep(0.1)
    load.stop.set()
    for thread in threads:
        thread.join()
    assert load.failures == []
    assert load.done >= 100
    assert most - before < 200 * (1 << 18)
    until(lambda: is_quiet(door), door)
    for n in range(1, 200, 2):
        assert s3.head_object(Bucket=BUCKET, Key=f"fast-{n}")["ContentLength"] == len(load.body)


# --- a gateway beside the service --------------------------------------------------------------------------
def test_a_gateway_of_its_own_outlives_the_service_and_reads_credentials_again(tmp_path: Path) -> None:
    with Service(mode="native") as service:
        config = tmp_path / "kvfs.toml"
        config.write_text(f'[[s3.credentials]]\naccess_key = "{ACCESS}"\nsecret_key = "{SECRET}"\n')
        command = [
            sys.executable,
            "-m",
            "kvfs",
            "gateway",
            "--at",
            str(service.data),
            "--config",
            str(config),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [*command, "--s3", "127.0.0.1:0"], stdout=subprocess.PIPE, env=environment, text=True, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert process.stdout.readline() == "ready\n"
            door = Gateway(service, "127.0.0.1", int(line.rpartition(":")[2]), secure=False)
            s3 = door.client()
            s3.create_bucket(Bucket=BUCKET)
            s3.put_object(Bucket=BUCKET, Key="k", Body=b"kept")
            service.stop()
            with pytest.raises(ClientError) as error:
                s3.get_object(Bucket=BUCKET, Key="k")
            assert error.value.response["Error"]["Code"] == "ServiceUnavailable"
            service.restart()
            until(lambda: _reads(s3, b"kept"), door)
            with config.open("a") as file:
                file.write(
                    f'[[s3.credentials]]\naccess_key = "LATER"\nsecret_key = "{SECRET}"\nowner = "{ACCESS}"\n'
                )
            later = door.client("LATER", SECRET)
            with pytest.raises(ClientError):
                later.list_buckets()
            process.send_signal(signal.SIGHUP)
            until(lambda: _reads(later, b"kept"), door)
        finally:
            process.terminate()
            assert process.wait(WAIT_S) == 0
            assert process.stdout is not None
            process.stdout.close()


def _reads(s3: Any, body: bytes) -> bool:
    try:
        return bool(s3.get_object(Bucket=BUCKET, Key="k")["Body"].read() == body)
    except ClientError:
        return False


def test_an_endpoint_without_credentials_does_not_start(tmp_path: Path) -> None:
    done = run_kvfs(
        "serve", "--s3", "127.0.0.1:0", "--mount", str(tmp_path / "m"), "--data", str(tmp_path / "d")
    )
    assert done.returncode == 2
    assert "kvfs credentials add" in done.stderr
