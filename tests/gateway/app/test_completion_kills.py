"""The service, or a worker of its gateway, is killed while it completes an upload: nothing is lost, and nothing stays.

KVFS_TEST_SEED repeats a run, KVFS_TEST_KILLS says how many kills there are of each.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from kvfs.system import crashpoints
from tests.support.gateway import Gateway, fails, gateway, until
from tests.support.seeds import SEED, rounds
from tests.support.waits import WAIT_S

KILLS: Final = int(os.environ.get("KVFS_TEST_KILLS", rounds(3, 5)))
MIB, PART_BYTES, BUCKET = 1 << 20, 5 << 20, "kept"
WINDOW_S: Final = 0.02
"""A completion of 10 MiB takes about so long."""
pytestmark = [
    pytest.mark.seeded,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Gateway]:
    with gateway(dram="256MiB", nvme="512MiB") as found:
        with found.service.client() as client:
            client.create_bucket(BUCKET, durable=True)
        yield found


@pytest.fixture
def door(running: Gateway) -> Gateway:
    """The endpoint of the process that runs now."""
    return running.started_again(running.starts() - 1)


class UploadToComplete:
    """An upload with two parts."""

    def __init__(self, door: Gateway, key: str) -> None:
        self.bodies = [os.urandom(PART_BYTES), os.urandom(PART_BYTES)]
        s3 = door.client()
        made = s3.create_multipart_upload(Bucket=BUCKET, Key=key)
        self.name = {"Bucket": BUCKET, "Key": key, "UploadId": made["UploadId"]}
        self.parts = [
            {"PartNumber": number, "ETag": s3.upload_part(**self.name, PartNumber=number, Body=body)["ETag"]}
            for number, body in enumerate(self.bodies, 1)
        ]

    def complete(self, door: Gateway) -> Any:
        return door.client().complete_multipart_upload(**self.name, MultipartUpload={"Parts": self.parts})

    def begin_to_complete(self, door: Gateway) -> threading.Thread:
        """Complete in a thread, whatever becomes of it."""

        def run() -> None:
            with suppress(ClientError, BotoCoreError):
                self.complete(door)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def check(self, door: Gateway) -> None:
        """Complete once more: the object is there, whole, and nothing else is."""
        until(lambda: is_answering(door), door)
        s3 = door.client()
        key = {"Bucket": BUCKET, "Key": self.name["Key"]}
        there = s3.list_objects_v2(Bucket=BUCKET, Prefix=self.name["Key"])["KeyCount"] == 1
        listed = [
            each["UploadId"] for each in s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        ] == [self.name["UploadId"]]
        assert there or listed
        done = self.complete(door)
        found = s3.get_object(**key)
        assert found["ETag"] == done["ETag"]
        assert found["Body"].read() == b"".join(self.bodies)
        assert self.complete(door)["ETag"] == done["ETag"]
        fails(lambda: s3.abort_multipart_upload(**self.name), "NoSuchUpload", 404)
        assert leftovers(door) == []
        until(lambda: is_quiet(door), door)
        s3.delete_object(**key)
        until(lambda: kept_mib(door) == 0, door)


def is_answering(door: Gateway) -> bool:
    try:
        door.client().list_buckets()
    except (ClientError, BotoCoreError):
        return False
    return True


def leftovers(door: Gateway) -> list[str]:
    with door.service.client() as client:
        return [entry.key for entry in client.list(".kvfs-s3/") if not entry.key.startswith("owners/")]


def is_quiet(door: Gateway) -> bool:
    with door.service.client() as client:
        return int(client.status()["open_drafts"]) == 0


def kept_mib(door: Gateway) -> int:
    """On NVMe, of what may not be evicted, beside the records of names."""
    with door.service.client() as client:
        return sum(int(tier.get("durable_bytes", 0)) // MIB for tier in client.status()["tiers"])


def restart(door: Gateway, environment: dict[str, str] | None = None) -> Gateway:
    before = door.starts()
    door.service.environment = environment or {}
    door.service.restart()
    return door.started_again(before)


@pytest.mark.parametrize("point", ["store.after_dram_seal", "store.after_index_put"])
def test_a_service_that_is_killed_in_the_seal(door: Gateway, point: str) -> None:
    upload = UploadToComplete(door, "in-the-seal")
    door.service.stop()
    door = restart(door, {crashpoints.VARIABLE: f"{point}:1"})
    upload.begin_to_complete(door).join()
    assert door.service.running.wait(WAIT_S) == -signal.SIGKILL
    door = restart(door)
    upload.check(door)


def test_a_service_that_is_killed_at_any_instant(door: Gateway) -> None:
    for number in range(KILLS):
        print(f"KVFS_TEST_SEED={SEED}, kill {number}")
        delay_s = random.Random(f"{SEED}/{number}").random() * WINDOW_S
        upload = UploadToComplete(door, f"service-{number}")
        thread = upload.begin_to_complete(door)
        time.sleep(delay_s)  # no wait for anything: this instant is what is tried
        door.service.kill()
        thread.join()
        door = restart(door)
        upload.check(door)


def test_a_worker_that_is_killed_at_any_instant(door: Gateway) -> None:
    for number in range(KILLS):
        print(f"KVFS_TEST_SEED={SEED}, kill {number}")
        delay_s = random.Random(f"{SEED}/worker/{number}").random() * WINDOW_S
        upload = UploadToComplete(door, f"worker-{number}")
        [pid] = door.worker_pids()
        thread = upload.begin_to_complete(door)
        time.sleep(delay_s)  # no wait for anything: this instant is what is tried
        os.kill(pid, signal.SIGKILL)
        thread.join()
        until(lambda pid=pid: door.worker_pids() not in ([], [pid]), door)
        upload.check(door)
