"""Hostile clients of every kind beside a good one: memory, the log and the good client's answers stay within bounds.

KVFS_TEST_ABUSE_S: how long all kinds at once go on (default: 6 s).
"""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvfs import limits
from tests.support import abuse
from tests.support.gateway import (
    ACCESS,
    OTHER_ACCESS,
    OTHER_SECRET,
    SECRET,
    Gateway,
    gateway,
    listening_ports,
    until,
)
from tests.support.processor_waits import within
from tests.support.raw_s3 import raw_client

MIB = 1 << 20
BUCKET, OTHER = "abuse", "others"
ABUSE_S = float(os.environ.get("KVFS_TEST_ABUSE_S", "6"))
DOCUMENTS = 50 if "KVFS_TEST_ABUSE_S" in os.environ else 22
PLACES = 64
"""Connections that the endpoint takes here."""
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway(dram="64MiB", settings=f'connections = {PLACES}\nadmin = "127.0.0.1:0"') as found:
        found.client().create_bucket(Bucket=BUCKET)
        found.client().put_object(Bucket=BUCKET, Key="small", Body=b"s" * 1000)
        found.client(OTHER_ACCESS, OTHER_SECRET).create_bucket(Bucket=OTHER)
        yield found
        assert "Traceback" not in found.service.log(), found.service.log()


def status(door: Gateway) -> dict[str, Any]:
    with door.service.client() as client:
        return client.status()


def is_quiet(door: Gateway) -> bool:
    return bool(status(door)["open_drafts"] == 0)


# --- documents -----------------------------------------------------------------------------------------------
def test_hostile_documents_leave_no_memory_and_hold_nobody_up(door: Gateway) -> None:
    with abuse.good_client(door, BUCKET, "small") as idle:
        time.sleep(1)
    before = abuse.rss_bytes(door)
    with abuse.good_client(door, BUCKET, "small") as beside:
        kinds = list(abuse.HOSTILE_DOCUMENTS)
        for number in range(DOCUMENTS):
            body = abuse.HOSTILE_DOCUMENTS[kinds[number % len(kinds)]]
            with raw_client(door) as client:
                answer = abuse.send_document(client, f"/{BUCKET}?delete", body)
            assert answer is None or (answer.status, answer.code) == (400, "MalformedXML")
            assert abuse.rss_bytes(door) < before + 20 * MIB, f"after {number} documents"
    assert beside.failures == []
    assert beside.worst_s < max(20 * idle.worst_s, 0.5)


# --- room ----------------------------------------------------------------------------------------------------
def test_slow_uploads_shut_nobody_out(door: Gateway) -> None:
    """Two of a quarter of DRAM each take no more of the room than what came of them."""
    until(lambda: is_quiet(door), door)
    with abuse.slow_uploads(door, BUCKET, 2, 16 * MIB):
        until(lambda: status(door)["open_drafts"] == 2, door)
        with within(limits.GATEWAY_ROOM_WAIT_S / 2, *door.worker_pids()):
            for access, secret, bucket in ((ACCESS, SECRET, BUCKET), (OTHER_ACCESS, OTHER_SECRET, OTHER)):
                client = door.client(access, secret)
                client.put_object(Bucket=bucket, Key="quick", Body=bytes(4096))
                client.put_object(Bucket=bucket, Key="quick", Body=bytes(12 * MIB))


def test_a_room_full_of_slow_uploads_gives_way(door: Gateway) -> None:
    """All that one owner may have, 1 MiB each; another is served at once, and he himself within what clients wait."""
    until(lambda: is_quiet(door), door)
    with abuse.slow_uploads(door, BUCKET, 24, 4 * MIB):
        until(lambda: status(door)["open_drafts"] >= 16, door)
        with within(limits.GATEWAY_ROOM_WAIT_S, *door.worker_pids()):
            with within(limits.ROOM_GRACE_S, *door.worker_pids()):
                other = door.client(OTHER_ACCESS, OTHER_SECRET)
                other.put_object(Bucket=OTHER, Key="quick", Body=bytes(2 * MIB))
            door.client().put_object(Bucket=BUCKET, Key="quick", Body=bytes(12 * MIB))


# --- connections ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sent", [b"", b"GET /"])
def test_silent_connections_do_not_starve_new_clients(door: Gateway, sent: bytes) -> None:
    lines = abuse.log_lines(door)
    with (
        abuse.silent_connections(door, 3 * PLACES, sent=sent),
        within(limits.HEAD_TIMEOUT_S / 2, *door.worker_pids()),
        raw_client(door) as client,
    ):
        assert client.ask("GET", f"/{BUCKET}/small").status == 200
    assert abuse.log_lines(door) - lines <= 3


def test_what_is_closed_is_counted(door: Gateway) -> None:
    found = "kvfs_s3_connections_closed_silent_total"
    [before] = [line for line in metrics(door) if line.startswith(found)]
    with abuse.silent_connections(door, 2 * PLACES):
        with raw_client(door) as client:
            assert client.ask("GET", f"/{BUCKET}/small").status == 200
        [after] = [line for line in metrics(door) if line.startswith(found)]
    assert float(after.split()[1]) >= float(before.split()[1]) + PLACES // 2


def metrics(door: Gateway) -> list[str]:
    [port] = listening_ports(door) - {door.port}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode()).splitlines()


# --- all at once ---------------------------------------------------------------------------------------------
def test_all_kinds_at_once(door: Gateway) -> None:
    """Memory and the log have bounds, and who does nothing wrong is answered, whatever he reads or writes."""
    until(lambda: is_quiet(door), door)
    before, lines, stop = abuse.rss_bytes(door), abuse.log_lines(door), threading.Event()

    def send_documents() -> None:
        while not stop.is_set():
            for body in abuse.HOSTILE_DOCUMENTS.values():
                with raw_client(door) as client:
                    abuse.send_document(client, f"/{BUCKET}?delete", body)
                if stop.is_set():
                    return

    def connect() -> None:
        while not stop.is_set():
            with abuse.silent_connections(door, PLACES // 4, sent=b"GET / HTTP/1.1\r\nHost"):
                stop.wait(0.2)

    written = 0
    with ExitStack() as stack:
        fared = stack.enter_context(abuse.good_client(door, BUCKET, "small"))
        stack.enter_context(abuse.slow_uploads(door, BUCKET, 12, 4 * MIB))
        for attack in (send_documents, connect):
            thread = threading.Thread(target=attack)
            thread.start()
            stack.callback(thread.join)
        stack.callback(stop.set)
        other = door.client(OTHER_ACCESS, OTHER_SECRET, retries={"max_attempts": 3})
        end_s = time.monotonic() + ABUSE_S
        while time.monotonic() < end_s:
            other.put_object(Bucket=OTHER, Key=f"k{written % 8}", Body=bytes(2 * MIB))
            written += 1
    assert written > 0
    assert fared.failures == []
    assert fared.worst_s < 5
    assert abuse.rss_bytes(door) < before + 64 * MIB
    assert abuse.log_lines(door) - lines < 20 + 4 * ABUSE_S
