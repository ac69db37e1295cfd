"""Two workers on one port, one of which is killed in the middle of reads and writes."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError

from gateway.app.worker_settings import WorkerSettings
from tests.support.gateway import Gateway, gateway, until
from tests.support.raw_s3 import UNSIGNED, RawClient, raw_client, signed_head
from tests.support.service import ROOT
from tests.support.waits import WAIT_S

MIB = 1 << 20
BUCKET = "workers"
MOST_TRIES = 64
"""Connections until both workers have one: the kernel spreads them by a hash of their ports."""
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    """DRAM takes objects of 32 MiB, so that those of 40 MiB are read and written through windows."""
    with gateway(dram="128MiB", nvme="512MiB", settings="workers = 2") as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        log = found.service.log()
        assert "Traceback" not in log, log


def status(door: Gateway) -> dict[str, Any]:
    with door.service.client() as client:
        return client.status()


def held(door: Gateway) -> tuple[int, int, int, int]:
    """What workers have of the service: sessions, drafts, bytes of objects that are gone but open, and MiB on NVMe
    that must stay, as what is open or being written does."""
    found = status(door)
    dram, nvme = found["tiers"]
    return found["sessions"], found["open_drafts"], dram["held_bytes"], nvme["durable_bytes"] // MIB


def server_of(door: Gateway, client: RawClient) -> int:
    """The worker that has a connection."""
    local, remote = (f":{sock[1]:04X}" for sock in (client.socket.getpeername(), client.socket.getsockname()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [inode] = [row[9] for row in rows if row[1].endswith(local) and row[2].endswith(remote)]
    for pid in door.worker_pids():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(link) == f"socket:[{inode}]":
                    return pid
            except FileNotFoundError:
                continue
    raise LookupError(f"no worker has socket {inode}")


def clients_of_both(door: Gateway, stack: ExitStack, count: int) -> tuple[int, list[RawClient], RawClient]:
    """A worker, `count` connections to it, and one to the other; all have been answered once."""
    by_worker: dict[int, list[RawClient]] = {}
    for _ in range(MOST_TRIES):
        client = stack.enter_context(raw_client(door))
        assert client.ask("GET", "/").status == 200
        by_worker.setdefault(server_of(door, client), []).append(client)
        full = [pid for pid, clients in by_worker.items() if len(clients) >= count]
        if full and len(by_worker) == 2:
            [other] = by_worker.keys() - {full[0]}
            return full[0], by_worker[full[0]][:count], by_worker[other][0]
    raise AssertionError(f"after {MOST_TRIES} connections: {by_worker}")


@pytest.mark.parametrize("size_bytes", [16 * MIB, 40 * MIB], ids=["slots", "windows"])
def test_a_killed_worker_leaves_nothing_and_the_other_goes_on(door: Gateway, size_bytes: int) -> None:
    s3, body = door.client(), os.urandom(size_bytes)
    s3.put_object(Bucket=BUCKET, Key="read", Body=body)
    until(lambda: held(door)[1:] == (0, 0, 0), door)
    before = held(door)
    with ExitStack() as stack:
        victim, clients, other = clients_of_both(door, stack, 3)
        reader, writer, part_writer = clients
        reader.send(signed_head(door, "GET", f"/{BUCKET}/read"))
        reader.socket.recv(100)
        half = body[: size_bytes // 2]
        writer.send(signed_head(door, "PUT", f"/{BUCKET}/written", body=body, payload=UNSIGNED) + half)
        made = s3.create_multipart_upload(Bucket=BUCKET, Key="parts")
        path = f"/{BUCKET}/parts?partNumber=1&uploadId={made['UploadId']}"
        part = body[: 8 * MIB]
        part_writer.send(signed_head(door, "PUT", path, body=part, payload=UNSIGNED) + part[:MIB])
        until(lambda: held(door)[1] >= 2, door)
        # The other worker is in the middle of something, too.
        other.send(signed_head(door, "PUT", f"/{BUCKET}/other", body=part, payload=UNSIGNED) + part[:MIB])
        until(lambda: held(door)[1] >= 3, door)
        s3.delete_object(Bucket=BUCKET, Key="read")
        os.kill(victim, signal.SIGKILL)
        other.send(part[MIB:])
        assert other.response().status == 200
    until(lambda: len(door.worker_pids()) == 2 and victim not in door.worker_pids(), door)
    until(lambda: held(door) == before, door)
    listed = s3.list_objects_v2(Bucket=BUCKET)
    assert [entry["Key"] for entry in listed["Contents"]] == ["other"]
    upload = {"Bucket": BUCKET, "Key": "parts", "UploadId": made["UploadId"]}
    assert "Parts" not in s3.list_parts(**upload)
    etag = s3.upload_part(**upload, PartNumber=1, Body=part)["ETag"]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    for key in ("other", "parts"):
        found = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        assert hashlib.sha256(found).digest() == hashlib.sha256(part).digest()
        s3.delete_object(Bucket=BUCKET, Key=key)
    until(lambda: status(door)["objects"] == 0, door)


def test_a_worker_whose_service_is_gone_ends_without_a_traceback(tmp_path: Path) -> None:
    """Neither its sessions nor who listens to it is there any more: it was started a moment before a kill."""
    settings = WorkerSettings(
        socket=tmp_path / "nobody.sock", host="127.0.0.1", port=0, upload_expiry_s=3600, connections=16
    )
    nobody_reads, output = os.pipe()
    os.close(nobody_reads)
    worker = subprocess.Popen(
        [sys.executable, "-m", "gateway"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(output)
    _, said = worker.communicate(settings.model_dump_json() + "\n", timeout=WAIT_S)
    assert worker.returncode == 1
    assert "Traceback" not in said, said
    assert "BrokenPipe" not in said, said


@pytest.mark.parametrize("said", ["", '{"socket": "/run/kvfs.sock", "credentials": [{"secret_key": "abc'])
def test_a_worker_that_reads_half_its_settings_ends_without_a_word(said: str) -> None:
    """Its service was killed while it started. Its settings have secrets."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway"], cwd=ROOT, input=said, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_worker_that_dies_at_the_descriptor_limit_is_back_once_there_are_some() -> None:
    with gateway(dram="32MiB", settings="workers = 1", arguments=("--slots", "4096")) as door:
        pid, log_path = door.service.pid, door.service.log_path
        limits_before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        [worker] = door.worker_pids()
        with door.service.client() as client:
            client.create_bucket(BUCKET)
            in_use = len(os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (in_use, limits_before[1]))
            os.kill(worker, signal.SIGKILL)
            until(lambda: "cannot be started: Too many open files" in log_path.read_text(), door)
            client.put(f"{BUCKET}/name", b"bytes")
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits_before)
        until(lambda: len(door.worker_pids()) == 1, door)
        until(lambda: can_read(door), door)
        assert "Traceback" not in door.service.log(), door.service.log()


def can_read(door: Gateway) -> bool:
    try:
        return bool(door.client().get_object(Bucket=BUCKET, Key="name")["Body"].read() == b"bytes")
    except BotoCoreError:
        return False
