"""Readers for whom the kernel notes no access times: a container with the tier mounted `noatime` or read-only.

What such a reader has in flight, in a pipe or a socket, after he has closed the slot nobody sees: free slots keep their
pages for the next object. Each door must therefore read through the service there, whose own mount shows reads.

Each reader here is a process in a mount namespace of its own. It takes an object's bytes in flight, the object is
removed, the slots are written anew, and then the bytes are looked at.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import kvfs
from kvfs import limits
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.gateway import ACCESS, SECRET, Gateway
from tests.support.raw_s3 import signed_head
from tests.support.service import ROOT, Service
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]

SIZE: Final = 2 * limits.SMALL_BODY_BYTES
"""A smaller body of an answer is copied on its way to a socket."""
OLD: Final = b"old!" * (SIZE // 4)
NEW: Final = b"new!" * (SIZE // 4)
KEY: Final = b"\1" + bytes(15)
BUCKET: Final = "bucket"
HIDDEN: Final = 'mount -o "remount,bind,$1" "$2" && shift 2 && exec "$@"'
"""Run a program with the tier mounted with these options, in a mount namespace of its own."""
OPTIONS: Final = ("noatime", "ro")
READER: Final = f"""
import ctypes, os, sys
import numpy
import kvfs
from kvfs.system.linux import hides_reads
from tests.support.stores import NAMESPACE

libc = ctypes.CDLL(None, use_errno=True)
with kvfs.connect(sys.argv[1]) as client, client.blocks(NAMESPACE) as blocks:
    assert client.details["keeps_pages"] and hides_reads(client.details["directory"])
    [view] = blocks.get([{KEY!r}])
    end, inlet = os.pipe()
    vector = (ctypes.c_void_p * 2)(numpy.frombuffer(view, numpy.uint8).ctypes.data, 4096)
    assert libc.vmsplice(inlet, vector, ctypes.c_ulong(1), 0) == 4096
    view.release()
    print("in flight", flush=True)
    sys.stdin.readline()
    print(os.read(end, 4096).decode(), flush=True)
"""
"""A client that gives a block's pages to a pipe, and ends its lease."""


@pytest.fixture
def service() -> Iterator[Service]:
    need_mount()
    with Service(mode="off", dram="64MiB") as running:
        yield running
        assert not running.complaints()


@contextmanager
def hidden(service: Service, options: str, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program that sees the service's tier mounted with `options`."""
    shell = ["unshare", "--mount", "sh", "-c", HIDDEN, "sh", options, str(service.data / "dram")]
    with subprocess.Popen(
        [*shell, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(WAIT_S)


def write_anew(blocks: kvfs.Blocks) -> None:
    """Put so many blocks that every free slot which keeps its pages is overwritten."""
    for number in range(256):
        assert blocks.put([b"\2" + number.to_bytes(15, "big")], [NEW]) == [True]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_clients_block_stays_what_it_was(service: Service, options: str) -> None:
    with kvfs.connect(service.data) as client, client.blocks(NAMESPACE) as blocks:
        assert blocks.put([KEY], [OLD]) == [True]
        with hidden(service, options, [sys.executable, "-c", READER, str(service.data)]) as reader:
            assert reader.stdout is not None
            assert reader.stdin is not None
            assert reader.stdout.readline() == "in flight\n"
            assert blocks.remove([KEY]) == 1
            write_anew(blocks)
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == OLD[:4096].decode() + "\n"


@pytest.mark.parametrize("options", OPTIONS)
def test_an_s3_object_stays_what_it_was(service: Service, tmp_path: Path, options: str) -> None:
    """It waits in the reader's socket, sent by a gateway of its own that runs in the container."""
    config = tmp_path / "kvfs.toml"
    config.write_text(f'[[s3.credentials]]\naccess_key = "{ACCESS}"\nsecret_key = "{SECRET}"\n')
    command = [sys.executable, "-m", "kvfs", "gateway", "--at", str(service.data), "--config", str(config)]
    with (
        kvfs.connect(service.data) as client,
        client.blocks(NAMESPACE) as blocks,
        hidden(service, options, [*command, "--s3", "127.0.0.1:0"]) as process,
    ):
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        door = Gateway(service, "127.0.0.1", port, secure=False)
        s3 = door.client()
        s3.create_bucket(Bucket=BUCKET)
        assert blocks.put([KEY], [NEW]) == [True], "slots of this size keep their pages from now on"
        s3.put_object(Bucket=BUCKET, Key="object", Body=OLD)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * SIZE)
            reader.settimeout(WAIT_S)
            reader.connect((door.host, door.port))
            reader.sendall(signed_head(door, "GET", f"/{BUCKET}/object"))
            eventually(lambda: received(reader) > SIZE, "all of the object is in the reader's socket")
            client.remove(f"{BUCKET}/object")
            write_anew(blocks)
            head, _, body = read_all(reader).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == OLD


def received(reader: socket.socket) -> int:
    """Return how many bytes wait in a socket."""
    found: int = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))[0]
    return found


def read_all(reader: socket.socket) -> bytes:
    """Read an answer of SIZE bytes after its head."""
    data = b""
    while len(data.partition(b"\r\n\r\n")[2]) < SIZE:
        data += reader.recv(1 << 20)
    return data
