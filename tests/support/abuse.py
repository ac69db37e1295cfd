"""Hostile clients of an S3 endpoint, and the good one beside them.

Responsibility: what abuse looks like on the wire, and what is watched meanwhile: the worker's memory, the lines of the
log, how a client that does nothing wrong fares. Concurrency: each abuser is a thread of the test.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.gateway import ACCESS, SECRET, Gateway
from tests.support.processor_waits import Waits
from tests.support.raw_s3 import UNSIGNED, RawClient, Response, raw_client, signed_head

MIB = 1 << 20
HOSTILE_BYTES = 4 * MIB


def rss_bytes(door: Gateway) -> int:
    """Of all workers."""
    found = 0
    for pid in door.worker_pids():
        status = Path(f"/proc/{pid}/status").read_text()
        found += int(status.partition("VmRSS:")[2].split()[0]) * 1024
    return found


def log_lines(door: Gateway) -> int:
    return door.service.log().count("\n")


# --- documents -----------------------------------------------------------------------------------------------
def _filled(begin: bytes, piece: bytes, end: bytes = b"", size_bytes: int = HOSTILE_BYTES) -> bytes:
    return begin + piece * ((size_bytes - len(begin) - len(end)) // len(piece)) + end


HOSTILE_DOCUMENTS = {
    "unclosed": _filled(b"<Delete>", b"<a>"),
    "cut": _filled(b"<Delete>", b"<Object><Key>k</Key></Object>"),
    "many": _filled(b"<Delete>", b"<Object/>", b"</Delete>"),
    "fields": _filled(b"<Delete><Object><Key>k</Key>", b"<x/>", b"</Object></Delete>"),
    "one text": _filled(b"<Delete><Object><Key>", b"k", b"</Key></Object></Delete>"),
    "attributes": b"<Delete " + b" ".join(b'a%d="v"' % i for i in range(400_000)) + b"/>",
    "one tag": _filled(b"<Delete", b"x", b"/>"),
    "comments": _filled(b"<Delete>", b"<!--c-->", b"</Delete>"),
    "references": _filled(b"<Delete><Object><Key>", b"&amp;", b"</Key></Object></Delete>"),
    "doctype": _filled(b'<!DOCTYPE Delete [<!ENTITY a "', b"x", b'">]><Delete>&a;</Delete>'),
    "no XML": bytes(HOSTILE_BYTES),
}


def send_document(client: RawClient, path: str, body: bytes) -> Response | None:
    """POST it as a key that may write does; None where the gateway has enough before all of it is sent."""
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
    head = signed_head(
        client.gateway, "POST", path, body=body, payload=UNSIGNED, headers={"content-md5": md5}
    )
    with contextlib.suppress(ConnectionError):
        client.send(head + body)
    try:
        return client.response()
    except (ConnectionError, EOFError):
        return None


# --- connections and bodies ----------------------------------------------------------------------------------
@contextmanager
def silent_connections(door: Gateway, count: int, *, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections on which nothing comes, or the beginning of a request."""
    found: list[socket.socket] = []
    try:
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            found.append(sock)
            with contextlib.suppress(BlockingIOError):
                sock.connect((door.host, door.port))
        for sock in found:
            if sent:
                with contextlib.suppress(OSError):
                    sock.send(sent)
        yield found
    finally:
        for sock in found:
            sock.close()


@contextmanager
def slow_uploads(
    door: Gateway,
    bucket: str,
    count: int,
    size_bytes: int,
    *,
    access: str = ACCESS,
    secret: str = SECRET,
    piece: bytes = b"x" * 60,
    pause_s: float = 0.2,
) -> Iterator[list[RawClient]]:
    """Bodies of a size that come at 300 B/s, for as long as the context lasts."""
    stop = threading.Event()
    clients = [RawClient(door) for _ in range(count)]

    def trickle() -> None:
        while not stop.wait(pause_s):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(piece)

    for number, client in enumerate(clients):
        client.send(
            signed_head(
                door,
                "PUT",
                f"/{bucket}/slow-{number}",
                body=None,
                headers={"content-length": str(size_bytes)},
                payload=UNSIGNED,
                access=access,
                secret=secret,
            )
            + piece
        )
    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield clients
    finally:
        stop.set()
        thread.join()
        for client in clients:
            client.close()


# --- the good client -----------------------------------------------------------------------------------------
@dataclass
class Fared:
    """How small reads went."""

    times_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        return max(self.times_s)


def read_small(door: Gateway, bucket: str, key: str, fared: Fared, stop: Callable[[], bool]) -> None:
    """Read a small object again and again on a connection of one's own, until told to stop. Waits for a processor do
    not count."""
    pids = door.worker_pids()
    with raw_client(door) as client:
        while not stop():
            waits, began_s = Waits(*pids), time.monotonic()
            try:
                answer = client.ask("GET", f"/{bucket}/{key}")
            except (OSError, EOFError) as error:
                fared.failures.append(repr(error))
                return
            if answer.status != 200:
                fared.failures.append(f"{answer.status} {answer.code}")
            fared.times_s.append(time.monotonic() - began_s - waits.kept_s())
            time.sleep(0.01)


@contextmanager
def good_client(door: Gateway, bucket: str, key: str) -> Iterator[Fared]:
    """Small reads beside what the context does."""
    fared, stop = Fared(), threading.Event()
    thread = threading.Thread(target=read_small, args=(door, bucket, key, fared, stop.is_set))
    thread.start()
    try:
        yield fared
    finally:
        stop.set()
        thread.join()
