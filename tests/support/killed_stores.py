"""A store with the DRAM tier alone, left as a killed process leaves it, and opened again.

Responsibility: let go of a store without a word, start it again on what is there, and say what it has; the file of an
object's slot, and when an object was used last.

Concurrency: one test's thread; a store that was let go of is used no more.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from kvfs._native.shared import slots as native
from kvfs.errors import NotFound
from kvfs.limits import MIB
from tests.support.posix import pattern
from tests.support.stores import BOUND, BUCKET, NAMESPACE, abandon_home, put, read
from tests.support.waits import WAIT_S
from tiers.dram.tier import DramTier
from tiers.model.objects import Name, ObjectInfo
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

CAPACITY_BYTES: Final = 32 * MIB


def open_again(
    data: Path, *, backing: str = "directory", capacity_bytes: int = CAPACITY_BYTES, max_slots: int = 1024
) -> Store:
    store = open_store(StoreOptions(data, dram_bytes=capacity_bytes, max_slots=max_slots, backing=backing))
    for bucket in (BUCKET, BOUND):
        if bucket not in {found.name for found in store.buckets()}:
            store.create_bucket(bucket, uid=0, gid=0, namespace=NAMESPACE if bucket == BOUND else None)
    return store


def crash(store: Store, *, wait: bool = True) -> None:
    """Let go of everything as a killed process does: nothing is flushed, removed or recorded."""
    if wait:
        store.dram.checksums.wait(WAIT_S)
    abandon(store.dram)
    store.names.environment._env.close()
    abandon_home(store.home)
    store.close = lambda **_: None  # type: ignore[method-assign]


def abandon(tier: DramTier) -> None:
    tier._prepare_keep = lambda: None  # type: ignore[method-assign]
    tier.close(keep=True)


def names_of(store: Store) -> dict[bytes, bytes]:
    """Every object's key and bytes, of those that can be read; whatever cannot is not listed from then on."""
    found = {}
    for bucket in store.buckets():
        for key, info in store.list(bucket.name).entries:
            if isinstance(info, ObjectInfo):
                with suppress(NotFound):
                    found[key] = read(store, info)
    for bucket in store.buckets():
        listed = store.list(bucket.name).entries
        assert {key for key, info in listed if isinstance(info, ObjectInfo)} <= found.keys()
    return found


def filled(data: Path) -> dict[bytes, bytes]:
    """A crashed store with some objects; what was in it."""
    store = open_again(data)
    contents = {b"%03d" % i: pattern(i, 1000 + i) for i in range(60)}
    for key, payload in contents.items():
        put(store, key, payload)
    crash(store)
    return contents


def slot_file(store: Store, key: bytes) -> Path:
    info = store.lookup(Name(BUCKET, key))
    assert isinstance(info, ObjectInfo)
    assert info.extent is not None
    return store.dram.directory / native.slot_name(info.extent.slot)


def use(store: Store, key: bytes, last_access_s: int) -> None:
    info = store.lookup(Name(BUCKET, key))
    assert isinstance(info, ObjectInfo)
    store.table.set_access(info.key.digest, 1, last_access_s)
