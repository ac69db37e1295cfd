"""Clients that change a store at random and say before and after what they do, and a look at all that it holds.

Responsibility: the load of the crash tests, the same in a process that is killed and over a device that loses
power. Each client has names of its own, so that one change at a time concerns a name; what clients share are
the store, its tiers and its log. Content follows from a version (`posix.pattern`); a block's bytes begin with
it, so that a block that was removed and stored again is told from the one before.

Concurrency: trio tasks of one store's thread.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import trio

from kvfs._native.shared.table import TIER_COLD
from kvfs.errors import KvfsError, NotFound, Superseded
from kvfs.index.rows import ROW_ONLY
from kvfs.keys import block_name
from tests.support.crash_model import Assignment, Value
from tests.support.posix import pattern
from tests.support.stores import NAMESPACE
from tiers.cold.format import HEADER_BYTES
from tiers.cold.tier import ColdTier
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.stored import counted_bytes
from tiers.nvme.write_behind import NvmeJournal
from tiers.store.store import Store

CLIENTS: Final = 3
LIVES_APART: Final = 14
"""Versions of one client in one life: 2 to the power of this."""
VERSION_BYTES: Final = 8
SIZES: Final = (0, 1, 511, 4096, 5_000, 20_000, 70_000, 150_000, 256 * 1024, 300_000, 700_000)

LINK_LENGTHS: Final = (1, 3, 40, 300)
"""How often a link's target repeats its version."""

Say = Callable[..., None]


def make_buckets(store: Store) -> None:
    """Those that are missing."""
    there = {bucket.name for bucket in store.buckets()}
    durable_blocks = replace(NAMESPACE, salt="durable")
    wanted: dict[bytes, dict[str, Any]] = {
        b"cache": {},
        b"ghost": {"admits_all": False},
        b"dur": {"durable": True},
        b"kv": {"namespace": NAMESPACE},
        b"dkv": {"namespace": durable_blocks, "durable": True},
    }
    for name, options in wanted.items():
        if name not in there:
            store.create_bucket(name, uid=0, gid=0, **options)


def block_bytes(version: int) -> bytes:
    """What a block of this version holds."""
    return version.to_bytes(VERSION_BYTES, "little") + pattern(version, SIZES[version % len(SIZES)])


def block_version(data: bytes) -> int:
    return int.from_bytes(data[:VERSION_BYTES], "little")


@dataclass
class Client:
    """One task's random changes."""

    store: Store
    number: int
    seed: int
    life: int
    say: Say
    durable_share: float = 0.3
    version: int = 0
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.seed}/{self.life}/{self.number}")
        self.version = (self.life * CLIENTS + self.number) << LIVES_APART
        root = b"c%d/" % self.number
        self.keys = [root + b"k%d" % n for n in range(12)]
        self.keys += [root + b"d%d/%d" % (d, n) for d in range(3) for n in range(4)]
        self.unit_keys = [root + b"%032x/%d" % (0xABC + self.number, n) for n in range(3)]
        self.markers = [root + b"m%d/" % n for n in range(3)]
        self.directories = [root + b"d%d/" % d for d in range(4)]
        self.digests = [bytes([self.number + 1, n + 1]) * 8 for n in range(12)]

    async def run(self, changes: int) -> None:
        actions: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (30, self.put),
            (6, self.make_link),
            (8, self.rename),
            (7, self.remove),
            (3, self.rename_directory),
            (4, self.set_attributes),
            (10, self.put_block),
            (3, self.remove_block),
            (3, self.make_directory),
            (2, self.remove_directory),
            (14, self.read),
            (3, self.evict),
            (2, self.persist),
            (1, self.maintain),
        ]
        weights = [weight for weight, _ in actions]
        for _ in range(changes):
            await self.chance.choices(actions, weights)[0][1]()
            await trio.lowlevel.checkpoint()

    # --- one change ----------------------------------------------------------------------------------------
    async def change(self, call: Callable[[], object], assignments: list[Assignment]) -> None:
        """Say it, do it, wait until it is settled, say so."""
        self.say(client=self.number, begin=assignments)
        try:
            call()
        except KvfsError as error:
            self.say(client=self.number, failed=type(error).__name__)
            return
        try:
            await self.store.journal.settle()
        except KvfsError as error:
            self.say(client=self.number, unsure=type(error).__name__)
        else:
            self.say(client=self.number, done=True)

    def pick(self) -> Name:
        durable = self.chance.random() < self.durable_share
        bucket = b"dur" if durable else self.chance.choice([b"cache", b"cache", b"ghost"])
        key = self.chance.choice(self.keys if self.chance.random() < 0.9 else self.unit_keys)
        return Name(bucket, key)

    def value_of(self, name: Name) -> Value | None:
        """What the store has under a name, as the model counts it."""
        try:
            found = self.store.lookup(name)
        except KvfsError:
            return None
        return value_of(found) if isinstance(found, ObjectInfo) else None

    async def put(self) -> None:
        name = self.pick()
        self.version += 1
        version, size = self.version, self.chance.choice(SIZES)
        mode, pinned = self.chance.choice([0o600, 0o644]), self.chance.random() < 0.02
        try:
            draft = self.store.reserve(size, uid=0)
        except KvfsError:
            return
        self.fill(draft, pattern(version, size))
        await trio.lowlevel.checkpoint()
        attributes = Attributes(mode=mode, pinned=pinned, user_metadata=str(version).encode())

        def seal() -> None:
            try:
                self.store.seal(draft, name, attributes)
            finally:
                self.store.abort(draft)

        await self.change(seal, [(str(name), (version, size, mode, pinned))])

    async def make_link(self) -> None:
        name = self.pick()
        self.version += 1
        version, target = self.version, link_target(self.version)
        attributes = Attributes(user_metadata=str(version).encode())
        await self.change(
            lambda: self.store.make_link(name, target, attributes, replace=True),
            [(str(name), (version, len(target), 0o777, False))],
        )

    def fill(self, draft: Any, data: bytes) -> None:
        descriptor = self.store.open_draft(draft)
        try:
            assert os.pwrite(descriptor, data, 0) == len(data)
        finally:
            os.close(descriptor)

    async def put_block(self) -> None:
        digest = self.chance.choice(self.digests)
        bucket = b"dkv" if digest[1] % 4 == 0 else b"kv"
        if self.store.block_bucket(digest) is not None:
            return
        parent = bytes([digest[0], digest[1] - 1]) * 8 if digest[1] % 4 > 1 else None
        self.version += 1
        version, data = self.version, block_bytes(self.version)
        try:
            draft = self.store.reserve(len(data), uid=0)
        except KvfsError:
            return
        self.fill(draft, data)

        def seal() -> None:
            try:
                self.store.seal_block(draft, bucket, digest, parent=parent, uid=0)
            finally:
                self.store.abort(draft)

        name = f"{bucket.decode()}:{digest.hex()}"
        await self.change(seal, [(name, (version, len(data), 0, False))])

    async def remove_block(self) -> None:
        digest = self.chance.choice(self.digests)
        bucket = b"dkv" if digest[1] % 4 == 0 else b"kv"
        await self.change(
            lambda: self.store.remove_block(digest), [(f"{bucket.decode()}:{digest.hex()}", None)]
        )

    async def rename(self) -> None:
        source, target = self.pick(), self.pick()
        value = self.value_of(source)
        if value is not None and source != target:
            await self.change(
                lambda: self.store.rename(source, target), [(str(source), None), (str(target), value)]
            )

    async def remove(self) -> None:
        name = self.pick()
        await self.change(lambda: self.store.remove(name), [(str(name), None)])

    async def rename_directory(self) -> None:
        source, target = self.chance.sample(self.directories, 2)
        bucket = self.chance.choice([b"cache", b"dur"])
        assignments: list[Assignment] = []
        for key, found in self.store.list(bucket, prefix=source).entries:
            if isinstance(found, ObjectInfo):
                assignments.append((str(Name(bucket, key)), None))
                assignments.append((str(Name(bucket, target + key[len(source) :])), value_of(found)))
        await self.change(lambda: self.store.rename(Name(bucket, source), Name(bucket, target)), assignments)

    async def set_attributes(self) -> None:
        name, mode = self.pick(), self.chance.choice([0o640, 0o444])
        value = self.value_of(name)
        if value is not None:
            version, size, _, pinned = value
            await self.change(
                lambda: self.store.set_attributes(name, mode=mode),
                [(str(name), (version, size, mode, pinned))],
            )

    async def make_directory(self) -> None:
        name = Name(self.chance.choice([b"cache", b"dur"]), self.chance.choice(self.markers))
        await self.change(
            lambda: self.store.make_directory(name, Attributes(mode=0o755)), [(str(name), (0, 0, 0, False))]
        )

    async def remove_directory(self) -> None:
        name = Name(self.chance.choice([b"cache", b"dur"]), self.chance.choice(self.markers))
        await self.change(lambda: self.store.remove_directory(name), [(str(name), None)])

    # --- what changes nothing --------------------------------------------------------------------------------
    async def read(self) -> None:
        if self.chance.random() < 0.3:
            digest = self.chance.choice(self.digests)
            name = Name(b"dkv" if digest[1] % 4 == 0 else b"kv", block_name(digest))
        else:
            name = self.pick()
        try:
            await read_whole(self.store, name, self.say)
        except KvfsError:
            return

    async def evict(self) -> None:
        try:
            if self.chance.random() < 0.5:
                self.store.evict(self.chance.randrange(2_000_000))
            else:
                self.store.evict(names=[self.pick()])
        except KvfsError:
            return

    async def persist(self) -> None:
        try:
            found = self.store.lookup(self.pick())
            if isinstance(found, ObjectInfo):
                await self.store.journal.persist(found.object_id)
        except KvfsError:
            return

    async def maintain(self) -> None:
        self.store.maintain()


def link_target(version: int) -> bytes:
    """Where the symbolic link of this version leads."""
    return b"%d/" % version * LINK_LENGTHS[version % len(LINK_LENGTHS)]


def value_of(info: ObjectInfo) -> Value:
    """Of a named object."""
    return (int(info.user_metadata), info.size_bytes, info.mode, info.pinned)


async def read_whole(store: Store, name: Name, say: Say) -> Value:
    """Read an object and hold it against what it must be; `wrong` is said of other bytes. Raises what `load` does."""
    while True:
        info = store.lookup(name)
        if not isinstance(info, ObjectInfo):
            raise NotFound(f"{name} is a directory")
        if info.target:
            value = value_of(info)
            if info.target != link_target(value[0]) or info.size_bytes != len(info.target):
                say(wrong=f"{info}: a link of version {value[0]}")
            return value
        try:
            info = await store.load(info, uid=0)
            descriptor = store.open_read(info, uid=0)
        except Superseded:
            continue
        break
    try:
        data = os.pread(descriptor, info.size_bytes + 1, 0)
    finally:
        os.close(descriptor)
    if info.name is None:
        value = (block_version(data), info.size_bytes, 0, False)
        wanted = block_bytes(value[0])
    else:
        value = value_of(info)
        wanted = pattern(value[0], info.size_bytes)
    if data != wanted:
        say(wrong=f"{info}: {len(data)} bytes, the first are {data[:16].hex()}")
    return value


# --- a look at everything --------------------------------------------------------------------------------------
async def look(store: Store, say: Say) -> dict[str, Value]:
    """All that can be read, every byte compared; `vanished` is said of what turned out to be gone."""
    found: dict[str, Value] = {}
    for bucket in store.buckets():
        after = b""
        while True:
            page = store.list(bucket.name, after=after)
            for key, info in page.entries:
                where = Name(bucket.name, key)
                name = str(where)
                if not isinstance(info, ObjectInfo):
                    found[name] = (0, 0, 0, False)
                    continue
                if info.name is None:
                    name = f"{bucket.name.decode()}:{info.key.digest.hex()}"
                try:
                    found[name] = await read_whole(store, where, say)
                except NotFound as error:
                    say(vanished=f"{name}: {error}")
            if page.next_after is None:
                break
            after = page.next_after
    return found


def audit(store: Store) -> list[str]:
    """What is wrong with the books: bytes used, live and counted, table entries and names."""
    wrong = [*_audit_table(store), *_audit_dram(store)]
    if isinstance(store.journal, NvmeJournal):
        wrong += _audit_nvme(store.journal)
    if isinstance(store.cold, ColdTier):
        wrong += _audit_cold(store, store.cold)
    return wrong


def _audit_table(store: Store) -> list[str]:
    wrong = []
    journal = store.journal
    for digest, entry in store.table.items():
        object_id = store.object_id_of(digest)
        if object_id is None:
            wrong.append(f"table entry {digest.hex()} belongs to nothing")
        elif not entry.tiers:
            wrong.append(f"object {object_id} is in no tier")
        elif entry.tiers == 4 and not journal.holds(object_id):
            wrong.append(f"object {object_id} is said to be on NVMe, and is not")
    sizes: Counter[bytes] = Counter()
    for block in filter(None, map(store.catalog.blocks.get, store.catalog.blocks.digests())):
        sizes[block.bucket] += block.size_bytes
    for bucket in store.buckets():
        counted = store.catalog.blocks.size_bytes(bucket.name)
        if counted != sizes[bucket.name]:
            wrong.append(f"{sizes[bucket.name]} bytes of blocks in {bucket.name!r}, {counted} counted")
    names = sum(1 for _, _, row in store.names.rows() if row is not None and not row.flags & ROW_ONLY)
    if names != store.usage()["objects"]:
        wrong.append(f"{names} names in the index, {store.usage()['objects']} objects known")
    return wrong


def _audit_cold(store: Store, cold: ColdTier) -> list[str]:
    """Rows, order and the table's bits are the same; what is on its way has no row yet, or none any more."""
    marked = {
        str(store.cold_name(digest)): entry.size_bytes + HEADER_BYTES
        for digest, entry in store.table.items()
        if entry.tiers & TIER_COLD
    }
    rows = {name: 0 if row is None else row.size_bytes + HEADER_BYTES for name, row in cold.index.rows()}
    wrong = [f"cold: {name} differs" for name in {*marked, *rows} if marked.get(name) != rows.get(name)]
    used = sum(rows.values()) + sum(cold.writing.values()) + sum(cold.deleting.values())
    if not used == cold.used_bytes <= cold.capacity_bytes:
        wrong.append(f"cold: {cold.used_bytes} bytes used of {cold.capacity_bytes}, {used} are there")
    return wrong


def _audit_dram(store: Store) -> list[str]:
    usage = store.dram.usage()
    files = sum(file.stat().st_blocks * 512 for file in store.dram.directory.iterdir())
    wrong = []
    if not 0 <= usage.used_bytes <= usage.capacity_bytes:
        wrong.append(f"DRAM: {usage.used_bytes} bytes used of {usage.capacity_bytes}")
    if store.dram.backing == "directory" and usage.used_bytes != files + usage.held_bytes:
        wrong.append(
            f"DRAM: {usage.used_bytes} bytes used, {usage.held_bytes} of them held, {files} in files"
        )
    return wrong


def _audit_nvme(journal: NvmeJournal) -> list[str]:
    nvme = journal.nvme
    wrong = []
    if not 0 <= nvme.pool.kept_bytes <= nvme.pool.live_bytes <= nvme.used_bytes <= nvme.capacity_bytes:
        wrong.append(
            f"NVMe: {nvme.pool.kept_bytes} kept, {nvme.pool.live_bytes} live, {nvme.used_bytes} used, "
            f"{nvme.capacity_bytes} in all"
        )
    live: dict[int, int] = {}
    for stored in [*nvme.objects.values(), *nvme._deleting.values(), *nvme._held.values()]:
        for piece in stored.pieces:
            if piece is not None:
                live[piece.segment] = live.get(piece.segment, 0) + counted_bytes(piece.record_bytes, 0)
        if stored.meta is not None:
            (segment, _), size = stored.meta
            live[segment] = live.get(segment, 0) + size
    for place in nvme.buckets._buckets.values():
        if place.place is not None:
            (segment, _), size = place.place
            live[segment] = live.get(segment, 0) + size
    for each in nvme.pool.segments:
        if each.live_bytes != live.get(each.number, 0):
            wrong.append(
                f"segment {each.number}: {each.live_bytes} bytes counted, {live.get(each.number, 0)} live"
            )
    return wrong
