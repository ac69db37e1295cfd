"""A store in a temporary directory without any door, and the calls that tests of it make most."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvfs import Namespace
from kvfs.errors import NotFound
from tiers.data_dir import Home
from tiers.model.objects import Attributes, Draft, Name, ObjectInfo
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

CAPACITY_BYTES: Final = 16 << 20
SLOTS: Final = 256
BUCKET: Final = b"b"
BOUND: Final = b"bound"
"""A bucket that is bound to NAMESPACE."""
NAMESPACE: Final = Namespace.of_one_device(
    model="test",
    revision="1",
    dtype="bfloat16",
    layout="LKTHD",
    block_tokens=16,
)


def small_store(
    path: Path, *, max_slots: int = SLOTS, backing: str = "directory", quota_bytes: int | None = None
) -> Store:
    """A small store with two buckets, anew or as it was left."""
    store = open_store(
        StoreOptions(
            path, dram_bytes=CAPACITY_BYTES, max_slots=max_slots, backing=backing, quota_bytes=quota_bytes
        )
    )
    if not store.catalog.buckets():
        store.create_bucket(BUCKET, uid=0, gid=0)
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
    return store


def draft_of(store: Store, data: bytes, *, uid: int = 0) -> Draft:
    """A draft that holds `data` and has no writer left."""
    draft = store.reserve(len(data), uid=uid)
    descriptor = store.open_draft(draft)
    try:
        assert os.write(descriptor, data) == len(data)
    finally:
        os.close(descriptor)
    return draft


def put(store: Store, key: bytes, data: bytes, *, bucket: bytes = BUCKET, uid: int = 0) -> ObjectInfo:
    return store.seal(draft_of(store, data, uid=uid), Name(bucket, key), Attributes(uid=uid))


def put_block(store: Store, digest: bytes, data: bytes, *, parent: bytes | None = None) -> ObjectInfo:
    return store.seal_block(draft_of(store, data), BOUND, digest, parent=parent, uid=0)


def verified(store: Store, info: ObjectInfo) -> ObjectInfo:
    """Have what a start took over verified now. Raises NotFound where it is damaged."""
    if store.verifier.checked(info.key.digest) is None:
        raise NotFound(f"object {info.object_id} was damaged")
    return store.lookup_object(info.key) or info


def read(store: Store, info: ObjectInfo) -> bytes:
    if info.extent is None:
        info = verified(store, info)
    descriptor = store.open_read(info, uid=0)
    try:
        return os.pread(descriptor, info.size_bytes + 1, 0)
    finally:
        os.close(descriptor)


def keys(store: Store, bucket: bytes = BUCKET) -> list[bytes]:
    return [key for key, _ in store.list(bucket).entries]


def abandon_home(home: Home) -> None:
    """Let go of a data directory as a killed process does: nothing is recorded."""
    home._close_spare()
    os.close(home._lock_fd)
