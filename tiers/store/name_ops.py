"""Directories, names and attributes: made, renamed, changed and removed.

Responsibility: each change as one step of the index, the policy, the journal and the listeners, complete when it
returns. How an object gets its first name is `tiers.store.sealing`.

Invariants: a change is in the index before the journal has it. `committed` is called once: in between where nobody
waits for a device, since no other door looks before the step ends, and at its end else.
Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as with_fields
from functools import partial

from kvfs import limits
from kvfs._native.shared.table import TIER_COLD
from kvfs.errors import (
    CrossDevice,
    Exists,
    InvalidRequest,
    IsDirectory,
    NameTooLong,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    Unsupported,
)
from kvfs.index.names import NameRow
from kvfs.index.rows import DIRECTORY, LINK, PINNED, RETIRED, ROW_ONLY, is_link_target
from kvfs.keys import block_name
from kvfs.system import crashpoints
from tiers.dram.survivors import ENTRY_PINNED
from tiers.model.objects import Attributes, Change, ChangeKind, Directory, Name, ObjectInfo, unit_of
from tiers.model.tier import Kind, StoreKey, object_key
from tiers.store.bucket_ops import BucketOps
from tiers.store.catalog import block_digest, directory_of_row
from tiers.store.context import Context
from tiers.store.residency import Residency

LINK_MODE = 0o777
"""Of every symbolic link: what it leads to has rights of its own."""


def _go_on() -> None:
    """Do nothing when a change is in the index."""


def _check_target(name: Name, target: bytes) -> None:
    if len(target) > limits.MAX_LINK_TARGET_BYTES:
        raise NameTooLong(
            f"{name}: a symbolic link to {len(target)} bytes, the limit is {limits.MAX_LINK_TARGET_BYTES}"
        )
    if not is_link_target(target):
        raise InvalidRequest(f"{name}: the target of a symbolic link is empty, or has a NUL")


def _need_directory_key(name: Name) -> None:
    if not name.key.endswith(b"/"):
        raise InvalidRequest(f"{name}: a directory's key ends in '/'")


class NameOps:
    """See the module's header."""

    def __init__(self, context: Context, buckets: BucketOps, residency: Residency) -> None:
        self._catalog, self._listeners = context.catalog, context.listeners
        self._journal, self._cold = context.journal, context.cold
        self._buckets, self._residency = buckets, residency

    def make_directory(self, name: Name, attributes: Attributes) -> Directory:
        """Make a directory. Raises InvalidRequest, NotPermitted; Exists when any object or directory has the name."""
        bucket = self._catalog.check_name(name)
        _need_directory_key(name)
        if self._catalog.row(Name(name.bucket, name.key[:-1])) is not None or self._catalog.names.has_prefix(
            name.bucket, name.key
        ):
            raise Exists(f"{name} exists")
        if bucket.namespace is not None and (name.key + b"/").startswith(b"kv/"):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks")
        made = self.mark_directory(name, attributes)
        self._listeners.notify(Change(ChangeKind.SEALED, name, None))
        return made

    def put_marker(self, name: Name, attributes: Attributes) -> Directory:
        """Give a directory a marker, in the place of one that it has, whatever else has the name without its '/'."""
        bucket = self._catalog.check_name(name)
        _need_directory_key(name)
        if bucket.namespace is not None and name.key.startswith(b"kv/"):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks")
        old = self._catalog.names.get(name.bucket, name.key)
        made = self.mark_directory(name, attributes)
        if old is not None:
            self._journal.removed(old.object_id)
        self._listeners.notify(Change(ChangeKind.SEALED, name, None))
        return made

    def mark_directory(self, name: Name, attributes: Attributes) -> Directory:
        """Give a directory that is only a common prefix a marker, which can hold attributes."""
        self._journal.check_queue()
        identity = self._catalog.names.next_ids(1)
        row = new_row(identity, attributes, DIRECTORY)
        self._catalog.names.put(name.bucket, name.key, row)
        self._journal.directory(self._catalog.bucket(name.bucket), name, row)
        return directory_of_row(name, row)

    def make_link(
        self,
        name: Name,
        target: bytes,
        attributes: Attributes,
        *,
        replace: bool = False,
        expected_id: int | None = None,
    ) -> ObjectInfo:
        """Make a symbolic link, in the place of an object or link where it may `replace` that. The target is kept as it
        is, whether it leads anywhere or not.

        Raises InvalidRequest, NameTooLong of a target; Exists, NotFound as `Sealing.seal` does; NoSpace.
        """
        bucket, old = self._catalog.check_sealable(name, replace=replace, expected_id=expected_id)
        _check_target(name, target)
        self._journal.check_link()
        identity = self._catalog.names.next_ids(1)
        row = with_fields(new_row(identity, attributes, 0), size_bytes=len(target), target=target)
        row = with_fields(row, flags=LINK, mode=LINK_MODE)
        self._catalog.names.put(name.bucket, name.key, row)
        crashpoints.reach("store.after_index_put")
        self._journal.linked(bucket, name, row, replaced=None if old is None else old.object_id)
        self._residency.detach_replaced(old)
        self._listeners.notify(Change(ChangeKind.SEALED, name, object_key(identity)))
        return self._catalog.info_of_row(name, row)

    def remove_directory(self, name: Name) -> None:
        """Remove an empty directory. Raises NotFound, NotEmpty."""
        _need_directory_key(name)
        self._catalog.directory(self._catalog.bucket(name.bucket), name)
        self._check_empty(name)
        row = self._catalog.names.remove(name.bucket, name.key)
        if row is not None:
            self._journal.removed(row.object_id)
        self._listeners.notify(Change(ChangeKind.REMOVED, name, None))

    def _check_empty(self, name: Name) -> None:
        page = self._catalog.names.list(name.bucket, prefix=name.key, after=name.key, limit=1)
        if page.entries or any(self._catalog.block_names(name.bucket, name.key, b"", b"/")):
            raise NotEmpty(f"{name} is not empty")

    def check_marker(self, name: Name) -> None:
        """Check that a directory has a marker. Raises NotFound."""
        _need_directory_key(name)
        if self._catalog.names.get(name.bucket, name.key) is None:
            raise NotFound(f"no directory marker {name}")

    def remove_marker(self, name: Name) -> None:
        """Remove a directory's marker, whatever else the directory holds. Raises NotFound."""
        _need_directory_key(name)
        row = self._catalog.names.remove(name.bucket, name.key)
        if row is None:
            raise NotFound(f"no directory marker {name}")
        self._journal.removed(row.object_id)
        self._listeners.notify(Change(ChangeKind.REMOVED, name, None))

    def remove(
        self, name: Name, *, expected_id: int | None = None, committed: Callable[[], None] = _go_on
    ) -> None:
        """Remove an object or symbolic link. Raises NotFound, IsDirectory; Exists where another object than
        `expected_id` has the name."""
        if expected_id is not None:
            self._catalog.check_expected(name, expected_id)
        row = self._take_row(name)
        if row is None:
            self._remove_other(name)
            committed()
            return
        crashpoints.reach("store.after_remove")
        is_awaited = self._is_awaited(row, name)
        if not is_awaited:
            committed()
        self._journal.removed(row.object_id)
        key = object_key(row.object_id)
        self._residency.detach(key, row.uid)
        self._catalog.counts["removals"] += 1
        self._listeners.notify(Change(ChangeKind.REMOVED, name, key))
        if is_awaited:
            committed()

    def _take_row(self, name: Name) -> NameRow | None:
        """Remove and return the row of an object or symbolic link; None where no row can have the name, or none has it.
        Raises NotFound where no tier has the object."""
        if block_digest(self._catalog.bucket(name.bucket), name.key) or name.key.endswith(b"/"):
            return None
        return self._catalog.names.take(name.bucket, name.key, partial(self._catalog.check_bytes, name))

    def _remove_other(self, name: Name) -> None:
        """Remove a block by its name. Raises NotFound, IsDirectory."""
        info = self._catalog.lookup(name)
        if isinstance(info, Directory):
            raise IsDirectory(f"{name} is a directory")
        self.remove_block(info.key.digest)

    def remove_block(self, digest: bytes) -> None:
        """Remove a block by its prefix hash. Raises NotFound."""
        self._catalog.native_seals.catch_up()
        block = self._catalog.blocks.get(digest)
        if block is None:
            raise NotFound(f"no block {digest.hex()}")
        key = StoreKey(Kind.BLOCK, digest)
        self._cold.block_removed(digest)
        self._journal.block_removed(block.sequence)
        self._residency.detach(key, block.uid)
        self._catalog.counts["removals"] += 1
        self._listeners.notify(Change(ChangeKind.REMOVED, Name(block.bucket, block_name(digest)), key))

    def rename(
        self, src: Name, dst: Name, *, replace: bool = True, committed: Callable[[], None] = _go_on
    ) -> None:
        """Move a name, or every name of a directory (both keys then end in `/`), in one transaction.

        Raises NotFound, Exists, NotEmpty, IsDirectory, NotDirectory, CrossDevice (too many keys), NotPermitted.
        """
        for name in (src, dst):
            if self._catalog.check_name(name).namespace is not None and name.key.startswith(b"kv/"):
                raise NotPermitted(f"{src} -> {dst}: blocks have the names that their prefix hashes give")
        if src.key.endswith(b"/") != dst.key.endswith(b"/"):
            raise InvalidRequest(f"{src} -> {dst}: both keys end in '/' or none does")
        self._journal.check_queue()
        if src.key.endswith(b"/"):
            self._rename_directory(src, dst, replace)
            is_committed = False
        else:
            is_committed = self._rename_object(src, dst, replace, committed)
        self._listeners.notify(Change(ChangeKind.RENAMED, src, None, new_name=dst))
        if not is_committed:
            committed()

    def _rename_object(self, src: Name, dst: Name, replace: bool, committed: Callable[[], None]) -> bool:
        """Move a name; return whether `committed` was called."""
        bucket, below = self._catalog.bucket(dst.bucket), dst.key + b"/"
        if src == dst or bucket.durable or any(self._catalog.block_names(dst.bucket, below, b"", b"/")):
            self._check_renamable(src, dst, replace)
        if src == dst:
            return False
        row, old = self._catalog.names.rename(
            src.bucket, src.key, dst.bucket, dst.key, without=RETIRED, replace=replace
        )
        crashpoints.reach("store.after_rename")
        is_final = old is None and not self._is_awaited(row, src, dst)
        if is_final:
            committed()
        self._renamed(row, src, dst, replaced=None if old is None else old.object_id)
        self._residency.detach_replaced(old)
        return is_final

    def _check_renamable(self, src: Name, dst: Name, replace: bool) -> None:
        """Check what the transaction of a rename does not: blocks below the new name, and room in a durable bucket."""
        row = self._catalog.row(src)
        if row is None:
            raise NotFound(f"no object {src}")
        if self._catalog.has_directory(dst.bucket, dst.key + b"/"):
            raise IsDirectory(f"{dst} is a directory")
        if not replace and self._catalog.row(dst) is not None:
            raise Exists(f"{dst} exists")
        if src != dst and self._catalog.bucket(dst.bucket).durable:
            self._check_movable([(src, row)])

    def _is_awaited(self, row: NameRow, *names: Name) -> bool:
        """Return whether a change of this object's name waits for a device before it is answered."""
        return (
            bool(row.flags & PINNED)
            or self._journal.is_kept(row.object_id)
            or any(self._catalog.bucket(name.bucket).durable for name in names)
        )

    def _check_movable(self, named: Sequence[tuple[Name, NameRow]]) -> None:
        """Check that objects can be moved into a durable bucket. Raises NoSpace; CrossDevice for an object that only
        the cold tier has: nothing there is durable, so it is copied."""
        for name, row in named:
            if self._catalog.tiers_of(object_key(row.object_id).digest) == TIER_COLD:
                raise CrossDevice(
                    f"{name} is only in the cold tier, and cannot be moved into a durable bucket"
                )
        self._journal.check_keepable(row for _, row in named if not row.flags & DIRECTORY)

    def _rename_directory(self, src: Name, dst: Name, replace: bool) -> None:
        if not self._catalog.names.has_prefix(src.bucket, src.key):
            raise NotFound(f"no directory {src}")
        if dst.bucket == src.bucket and dst.key.startswith(src.key) and dst != src:
            raise InvalidRequest(f"{src} -> {dst}: a directory cannot move into itself")
        if self._catalog.row(Name(dst.bucket, dst.key[:-1])) is not None:
            raise NotDirectory(f"{dst} is a file")
        if self._catalog.names.has_prefix(dst.bucket, dst.key) and src != dst:
            if not replace:
                raise Exists(f"{dst} exists")
            self._check_empty(dst)
        if self._catalog.bucket(dst.bucket).durable:
            self._check_movable(list(self._named_below(src)))
        marker = self._catalog.names.get(dst.bucket, dst.key) if src != dst else None
        moved = self._catalog.names.rename_prefix(
            src.bucket, src.key, dst.bucket, dst.key, limit=limits.MAX_RENAME_KEYS
        )
        rows = [(self._catalog.names.get(dst.bucket, key), old_key, key) for old_key, key in moved]
        self._journal.directory_renamed(src, dst, [row.object_id for row, _, _ in rows if row is not None])
        for row, old_key, key in rows:
            if row is not None:
                replaced = marker.object_id if marker is not None and key == dst.key else None
                self._renamed(row, Name(src.bucket, old_key), Name(dst.bucket, key), replaced=replaced)

    def _named_below(self, directory: Name) -> Iterator[tuple[Name, NameRow]]:
        """Yield what is in a directory, as much of it as can be renamed at once."""
        after, left = b"", limits.MAX_RENAME_KEYS
        while left > 0:
            page = self._catalog.names.list(directory.bucket, prefix=directory.key, after=after)
            for entry in page.entries:
                if entry.row is not None:
                    yield Name(directory.bucket, entry.name), entry.row
            if not page.truncated:
                return
            after = page.entries[-1].name
            left -= len(page.entries)

    def retire(self, name: Name) -> None:
        """Keep the object of a name, if it has one, from coming back after a kill: a file that will take the name was
        closed and answered. Doors show the object until then, or wait for the file."""
        row = self._catalog.row(name)
        if row is None or row.flags & RETIRED:
            return
        retired = with_fields(row, flags=row.flags | RETIRED)
        self._catalog.names.put(name.bucket, name.key, retired)
        if not self._catalog.bucket(name.bucket).durable:  # there the file is on the device and counts first
            self._journal.retired(row.object_id, name, retired)

    def reinstate(self, name: Name) -> None:
        """Undo `retire`: the file that was to take the name is gone."""
        row = self._catalog.row(name)
        if row is not None and row.flags & RETIRED:
            row = with_fields(row, flags=row.flags & ~RETIRED)
            self._catalog.names.put(name.bucket, name.key, row)
            if not self._catalog.bucket(name.bucket).durable:
                self._journal.renamed(row.object_id, name, row)

    def _renamed(self, row: NameRow, src: Name, dst: Name, *, replaced: int | None = None) -> None:
        if not row.flags & ROW_ONLY:
            digest = object_key(row.object_id).digest
            self._catalog.name_of[digest] = dst
            if unit_of(src) != unit_of(dst) and self._residency.is_counted(digest):
                self._residency.enter(digest, dst, row)
        self._journal.renamed(row.object_id, dst, row, source=src, replaced=replaced)

    def set_attributes(
        self,
        name: Name,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        pinned: bool | None = None,
        user_metadata: bytes | None = None,
        expected_id: int | None = None,
    ) -> ObjectInfo | Directory:
        """Change what is given. Raises NotFound; NotPermitted for all but `pinned` on a block; Exists where another
        object than `expected_id` has the name."""
        if expected_id is not None:
            self._catalog.check_expected(name, expected_id)
        self._journal.check_queue()
        info = self._catalog.lookup(name)
        if isinstance(info, ObjectInfo) and info.name is None:
            return self._set_block(info, name, pinned, (mode, uid, gid, mtime_ns, user_metadata))
        if isinstance(info, Directory) and not info.name.key:
            self._buckets.set_bucket(name.bucket, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
            return self._catalog.lookup(name)
        where = info.name
        assert where is not None
        row = self._catalog.names.get(where.bucket, where.key)
        if row is None:
            raise NotFound(f"{name} is a directory without a marker: it has no attributes of its own")
        flags = _changed_flags(name, row, mode, pinned)
        changed = with_fields(
            row,
            mode=row.mode if mode is None else mode & 0o7777,
            uid=row.uid if uid is None else uid,
            gid=row.gid if gid is None else gid,
            mtime_ns=row.mtime_ns if mtime_ns is None else mtime_ns,
            ctime_ns=time.time_ns(),
            flags=flags,
            user_metadata=row.user_metadata if user_metadata is None else user_metadata,
        )
        self._catalog.names.put(where.bucket, where.key, changed)
        self._journal.named(row.object_id, where, changed)
        if isinstance(info, Directory):
            self._buckets.set_times(where, mtime_ns)
        if pinned is not None and isinstance(info, ObjectInfo):
            self._residency.pin(info.key.digest, pinned)
            self._journal.pinned(row.object_id, pinned)
        self._listeners.notify(Change(ChangeKind.ATTRIBUTES, where, None))
        return self._catalog.lookup(where)

    def _set_block(
        self, info: ObjectInfo, name: Name, pinned: bool | None, others: tuple[object, ...]
    ) -> ObjectInfo | Directory:
        if any(value is not None for value in others):
            raise NotPermitted(f"{name}: a block has its bucket's attributes")
        block = self._catalog.blocks.get(info.key.digest)
        if pinned is not None and block is not None:
            self._catalog.blocks.pin(info.key.digest, pinned)
            entry = self._catalog.table.get(info.key.digest)
            if entry is not None:  # a block has no row to say it
                flags = entry.flags | ENTRY_PINNED if pinned else entry.flags & ~ENTRY_PINNED
                self._residency.amend(info.key.digest, entry, flags=flags)
            self._residency.pin(info.key.digest, pinned)
            self._journal.pinned(block.sequence, pinned)
        return self._catalog.lookup(name)


def _changed_flags(name: Name, row: NameRow, mode: int | None, pinned: bool | None) -> int:
    """Return a row's flags as it is to be pinned or not. Raises Unsupported for a mode or pin of a symbolic link."""
    if row.flags & LINK and (mode is not None or pinned):
        raise Unsupported(f"{name} is a symbolic link: it has no mode of its own, and no bytes to be pinned")
    if pinned is None:
        return row.flags
    return row.flags | PINNED if pinned else row.flags & ~PINNED


def new_row(identity: int, attributes: Attributes, flags: int) -> NameRow:
    """Make the row of a new name, still without a size. Raises what encoding it raises, before anything is done."""
    now = time.time_ns()
    row = NameRow(
        object_id=identity,
        ino=attributes.ino or identity,
        size_bytes=0,
        mode=attributes.mode & 0o7777,
        uid=attributes.uid,
        gid=attributes.gid,
        mtime_ns=now if attributes.mtime_ns is None else attributes.mtime_ns,
        ctime_ns=now if attributes.ctime_ns is None else attributes.ctime_ns,
        sequence=identity,
        flags=flags | (PINNED if attributes.pinned else 0),
        user_metadata=attributes.user_metadata,
    )
    row.encode()
    return row
