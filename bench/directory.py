"""Figures of the cluster's directory: a look-up of 64 blocks against one round trip of the server.

Responsibility: a server of its own with the locations of 100,000 blocks on four machines, and a store whose directory
asks it. The baseline is one MGET of 64 keys over the same connection, which the server and coredis do least for.

The sides take turns, operation by operation. Concurrency: one trio thread; the server is a process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import trio
from coredis.connection import TCPConnection, TCPLocation
from pydantic import SecretStr

from bench.directory_server import directory_server
from bench.measure import Result
from kvfs import limits
from kvfs.config.settings import ClusterSettings
from tiers.cluster.directory import Directory
from tiers.cluster.location_format import encode_changes
from tiers.cluster.membership import Membership
from tiers.cluster.redis_server import RedisServer
from tiers.cluster.scripts import BEAT, CHANGE
from tiers.recovery.start import StoreOptions, start_store

BLOCKS, MACHINES, ASKED = 100_000, 4, 64
LEAST_TURNS = 50


def lookup_64(seconds: float) -> Result:
    """Return the time to say who has 64 blocks."""
    with (
        directory_server("directory.lookup_64") as port,
        tempfile.TemporaryDirectory(prefix="kvfs-bench-") as folder,
    ):
        return trio.run(partial(_measure, Path(folder), port, seconds))


async def _measure(folder: Path, port: int, seconds: float) -> Result:
    settings = ClusterSettings(
        secret_file=folder / "secret", directory=SecretStr(f"redis://127.0.0.1:{port}/0"), match_wait_s=1.0
    )
    store = await start_store(StoreOptions(folder / "store", dram_bytes=limits.MIN_DRAM_BYTES))
    with closing(store):
        directory = Directory(settings, store)
        connection = TCPConnection(TCPLocation("127.0.0.1", port))
        async with trio.open_nursery() as nursery:
            digests = await _fill(settings)
            await nursery.start(directory.run)
            await nursery.start(connection.run)
            while await directory.holders(digests[:1]) is None:  # noqa: ASYNC110
                await trio.sleep(0.01)
            result = await _in_turns(directory, connection, digests, seconds)
            nursery.cancel_scope.cancel()
        return result


async def _fill(settings: ClusterSettings) -> list[bytes]:
    """Write the locations as machines do; return the blocks."""
    assert settings.directory is not None
    server = RedisServer(settings.directory.get_secret_value())
    digests = [os.urandom(16) for _ in range(BLOCKS)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        while not server.is_up:  # noqa: ASYNC110
            await trio.sleep(0.01)
        for number in range(MACHINES):
            member = Membership(bytes([number]) * 16, f"10.0.0.{number}:9400", 1)
            await server.call(BEAT, *member.arguments({}))
            for at in range(number * limits.DIRECTORY_BATCH, BLOCKS, MACHINES * limits.DIRECTORY_BATCH):
                changes = [(digest, True) for digest in digests[at : at + limits.DIRECTORY_BATCH]]
                await server.call(CHANGE, member.store_id, b"1", encode_changes(changes))
        nursery.cancel_scope.cancel()
    return digests


async def _in_turns(
    directory: Directory, connection: TCPConnection, digests: list[bytes], seconds: float
) -> Result:
    async def look_up(first: int) -> None:
        holders = await directory.holders(digests[first : first + ASKED])
        if holders is None or not all(holders):
            raise RuntimeError("bench: a block was not located")

    async def round_trip(first: int) -> None:
        await connection.create_request(b"MGET", *digests[first : first + ASKED])

    for digest in digests[: 100 * ASKED]:
        await connection.create_request(b"SET", digest, b"1")
    sides: list[Callable[[int], Awaitable[None]]] = [look_up, round_trip]
    samples: list[list[float]] = [[], []]
    deadline, turn = perf_counter_ns() + int(seconds * 1e9), 0
    while perf_counter_ns() < deadline or turn < LEAST_TURNS:
        for index in (0, 1) if turn % 2 else (1, 0):
            began = perf_counter_ns()
            await sides[index](turn % 100 * ASKED)
            samples[index].append((perf_counter_ns() - began) / 1000)
        turn += 1
    values, others = (sorted(each[LEAST_TURNS // 2 :]) for each in samples)
    value, baseline = median(values), median(others)
    at = len(values) * 99 // 100
    return Result("directory.lookup_64", value, "us", baseline, baseline / value, values[at], others[at])
