"""A service with a pool in the memory of the stand-in's devices, and sessions with it that are asked by hand."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvfs
from kvfs.client.exchange import Exchange
from kvfs.client.transport import Transport, close_all
from kvfs.protocol.messages import Op
from tests.support.cuda_standin import DEVICE
from tests.support.pool_engines import PoolEngine
from tests.support.service import Service
from tests.support.sessions import Child, fork
from tests.support.waits import WAIT_S

PLACE: dict[str, Any] = {"device": DEVICE, "token": "0" * 32, "left": []}


def serving(library: Path, *, nvme: str = "64MiB", module: str = "kvfs", **environment: str) -> Service:
    return Service(
        mode="off",
        dram="64MiB",
        nvme=nvme,
        arguments=["--hbm", "256MiB"],
        environment={"KVFS_LIBCUDA": str(library), **environment},
        module=module,
    )


def keys_of(count: int) -> list[bytes]:
    return [b"\1" + os.urandom(15) for _ in range(count)]


def hbm(service: Service) -> dict[str, Any]:
    with service.client() as client:
        return dict(client.status()["hbm"])


def pool_of(service: Service) -> dict[str, Any]:
    [pool] = hbm(service)["pools"]
    return dict(pool)


def engine_in_child(service: Service, library: Path, keys: list[bytes], *, seal: bool) -> Child:
    """A process with these blocks in the pool, or drafts of them; it says a byte and stays."""

    def stay(pipe: socket.socket) -> None:
        os.environ["KVFS_LIBCUDA"] = str(library)
        with PoolEngine(service.data) as other:
            other.put(keys)
            assert other.promote(keys) == [True] * len(keys) if seal else None not in other.reserve(keys)
            pipe.send(b"!")
            pipe.recv(1)

    child = fork(stay)
    child.wait_for(b"!")
    return child


@contextmanager
def raw(address: Path, *, attach: bool = True, left: Sequence[object] = ()) -> Iterator[Exchange]:
    exchange = Exchange(Transport(address / "kvfs.sock", timeout_s=WAIT_S, client="raw"))
    try:
        if attach:
            result, descriptors = exchange.described(Op.HBM_ATTACH, **{**PLACE, "left": left})
            close_all(descriptors)
            assert (len(descriptors), result["segment_bytes"]) == (2, 128 << 20)
        yield exchange
    finally:
        exchange.transport.close()


def failure(exchange: Exchange, op: Op, **arguments: Any) -> str:
    try:
        exchange.control(op, **arguments)
    except kvfs.KvfsError as error:
        return f"{type(error).__name__}: {error}"
    return ""
