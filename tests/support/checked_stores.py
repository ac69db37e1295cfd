"""Stores that tests have `kvfs fsck` check, in this process, and damage to a byte or a record of theirs.

Responsibility: a store's life at random and what it holds in the end, what it serves afterwards, the check itself, the
place of a record in the segments, and a flipped byte.

Concurrency: a test's own task; a life runs trio for itself.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from kvfs.cli.offline.fsck_command import _check
from kvfs.errors import KvfsError, NoSpace
from kvfs.formats import RECORD_HEADER, RECORD_MAGIC, SEGMENT_DATA_START
from kvfs.limits import MIB
from tests.support.nvme_stores import fill, put_block, read, running
from tests.support.one_store import abandon
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

NVME: Final = 16 * MIB
CACHE, DURABLE, BLOCKS = b"cache", b"durable", b"blocks"
SIZES: Final = (0, 1, 700, 5_000, 60_000, 300_000, 600_000)


@dataclass
class Life:
    """A store's life at random, and what it holds in the end."""

    path: Path
    random: random.Random
    names: dict[Name, bytes] = field(default_factory=dict)
    """Of named objects; of a cache's, those that are there may be fewer."""
    digests: list[bytes] = field(default_factory=list)

    async def run(self, lives: int, *, killed: bool) -> None:
        for number in range(lives):
            last = number == lives - 1
            if last and killed:
                await self._killed_life()
            else:
                async with running(self.path, nvme_bytes=NVME, keep=self.random.random() < 0.5) as store:
                    await self._live(store)

    async def _killed_life(self) -> None:
        device = thread_device()
        store = await start_store(
            StoreOptions(
                self.path,
                dram_bytes=16 * MIB,
                backing="directory",
                nvme=NvmeOptions(device, NVME, segment_bytes=MIB),
            )
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            await self._live(store)
            nursery.cancel_scope.cancel()
        abandon(store)
        await device.aclose()

    async def _live(self, store: Store) -> None:
        if not store.buckets():
            store.create_bucket(CACHE, uid=0, gid=0)
            store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
            store.create_bucket(BLOCKS, uid=0, gid=0, namespace=NAMESPACE)
        for _ in range(60):
            try:
                self._step(store)
            except KvfsError:
                continue
            if self.random.random() < 0.2:
                await store.journal.settle()
            store.maintain()
            await trio.lowlevel.checkpoint()
        await store.journal.settle()
        store.dram.checksums.wait(WAIT_S)

    def _step(self, store: Store) -> None:
        choice = self.random.random()
        name = self._name()
        if choice < 0.1:
            leads_to = b"../%d" % self.random.randrange(1 << 60)
            store.make_link(name, leads_to, Attributes(), replace=True)
            self.names[name] = leads_to
        elif choice < 0.6:
            size = self.random.choice(SIZES if name.bucket == CACHE else SIZES[:5])
            draft = store.reserve(size, uid=0)
            content = self.random.randbytes(size)
            fill(store, draft, content)
            try:
                store.seal(draft, name, Attributes())
            except NoSpace:
                store.abort(draft)
                return
            self.names[name] = content
        elif choice < 0.7 and name in self.names:
            target = Name(name.bucket, b"renamed-" + name.key)
            store.rename(name, target)
            self.names[target] = self.names.pop(name)
        elif choice < 0.8:
            store.remove(name)
            self.names.pop(name, None)
        elif choice < 0.85:
            store.set_attributes(name, mode=self.random.choice([0o600, 0o644]))
        elif choice < 0.9:
            store.make_directory(Name(name.bucket, b"dir%d/" % self.random.randrange(9)), Attributes())
        else:
            digest = self.random.randbytes(16)
            put_block(store, BLOCKS, digest, self.digests[-1] if self.digests else None, 4096)
            self.digests.append(digest)

    def _name(self) -> Name:
        bucket = DURABLE if self.random.random() < 0.4 else CACHE
        return Name(bucket, b"n%d" % self.random.randrange(25))


def live(path: Path, seed: int, *, lives: int = 3, killed: bool = False) -> Life:
    life = Life(path, random.Random(seed))
    trio.run(lambda: life.run(lives, killed=killed))
    return life


def fsck(path: Path, *, repair: bool = True) -> dict[str, Any]:
    return _check(path, path / "nvme", repair)


async def _serve(path: Path, life: Life) -> tuple[dict[Name, bytes], set[bytes]]:
    """What a store serves: all right, or not at all."""
    there: dict[Name, bytes] = {}
    async with running(path, nvme_bytes=NVME) as store:
        for bucket in store.buckets():
            for key, info in store.list(bucket.name).entries:
                name = Name(bucket.name, key)
                if isinstance(info, ObjectInfo) and info.name is not None:
                    there[name] = await read(store, name)
        blocks = set()
        for digest in life.digests:
            try:
                info = await store.load(store.lookup_block(digest), uid=0)
            except KvfsError:
                continue
            descriptor = store.open_read(info, uid=0)
            assert os.pread(descriptor, 5000, 0) == digest * 256
            os.close(descriptor)
            blocks.add(digest)
    for name, content in there.items():
        assert life.names.get(name) == content, f"{name} is served with other bytes"
    return there, blocks


def serve(path: Path, life: Life) -> tuple[dict[Name, bytes], set[bytes]]:
    return trio.run(_serve, path, life)


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ mask]))


def find_record(path: Path, kind: int, object_id: int | None = None) -> tuple[Path, int]:
    """(file, offset) of the last record of a type, of an object."""
    found = []
    for file in sorted((path / "nvme").glob("*.seg")):
        data = file.read_bytes()
        for at in range(SEGMENT_DATA_START, len(data) - RECORD_HEADER.size, 512):
            if data[at : at + 4] == RECORD_MAGIC:
                raw = RECORD_HEADER.decode(data[at : at + RECORD_HEADER.size])
                if raw["type"] == kind and object_id in (None, raw["object_id"]):
                    found.append((raw["sequence"], file, at))
    _, file, at = max(found)
    return file, at
