"""One store in this process, changed at random, left stopped or as a kill leaves it, and damaged in one place.

Responsibility: a load in which names are overwritten, renamed, removed, synced while they are written, and rewritten
extent by extent; what each name may show afterwards; damage to one file. A value is never given twice, so whatever a
name shows tells when it was written: an older one than the last acknowledged is wrong, a miss is not.

Concurrency: one task changes, the store's own tasks write; the caller has no other store in the directory.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from kvfs.errors import KvfsError
from kvfs.keys import block_name
from kvfs.limits import MIB
from tests.support.stores import NAMESPACE, abandon_home
from tests.support.waits import WAIT_S
from tiers.device.device import Device
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Draft, Name, ObjectInfo
from tiers.nvme.large_draft import LargeDraft
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

CACHE, DURABLE, BLOCKS = b"cache", b"durable", b"blocks"
SIZES: Final = (1, 700, 5_000, 20_000, 60_000, 200_000)
NVME_BYTES: Final = 16 * MIB
KEYS: Final = [
    *(b"k%d" % number for number in range(5)),
    *(b"d%d/%d" % (d, n) for d in (0, 1) for n in (0, 1)),
]
DIGESTS: Final = [bytes([number + 1]) * 16 for number in range(4)]


class Killed(BaseException):
    """The process ends here."""


async def start(path: Path, device: Device, *, times: int = 1, devices: tuple[Path, ...] = ()) -> Store:
    """Start a store, so many times as large as the others, or on block devices."""
    return await start_store(
        StoreOptions(
            path,
            dram_bytes=times * 16 * MIB,
            backing="directory",
            nvme=NvmeOptions(device, times * NVME_BYTES, devices=devices, segment_bytes=MIB),
        )
    )


def abandon(store: Store) -> None:
    """Let go of everything as a killed process does."""
    store.dram._prepare_keep = lambda: None  # type: ignore[method-assign]
    store.dram.close(keep=True)
    store.names.environment._env.close()
    abandon_home(store.home)


@asynccontextmanager
async def life(
    path: Path, device: Device, *, times: int = 1, devices: tuple[Path, ...] = ()
) -> AsyncIterator[Store]:
    """A store that runs, and is left as a kill leaves it. The device stays open."""
    store = await start(path, device, times=times, devices=devices)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            yield store
            nursery.cancel_scope.cancel()
    finally:
        abandon(store)


@dataclass
class Expected:
    """What each name may show: the last acknowledged value, or that of the one change that nobody was told of."""

    values: dict[Name, bytes] = field(default_factory=dict)
    before: dict[Name, bytes | None] = field(default_factory=dict)
    """Of a change that is not acknowledged yet: name -> what it had. The change takes effect for all or none."""
    closed: dict[Name, bytes | None] = field(default_factory=dict)
    """Of a name whose file was synced, and whose seal is not acknowledged yet: what was sealed there before. Damage to
    the copy brings that back: nobody was told that it is replaced."""

    def sync(self, name: Name, value: bytes) -> None:
        self.closed.setdefault(name, self.values.get(name))
        self.begin({name: value})

    def begin(self, changes: dict[Name, bytes | None]) -> None:
        self.before = {name: self.values.get(name) for name in changes}
        for name, value in changes.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def settled(self, *, sealed: bool = True) -> None:
        self.before = {}
        if sealed:
            self.closed = {}

    def allowed(self, name: Name, *, damaged: bool = False) -> set[bytes]:
        """Without None: a miss, which the caller judges."""
        found = {self.values.get(name), self.before.get(name), self.closed.get(name) if damaged else None}
        return {value for value in found if value is not None}

    def judge(self, found: dict[Name, bytes], *, damaged: bool = False) -> list[str]:
        """Names that show what they may not, and values that show twice."""
        wrong = [
            f"{name} shows {_version(value)}"
            for name, value in found.items()
            if value not in self.allowed(name, damaged=damaged)
        ]
        owners: dict[bytes, Name] = {}
        for name, value in found.items():
            other = owners.setdefault(value, name)
            if other is not name:
                wrong.append(f"{other} and {name} both show {_version(value)}")
        return wrong


def _version(value: bytes) -> str:
    return value[:16].decode(errors="replace")


class Life:
    """Random changes of one store, from `start` to a stop or a kill."""

    def __init__(self, path: Path, seed: int, devices: tuple[Path, ...] = ()) -> None:
        self.path = path
        self.devices = devices
        self.chance = random.Random(seed)
        self.expected = Expected()
        self.history: list[str] = []
        self._count = 0

    def value(self, size: int) -> bytes:
        self._count += 1
        return b"%015d " % self._count + self.chance.randbytes(size)

    async def run(self, changes: int, *, killed: bool, keep: bool = True, settled: bool = False) -> None:
        """One life. Killed: after the last change, which is acknowledged or not; or `settled`, once all of it is on the
        device: until then the log alone shows names of a cache as they were."""
        device = thread_device()
        store = await start(self.path, device, devices=self.devices)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                await self._live(store, changes, killed and not settled)
                if settled:
                    await self._reach_tier(store)
                nursery.cancel_scope.cancel()
            if not killed:
                await store.finish()
                store.close(keep=keep)
        finally:
            if killed:
                abandon(store)
            with trio.CancelScope(shield=True):
                await device.aclose()

    async def _live(self, store: Store, changes: int, may_end_early: bool) -> None:
        if not store.buckets():
            store.create_bucket(CACHE, uid=0, gid=0)
            store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
            store.create_bucket(BLOCKS, uid=0, gid=0, namespace=NAMESPACE)
            await store.journal.settle()
        if self.chance.random() < 0.5:
            await self._reach_tier(store)
        actions: list[tuple[int, Callable[[Store], Awaitable[None] | None]]] = [
            (12, self._put),
            (4, self._put_synced),
            (3, self._put_large),
            (5, self._rename),
            (1, self._rename_directory),
            (4, self._remove),
            (4, self._put_block),
            (3, self._remove_block),
        ]
        weights = [weight for weight, _ in actions]
        for number in range(changes):
            action = self.chance.choices([action for _, action in actions], weights)[0]
            doing = action(store)
            if doing is not None:
                await doing
            store.maintain()
            if may_end_early and number == changes - 1 and self.chance.random() < 0.5:
                return
            await store.journal.settle()
            self.expected.settled()
            if self.chance.random() < 0.3:
                await self._reach_tier(store)

    async def _reach_tier(self, store: Store) -> None:
        """Wait until everything is written behind."""
        store.dram.checksums.wait(WAIT_S)
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        with trio.fail_after(WAIT_S):
            while journal.usage()[0]["write_behind"] or journal.nvme.log.backlog:  # noqa: ASYNC110 it notifies nobody
                await trio.sleep(0.001)
            await journal.nvme.log.settle()

    def _sync(self, what: str, name: Name, value: bytes) -> None:
        self.expected.sync(name, value)
        self.history.append(f"{what} {name}: {_version(value)}")

    def _begin(self, what: str, changes: dict[Name, bytes | None]) -> None:
        self.expected.begin(changes)
        values = {str(name): None if value is None else _version(value) for name, value in changes.items()}
        self.history.append(f"{what} {values}")

    def _name(self) -> Name:
        return Name(self.chance.choice([CACHE, DURABLE]), self.chance.choice(KEYS))

    def _known(self) -> Name | None:
        names = sorted((name for name in self.expected.values if name.bucket != BLOCKS), key=str)
        return self.chance.choice(names) if names else None

    def _draft(self, store: Store, value: bytes) -> Draft:
        draft = store.reserve(len(value), uid=0)
        fill(store, draft, value)
        return draft

    def _put(self, store: Store) -> None:
        name, value = self._name(), self.value(self.chance.choice(SIZES))
        draft = self._draft(store, value)
        self._begin("put", {name: value})
        store.seal(draft, name, Attributes())

    async def _put_synced(self, store: Store) -> None:
        """Synced while it is written, perhaps twice, changed again or not, sealed, perhaps renamed at once."""
        name, value = self._name(), self.value(self.chance.choice(SIZES))
        draft = store.reserve(len(value) + 1000, uid=0)
        snapshot: int | None = None
        for _ in range(self.chance.choice([1, 1, 2])):
            fill(store, draft, value)
            self._sync("sync", name, value)
            snapshot = await sync_draft(store, draft, name, snapshot)
            self.expected.settled(sealed=False)
            if self.chance.random() < 0.5:
                value = self.value(len(value) - 16)
        fill(store, draft, value)
        self._begin("seal synced", {name: value})
        store.seal(draft, name, Attributes(), snapshot=snapshot)
        if self.chance.random() < 0.5:
            target = Name(name.bucket, self.chance.choice(KEYS))
            if target != name:
                await store.journal.settle()
                self.expected.settled()
                self._begin("rename synced", {name: None, target: value})
                store.rename(name, target)

    async def _put_large(self, store: Store) -> None:
        """Written extent by extent, parts of it again."""
        name, value = self._name(), self.value(300_000)
        draft = store.begin_large(name.bucket, uid=0)
        try:
            await draft.write(0, value)
            if self.chance.random() < 0.5:
                await draft.flush()
            is_synced = self.chance.random() < 0.5
            if is_synced:
                await self._sync_large(store, draft, name, value)
            for _ in range(self.chance.choice([0, 1, 3])):
                at = self.chance.randrange(16, len(value) - 1000)
                part = self.chance.randbytes(1000)
                await draft.write(at, part)
                value = value[:at] + part + value[at + 1000 :]
                await draft.flush()
            await draft.flush()
            if is_synced:  # as the mount does before it answers the close
                await self._sync_large(store, draft, name, value)
            self._begin("seal large", {name: value})
            store.seal_large(draft, name, Attributes())
        finally:
            draft.close()

    async def _sync_large(self, store: Store, draft: LargeDraft, name: Name, value: bytes) -> None:
        self._sync("sync large", name, value)
        await store.persist_large(draft, name, Attributes())
        self.expected.settled(sealed=False)

    def _rename(self, store: Store) -> None:
        source = self._known()
        if source is None:
            return
        target = Name(
            source.bucket if self.chance.random() < 0.7 else self._name().bucket, self.chance.choice(KEYS)
        )
        if target != source:
            self._begin("rename", {source: None, target: self.expected.values[source]})
            try:
                store.rename(source, target)
            except KvfsError as error:
                raise AssertionError(f"{source} -> {target}: {self.history[-5:]}") from error

    def _rename_directory(self, store: Store) -> None:
        bucket = self.chance.choice([CACHE, DURABLE])
        source, target = self.chance.sample([b"d0/", b"d1/", b"d2/"], 2)
        inside = [
            name for name in self.expected.values if name.bucket == bucket and name.key.startswith(source)
        ]
        taken = any(name.bucket == bucket and name.key.startswith(target) for name in self.expected.values)
        if inside and not taken:
            changes: dict[Name, bytes | None] = dict.fromkeys(inside)
            changes |= {Name(bucket, target + n.key[len(source) :]): self.expected.values[n] for n in inside}
            self._begin("rename directory", changes)
            store.rename(Name(bucket, source), Name(bucket, target))

    def _remove(self, store: Store) -> None:
        name = self._known()
        if name is not None:
            self._begin("remove", {name: None})
            store.remove(name)

    def _block(self) -> tuple[bytes, Name]:
        digest = self.chance.choice(DIGESTS)
        return digest, Name(BLOCKS, block_name(digest))

    def _put_block(self, store: Store) -> None:
        digest, name = self._block()
        if name not in self.expected.values:
            value = self.value(self.chance.choice(SIZES))
            draft = self._draft(store, value)
            self._begin("put block", {name: value})
            store.seal_block(draft, BLOCKS, digest, parent=None, uid=0)

    def _remove_block(self, store: Store) -> None:
        digest, name = self._block()
        if name in self.expected.values:
            self._begin("remove block", {name: None})
            store.remove_block(digest)


def fill(store: Store, draft: Draft, data: bytes) -> None:
    descriptor = store.open_draft(draft)
    try:
        os.ftruncate(descriptor, len(data))
        os.pwrite(descriptor, data, 0)
    finally:
        os.close(descriptor)


async def sync_draft(store: Store, draft: Draft, name: Name, previous: int | None = None) -> int:
    """As fsync(2) does; the id of the copy, which takes the place of the previous one."""
    snapshot = store.put_snapshot(draft, name, Attributes())
    assert snapshot is not None
    await store.settle_snapshot(snapshot, previous)
    return snapshot


async def look(path: Path, devices: tuple[Path, ...] = ()) -> dict[Name, bytes]:
    """What a start shows, read whole; what cannot be read is not there."""
    device = thread_device()
    found: dict[Name, bytes] = {}
    try:
        async with life(path, device, devices=devices) as store:
            for bucket in store.buckets():
                for key, info in store.list(bucket.name).entries:
                    if isinstance(info, ObjectInfo):
                        value = await _read(store, info)
                        if value is not None:
                            found[Name(bucket.name, key)] = value
            for digest in DIGESTS:
                try:
                    value = await _read(store, store.lookup_block(digest))
                except KvfsError:
                    continue
                if value is not None:
                    found[Name(BLOCKS, block_name(digest))] = value
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()
    return found


async def _read(store: Store, info: ObjectInfo) -> bytes | None:
    try:
        info = await store.load(info, uid=0)
        descriptor = store.open_read(info, uid=0)
    except KvfsError:
        return None
    try:
        return os.pread(descriptor, info.size_bytes + 1, 0)
    finally:
        os.close(descriptor)
