"""Many processes at one store, some of which are killed: every read is right, and nobody leaves anything behind.

The model: the bytes of a block follow from its key, so a read is right or a miss. Each process knows besides what
it put itself and nobody removes: that stays, since the store has room for all of it.
"""

from __future__ import annotations

import os
import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import xxhash

import kvfs
from kvfs import errors
from tests.support.seeds import SEED, rounds
from tests.support.sessions import MIB, Child, Server, fork, session_server
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a private tmpfs")

PROCESSES = 8
KILLS = rounds(16, 40)
SHARED = 64
"""Keys that all processes put and remove."""
SIZES = (0, 1, 100, 4096, 4097, 70_000, 300_001)


def size_of(key: bytes) -> int:
    return SIZES[key[1] % len(SIZES)]


def data_of(key: bytes) -> bytes:
    size = size_of(key)
    return (xxhash.xxh3_128_digest(key) * (size // 16 + 1))[:size]


def key_of(group: int, number: int) -> bytes:
    return b"\1" + xxhash.xxh3_128_digest(f"{group} {number}".encode())[:15]


@dataclass
class Worker:
    """One process's part: random calls, each checked against the model."""

    blocks: kvfs.Blocks
    number: int
    random: random.Random
    mine: set[bytes] = field(default_factory=set)
    calls: int = 0

    def step(self) -> None:
        self.calls += 1
        calls = [self.put, self.put, self.get_into, self.get_into, self.get, self.draft, self.abandon]
        self.random.choice([*calls, self.remove, self.look, self.layers])()

    def keys(self) -> list[bytes]:
        """Some of everybody's, and some of its own."""
        count = self.random.randrange(1, 9)
        shared = [key_of(0, self.random.randrange(SHARED)) for _ in range(count)]
        own = [key_of(1 + self.number, self.random.randrange(30)) for _ in range(count // 2)]
        return list(dict.fromkeys(shared + own))

    def note(self, keys: list[bytes]) -> None:
        shared = {key_of(0, number) for number in range(SHARED)}
        self.mine |= set(keys) - shared

    def put(self) -> None:
        keys = self.keys()
        before = [self.random.choice([None, key_of(0, 0)]) for _ in keys]
        new = self.blocks.put(keys, [data_of(key) for key in keys], before)
        assert not any(flag and key in self.mine for key, flag in zip(keys, new, strict=True)), "put twice"
        self.note(keys)

    def get_into(self) -> None:
        keys = self.keys()
        into = [bytearray(size_of(key)) for key in keys]
        for key, size, found in zip(keys, self.blocks.get_into(keys, into), into, strict=True):
            assert size == (len(found) if size >= 0 else -1), f"{key.hex()}: {size} bytes"
            assert size < 0 or found == data_of(key), f"{key.hex()}: wrong bytes"
            assert size >= 0 or key not in self.mine, f"{key.hex()}: gone"

    def get(self) -> None:
        """Views stay right while others remove and replace the blocks."""
        keys = self.keys()
        views = self.blocks.get(keys)
        self.blocks.remove([key for key in keys if key not in self.mine][:2])
        self.put()
        for key, view in zip(keys, views, strict=True):
            assert view is None or bytes(view) == data_of(key), f"{key.hex()}: a view changed"
            if view is not None:
                view.release()

    def draft(self) -> None:
        keys = self.keys()
        drafts = self.blocks.reserve(keys, [size_of(key) for key in keys])
        for key, draft in zip(keys, drafts, strict=True):
            if draft is not None:
                with memoryview(draft) as view:
                    view[:] = data_of(key)
        self.blocks.seal(drafts)
        self.note(keys)

    def abandon(self) -> None:
        keys = self.keys()
        drafts = self.blocks.reserve(keys, [size_of(key) for key in keys])
        for draft in drafts:
            if draft is not None:
                draft.write(bytes(draft.size_bytes // 2))
        self.blocks.abort(drafts)

    def remove(self) -> None:
        self.blocks.remove([key_of(0, self.random.randrange(SHARED)) for _ in range(3)])

    def look(self) -> None:
        keys = self.keys()
        there = self.blocks.exists(keys)
        assert all(flag for key, flag in zip(keys, there, strict=True) if key in self.mine), "gone"
        assert 0 <= self.blocks.match(keys) <= len(keys)

    def layers(self) -> None:
        keys = [key for key in self.keys() if size_of(key) == 4096]
        into = [[bytearray(1024) for _ in keys] for _ in range(4)]
        loading = self.blocks.load_layers(keys, into)
        for layer in range(4):
            for key, hit, part in zip(keys, loading.wait_layer(layer), into[layer], strict=True):
                assert not hit or part == data_of(key)[layer * 1024 :][:1024]


def work(server: Server, seed: int, number: int, calls: int, pipe: socket.socket) -> int:
    with server.connect() as client, client.blocks(NAMESPACE) as blocks:
        worker = Worker(blocks, number, random.Random(seed))
        worker.mine = {key for n in range(30) if blocks.exists([key := key_of(1 + number, n)])[0]}
        while worker.calls < calls:
            worker.step()
            with suppress(BrokenPipeError):
                pipe.send(b".", socket.MSG_DONTWAIT) if worker.calls == 1 else None
        return worker.calls


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.child.pid}/fd"))


def start(server: Server, seed: int, number: int, calls: int) -> Child:
    return fork(lambda pipe: work(server, seed, number, calls, pipe))


def check_nothing_left(server: Server, before: int) -> None:
    """No drafts, no held bytes, a slot for each block and no more, as many descriptors as at first."""

    def is_clean(found: dict[str, Any]) -> bool:
        [dram] = found["tiers"]
        counts = (found["session_drafts"], found["open_drafts"], dram["held_bytes"])
        return bool(found["sessions"] == 1) and counts == (0, 0, 0) and dram["slots"] == found["blocks"]

    server.wait_until(is_clean)
    end_s = time.monotonic() + WAIT_S
    while descriptors(server) > before:
        assert time.monotonic() < end_s, f"{descriptors(server)} descriptors, {before} at first"
        time.sleep(0.01)


@pytest.mark.seeded
def test_many_processes_and_a_killer() -> None:
    killer = random.Random(SEED)
    with session_server(dram_bytes=256 * MIB) as server:
        before = descriptors(server)
        children = {
            number: start(server, SEED + number, number, calls=100_000) for number in range(PROCESSES)
        }
        for kill in range(KILLS):
            number = killer.randrange(PROCESSES)
            children[number].wait_for(b".")  # it is in the middle of things
            time.sleep(killer.random() * 0.05)
            children[number].kill()
            children[number].pipe.close()
            children[number] = start(server, SEED + 1000 + kill, number, calls=100_000)
        for number, child in children.items():
            child.kill()
            child.pipe.close()
            children[number] = start(server, SEED + 2000 + number, number, calls=150)
        for child in children.values():
            child.wait_for(b".")
            assert child.result() == 150
        check_nothing_left(server, before)
        with server.connect() as client, client.blocks(NAMESPACE) as blocks:
            keys = [key_of(group, n) for group in range(1 + PROCESSES) for n in range(SHARED)]
            for key, view in zip(keys, blocks.get(keys), strict=True):
                assert view is None or bytes(view) == data_of(key)


@pytest.mark.seeded
def test_processes_go_on_over_a_store_that_is_too_small() -> None:
    """Eviction takes what it wants: then nothing stays for certain, but what is read is right."""

    def churn(number: int) -> int:
        choose, reads = random.Random(SEED + number), 0
        with server.connect() as client, client.blocks(NAMESPACE) as blocks:
            for _ in range(300):
                keys = [key_of(0, choose.randrange(400)) for _ in range(6)]
                with suppress(errors.NoSpace):
                    blocks.put(keys, [data_of(key) for key in keys])
                into = [bytearray(size_of(key)) for key in keys]
                for key, size, found in zip(keys, blocks.get_into(keys, into), into, strict=True):
                    assert size < 0 or found == data_of(key), f"{key.hex()}: wrong bytes"
                    reads += size >= 0
            return reads

    with session_server(dram_bytes=16 * MIB) as server:
        before = descriptors(server)
        children = [fork(lambda _, number=number: churn(number)) for number in range(4)]
        reads = [child.result() for child in children]
        assert min(reads) > 300
        check_nothing_left(server, before)
