"""A process that changes a store at random, says what it is about to do and what it has done, and is killed.

`python -m tests.support.store_writer DATA BACKING CAPACITY SLOTS SEED`. Each line on stdout is JSON: first what
would change (`begin`), then `done` or `failed`; `evicted` in between names what left by policy; `settled` says
that everything sealed so far has its checksum. Content follows from a version number: `posix.pattern`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvfs.errors import KvfsError
from tests.support.posix import pattern
from tests.support.stores import BOUND, BUCKET, NAMESPACE, draft_of
from tests.support.waits import WAIT_S
from tiers.model.objects import Attributes, Change, ChangeKind, Name
from tiers.model.tier import Kind
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

OTHER: Final = b"other"
UNIT: Final = "0123456789abcdef0123456789abcdef/"
KEYS: Final = [
    *(f"k{i}" for i in range(12)),
    *(f"d{i}/{j}" for i in range(3) for j in range(4)),
    *(f"d{i}/deep/{'x' * 200}/{'y' * 200}/{'z' * 200}" for i in range(2)),
    *(UNIT + str(i) for i in range(3)),
]
MARKERS: Final = [f"m{i}/" for i in range(4)]
DIGESTS: Final = [bytes([i + 1]) * 16 for i in range(16)]


class Writer:
    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.version = seed << 16
        self.open_drafts: list[int] = []
        store.listeners.append(self.note)

    def say(self, **values: Any) -> None:
        os.write(1, json.dumps(values).encode() + b"\n")

    def note(self, change: Change) -> None:
        if change.kind is ChangeKind.REMOVED and change.evicted and change.key is not None:
            block = change.key.kind is Kind.BLOCK
            self.say(evicted=change.key.digest.hex() if block else str(change.name))

    def run(self) -> None:
        actions: list[Callable[[], None]] = [
            *[self.put] * 8,
            *[self.put_block] * 4,
            *[self.rename] * 3,
            *[self.remove, self.remove_block, self.move_directory, self.set_attributes] * 2,
            *[self.mark, self.unmark, self.leave_draft, self.evict, self.settle],
        ]
        while True:
            self.random.choice(actions)()

    def try_(self, call: Callable[[], object], **change: Any) -> None:
        self.say(begin=change)
        try:
            found = call()
        except KvfsError:
            self.say(failed=True)
        else:
            self.say(done=getattr(found, "ino", 0))

    def name(self) -> Name:
        return Name(self.random.choice([BUCKET, OTHER]), self.random.choice(KEYS).encode())

    def data(self) -> tuple[int, bytes]:
        self.version += 1
        return self.version, pattern(
            self.version, self.random.choice([0, 1, 5000, self.random.randrange(300_000)])
        )

    def put(self) -> None:
        name, (version, data) = self.name(), self.data()
        mode, meta = self.random.choice([0o600, 0o644]), str(version)
        pinned = self.random.random() < 0.05
        self.try_(
            lambda: self.store.seal(
                draft_of(self.store, data),
                name,
                Attributes(mode=mode, pinned=pinned, user_metadata=meta.encode(), mtime_ns=version),
            ),
            set=[str(name), version, len(data), mode, meta, pinned],
        )

    def put_block(self) -> None:
        at = self.random.randrange(len(DIGESTS))
        version, data = self.data()
        parent = DIGESTS[at - 1] if at % 4 else None
        if self.store.block_bucket(DIGESTS[at]) is None:
            self.try_(
                lambda: self.store.seal_block(
                    draft_of(self.store, data), BOUND, DIGESTS[at], parent=parent, uid=at
                ),
                block=[DIGESTS[at].hex(), version, len(data), at],
            )

    def rename(self) -> None:
        source, target = self.name(), self.name()
        self.try_(lambda: self.store.rename(source, target), move=[[str(source), str(target)]])

    def move_directory(self) -> None:
        source, target = self.random.sample([b"d0/", b"d1/", b"d2/", b"d3/"], 2)
        keys = [key for key, _ in self.store.list(BUCKET, prefix=source).entries]
        pairs = [[str(Name(BUCKET, key)), str(Name(BUCKET, target + key[len(source) :]))] for key in keys]
        self.try_(lambda: self.store.rename(Name(BUCKET, source), Name(BUCKET, target)), move=pairs)

    def remove(self) -> None:
        name = self.name()
        self.try_(lambda: self.store.remove(name), remove=str(name))

    def remove_block(self) -> None:
        digest = self.random.choice(DIGESTS)
        self.try_(lambda: self.store.remove_block(digest), remove=digest.hex())

    def set_attributes(self) -> None:
        name, mode = self.name(), self.random.choice([0o640, 0o444])
        self.try_(lambda: self.store.set_attributes(name, mode=mode), mode=[str(name), mode])

    def mark(self) -> None:
        marker = self.random.choice(MARKERS)
        self.try_(
            lambda: self.store.make_directory(Name(OTHER, marker.encode()), Attributes(mode=0o755)),
            mark=marker,
        )

    def unmark(self) -> None:
        marker = self.random.choice(MARKERS)
        self.try_(lambda: self.store.remove_directory(Name(OTHER, marker.encode())), unmark=marker)

    def leave_draft(self) -> None:
        if len(self.open_drafts) < 4:
            draft = self.store.reserve(10_000, uid=3)
            self.open_drafts.append(self.store.open_draft(draft))
            os.write(self.open_drafts[-1], b"never sealed" * 100)

    def evict(self) -> None:
        self.try_(lambda: self.store.evict(200_000), evict=True)

    def settle(self) -> None:
        self.store.dram.checksums.wait(WAIT_S)
        self.say(settled=True)


def main() -> None:
    data, backing, capacity, slots, seed = sys.argv[1:]
    store = open_store(
        StoreOptions(
            Path(data), dram_bytes=int(capacity), max_slots=int(slots), backing=backing, quota_bytes=1 << 30
        )
    )
    if not store.buckets():
        store.create_bucket(BUCKET, uid=0, gid=0)
        store.create_bucket(OTHER, uid=0, gid=0)
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
    Writer(store, int(seed)).run()


if __name__ == "__main__":
    main()
