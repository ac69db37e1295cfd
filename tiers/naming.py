"""Buckets, directories, names and attributes: made, moved, changed and removed.

Responsibility: each change as one step of the index, the policy, the journal and the listeners, complete when it
returns. How an object gets its first name is `tiers.store`.

Invariants: a change is in the index before the journal hears of it.
Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvfs import crashpoints, limits
from kvfs.errors import (
    CrossDevice,
    Exists,
    InvalidRequest,
    IsDirectory,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
)
from kvfs.keys import Namespace, block_name
from kvfs.name_rows import RETIRED, BucketRow
from kvfs.names import NameRow
from tiers import buckets
from tiers.adoption import ENTRY_PINNED
from tiers.base import Kind, StoreKey, object_key
from tiers.catalog import DIRECTORY, PINNED, directory_of_row
from tiers.copies import Copies
from tiers.heritage import unit_of
from tiers.model import Attributes, Bucket, Change, ChangeKind, Directory, Name, ObjectInfo


class Naming(Copies):
    """Objects by name, and the changes of names."""

    # --- buckets ------------------------------------------------------------------------------------------

    def create_bucket(
        self,
        name: bytes,
        *,
        uid: int,
        gid: int,
        mode: int = 0o755,
        durable: bool = False,
        admits_all: bool = True,
        large: bool = False,
        namespace: Namespace | None = None,
    ) -> Bucket:
        """Raises Exists, InvalidRequest, LimitExceeded; DeviceMissing for a durable or large one without the NVMe
        tier."""
        self.journal.check_queue()
        if durable:
            self.journal.check_durable(0)
        if large:
            self._need_large()
        made = buckets.create(
            self.names,
            name,
            uid=uid,
            gid=gid,
            mode=mode,
            durable=durable,
            admits_all=admits_all,
            large=large,
            namespace=namespace,
        )
        self._log_bucket(name)
        self.directory_times.touch(Name(b"", b""))
        return made

    def adopt_bucket(self, row: BucketRow) -> None:
        """Make a bucket anew that a lower tier remembers, with an id of its own. Raises LimitExceeded, Exists."""
        buckets.adopt(self.names, row)
        self._log_bucket(row.name)

    def _need_large(self) -> None:
        """Raises DeviceMissing."""
        _ = self.journal.large

    def _log_bucket(self, name: bytes) -> None:
        row = self.names.get_bucket(name)
        assert row is not None
        self.journal.bucket(row)

    def set_bucket(
        self,
        name: bytes,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        namespace: Namespace | None = None,
        large: bool | None = None,
    ) -> Bucket:
        """Change what is given. Raises BucketNotFound; Exists, NotEmpty for a namespace that cannot be bound;
        DeviceMissing for `large` without the NVMe tier."""
        self.journal.check_queue()
        if large:
            self._need_large()
        changed = buckets.change(
            self.names,
            name,
            mode=mode,
            uid=uid,
            gid=gid,
            mtime_ns=mtime_ns,
            namespace=namespace,
            large=large,
        )
        self._log_bucket(name)
        self._set_times(Name(name, b""), mtime_ns)
        self._tell(Change(ChangeKind.ATTRIBUTES, Name(name, b""), None))
        return changed

    def remove_bucket(self, name: bytes) -> None:
        """Raises NotEmpty while any name or block is in it."""
        bucket = self.bucket(name)
        self.native_seals.end_channels(name)
        if self.names.has_prefix(name, b"") or self._blocks.count(name):
            raise NotEmpty(f"bucket {name.decode()} is not empty")
        self.names.remove_bucket(name)
        self.journal.bucket_removed(bucket.bucket_id)
        self._tell(Change(ChangeKind.REMOVED, Name(name, b""), None))

    # --- names --------------------------------------------------------------------------------------------

    def make_directory(self, name: Name, attributes: Attributes) -> Directory:
        """Raises Exists when any object or directory has the name, NotFound when its parent has not."""
        bucket = self._check_name(name)
        if not name.key.endswith(b"/"):
            raise InvalidRequest(f"{name}: a directory's key ends in '/'")
        if self._row(Name(name.bucket, name.key[:-1])) is not None or self.names.has_prefix(
            name.bucket, name.key
        ):
            raise Exists(f"{name} exists")
        if bucket.namespace is not None and (name.key + b"/").startswith(b"kv/"):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks")
        made = self.mark_directory(name, attributes)
        self._tell(Change(ChangeKind.SEALED, name, None))
        return made

    def put_marker(self, name: Name, attributes: Attributes) -> Directory:
        """Give a directory a marker, in the place of one that it has, whatever else has the name without its '/'."""
        bucket = self._check_name(name)
        if not name.key.endswith(b"/"):
            raise InvalidRequest(f"{name}: a directory's key ends in '/'")
        if bucket.namespace is not None and name.key.startswith(b"kv/"):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks")
        old = self.names.get(name.bucket, name.key)
        made = self.mark_directory(name, attributes)
        if old is not None:
            self.journal.removed(old.object_id)
        self._tell(Change(ChangeKind.SEALED, name, None))
        return made

    def mark_directory(self, name: Name, attributes: Attributes) -> Directory:
        """Give a directory that is only a common prefix a marker, which can hold attributes."""
        self.journal.check_queue()
        identity = self.names.next_ids(1)
        row = new_row(identity, attributes, DIRECTORY)
        self.names.put(name.bucket, name.key, row)
        self.journal.directory(self.bucket(name.bucket), name, row)
        return directory_of_row(name, row)

    def remove_directory(self, name: Name) -> None:
        """Raises NotFound, NotEmpty."""
        if not name.key.endswith(b"/"):
            raise InvalidRequest(f"{name}: a directory's key ends in '/'")
        self._directory(self.bucket(name.bucket), name)
        self._check_empty(name)
        row = self.names.remove(name.bucket, name.key)
        if row is not None:
            self.journal.removed(row.object_id)
        self._tell(Change(ChangeKind.REMOVED, name, None))

    def _check_empty(self, name: Name) -> None:
        page = self.names.list(name.bucket, prefix=name.key, after=name.key, limit=1)
        if page.entries or any(self._block_names(name.bucket, name.key, b"", b"/")):
            raise NotEmpty(f"{name} is not empty")

    def remove_marker(self, name: Name) -> None:
        """Remove a directory's marker, whatever else the directory holds. Raises NotFound."""
        if not name.key.endswith(b"/"):
            raise InvalidRequest(f"{name}: a directory's key ends in '/'")
        row = self.names.remove(name.bucket, name.key)
        if row is None:
            raise NotFound(f"no directory marker {name}")
        self.journal.removed(row.object_id)
        self._tell(Change(ChangeKind.REMOVED, name, None))

    def _check_expected(self, name: Name, expected_id: int) -> None:
        """Raises NotFound where nothing has the name, Exists where another object has it."""
        row = self.names.get(name.bucket, name.key)
        if row is None or (
            not row.flags & DIRECTORY and self.table.get(object_key(row.object_id).digest) is None
        ):
            raise NotFound(f"no object {name}")
        if row.object_id != expected_id:
            raise Exists(f"{name} is object {row.object_id}, not {expected_id}")

    def remove(self, name: Name, *, expected_id: int | None = None) -> None:
        """Raises NotFound, IsDirectory; Exists where another object than `expected_id` has the name."""
        if expected_id is not None:
            self._check_expected(name, expected_id)
        info = self.lookup(name)
        if isinstance(info, Directory):
            raise IsDirectory(f"{name} is a directory")
        if info.name is None:
            self.remove_block(info.key.digest)
            return
        self.names.remove(name.bucket, name.key)
        crashpoints.reach("store.after_remove")
        self.journal.removed(info.object_id)
        self._discard(info.key, info.uid)
        self._counts["removals"] += 1
        self._tell(Change(ChangeKind.REMOVED, name, info.key))

    def remove_block(self, digest: bytes) -> None:
        self.native_seals.catch_up()
        block = self._blocks.get(digest)
        if block is None:
            raise NotFound(f"no block {digest.hex()}")
        key = StoreKey(Kind.BLOCK, digest)
        self.cold.block_removed(digest)
        self.journal.removed(block.sequence)
        self._discard(key, block.uid)
        self._counts["removals"] += 1
        self._tell(Change(ChangeKind.REMOVED, Name(block.bucket, block_name(digest)), key))

    def rename(self, src: Name, dst: Name, *, replace: bool = True) -> None:
        """Move a name, or every name of a directory (both keys then end in `/`), in one transaction.

        Raises NotFound, Exists, NotEmpty, IsDirectory, NotDirectory, CrossDevice (too many keys), NotPermitted.
        """
        for name in (src, dst):
            if self._check_name(name).namespace is not None and name.key.startswith(b"kv/"):
                raise NotPermitted(f"{src} -> {dst}: blocks have the names that their prefix hashes give")
        if src.key.endswith(b"/") != dst.key.endswith(b"/"):
            raise InvalidRequest(f"{src} -> {dst}: both keys end in '/' or none does")
        self.journal.check_queue()
        if src.key.endswith(b"/"):
            self._rename_directory(src, dst, replace)
        else:
            self._rename_object(src, dst, replace)
        self._tell(Change(ChangeKind.RENAMED, src, None, new_name=dst))

    def _rename_object(self, src: Name, dst: Name, replace: bool) -> None:
        row = self._row(src)
        if row is None:
            raise NotFound(f"no object {src}")
        if self._has_directory(dst.bucket, dst.key + b"/"):
            raise IsDirectory(f"{dst} is a directory")
        if not replace and self._row(dst) is not None:
            raise Exists(f"{dst} exists")
        if src == dst:
            return
        if self.bucket(dst.bucket).durable:
            self._check_movable([(src, row)])
        old = self.names.rename(src.bucket, src.key, dst.bucket, dst.key, without=RETIRED)
        crashpoints.reach("store.after_rename")
        self._renamed(_unretired(row), src, dst, replaced=None if old is None else old.object_id)
        if old is not None:
            self._discard(object_key(old.object_id), old.uid)

    def _check_movable(self, named: Sequence[tuple[Name, NameRow]]) -> None:
        """Into a durable bucket. Raises NoSpace; CrossDevice for an object that only the cold tier has: nothing there
        is durable, so it is copied."""
        for name, row in named:
            if self._is_far(object_key(row.object_id).digest):
                raise CrossDevice(
                    f"{name} is only in the cold tier, and cannot be moved into a durable bucket"
                )
        self.journal.check_keepable(row for _, row in named if not row.flags & DIRECTORY)

    def _rename_directory(self, src: Name, dst: Name, replace: bool) -> None:
        if not self.names.has_prefix(src.bucket, src.key):
            raise NotFound(f"no directory {src}")
        if dst.bucket == src.bucket and dst.key.startswith(src.key) and dst != src:
            raise InvalidRequest(f"{src} -> {dst}: a directory cannot move into itself")
        if self._row(Name(dst.bucket, dst.key[:-1])) is not None:
            raise NotDirectory(f"{dst} is a file")
        if self.names.has_prefix(dst.bucket, dst.key) and src != dst:
            if not replace:
                raise Exists(f"{dst} exists")
            self._check_empty(dst)
        if self.bucket(dst.bucket).durable:
            self._check_movable(list(self._named_below(src)))
        marker = self.names.get(dst.bucket, dst.key) if src != dst else None
        moved = self.names.rename_prefix(
            src.bucket, src.key, dst.bucket, dst.key, limit=limits.MAX_RENAME_KEYS
        )
        for old_key, key in moved:
            row = self.names.get(dst.bucket, key)
            if row is not None:
                replaced = marker.object_id if marker is not None and key == dst.key else None
                self._renamed(row, Name(src.bucket, old_key), Name(dst.bucket, key), replaced=replaced)

    def _named_below(self, directory: Name) -> Iterator[tuple[Name, NameRow]]:
        """What is in a directory, as much of it as can be renamed at once."""
        after, left = b"", limits.MAX_RENAME_KEYS
        while left > 0:
            page = self.names.list(directory.bucket, prefix=directory.key, after=after)
            for entry in page.entries:
                if entry.row is not None:
                    yield Name(directory.bucket, entry.name), entry.row
            if not page.truncated:
                return
            after = page.entries[-1].name
            left -= len(page.entries)

    def retire(self, name: Name) -> bool:
        """What has this name, if anything, does not come back after a kill, as soon as the journal is settled: a file
        was answered that takes the name in a moment. Until then the doors show what they did, or wait for it. False
        where nothing has it, or in a durable bucket: that file is on the device already, and counts before this."""
        row = self._row(name)
        if row is None:
            return False
        is_durable = self.bucket(name.bucket).durable
        if not row.flags & RETIRED:
            retired = replace(row, flags=row.flags | RETIRED)
            self.names.put(name.bucket, name.key, retired)
            if not is_durable:
                self.journal.retired(row.object_id, name, retired)
        return not is_durable

    def reinstate(self, name: Name) -> None:
        """What has this name counts again: the file that was to take it has given way."""
        row = self._row(name)
        if row is not None and row.flags & RETIRED:
            row = _unretired(row)
            self.names.put(name.bucket, name.key, row)
            if not self.bucket(name.bucket).durable:
                self.journal.renamed(row.object_id, name, row)

    def _renamed(self, row: NameRow, src: Name, dst: Name, *, replaced: int | None = None) -> None:
        if not row.flags & DIRECTORY:
            digest = object_key(row.object_id).digest
            self._name_of[digest] = dst
            if unit_of(src) != unit_of(dst) and digest in self._policy:
                self.enter(digest, dst, row)
        self.journal.renamed(row.object_id, dst, row, replaced)

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
            self._check_expected(name, expected_id)
        self.journal.check_queue()
        info = self.lookup(name)
        if isinstance(info, ObjectInfo) and info.name is None:
            return self._set_block(info, name, pinned, (mode, uid, gid, mtime_ns, user_metadata))
        if isinstance(info, Directory) and not info.name.key:
            self.set_bucket(name.bucket, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
            return self.lookup(name)
        where = info.name
        assert where is not None
        row = self.names.get(where.bucket, where.key)
        if row is None:
            raise NotFound(f"{name} is a directory without a marker: it has no attributes of its own")
        flags = row.flags if pinned is None else (row.flags | PINNED if pinned else row.flags & ~PINNED)
        changed = replace(
            row,
            mode=row.mode if mode is None else mode & 0o7777,
            uid=row.uid if uid is None else uid,
            gid=row.gid if gid is None else gid,
            mtime_ns=row.mtime_ns if mtime_ns is None else mtime_ns,
            ctime_ns=time.time_ns(),
            flags=flags,
            user_metadata=row.user_metadata if user_metadata is None else user_metadata,
        )
        self.names.put(where.bucket, where.key, changed)
        self.journal.named(row.object_id, where, changed)
        if isinstance(info, Directory):
            self._set_times(where, mtime_ns)
        if pinned is not None and isinstance(info, ObjectInfo):
            self._pin(info.key.digest, pinned)
            self.journal.pinned(row.object_id, pinned)
        self._tell(Change(ChangeKind.ATTRIBUTES, where, None))
        return self.lookup(where)

    def _set_times(self, name: Name, mtime_ns: int | None) -> None:
        """A directory's attributes changed, and its mtime if that is given."""
        found = self.lookup(name)
        assert isinstance(found, Directory)
        self.directory_times.set(name, found.mtime_ns if mtime_ns is None else mtime_ns, time.time_ns())

    def _set_block(
        self, info: ObjectInfo, name: Name, pinned: bool | None, others: tuple[object, ...]
    ) -> ObjectInfo | Directory:
        if any(value is not None for value in others):
            raise NotPermitted(f"{name}: a block has its bucket's attributes")
        block = self._blocks.get(info.key.digest)
        if pinned is not None and block is not None:
            block.pinned = pinned
            self._mark_pinned(info.key, pinned)
            self._pin(info.key.digest, pinned)
            self.journal.pinned(block.sequence, pinned)
        return self.lookup(name)

    def _mark_pinned(self, key: StoreKey, pinned: bool) -> None:
        """A block has no row that could say it, so its table entry does."""
        entry = self.table.get(key.digest)
        if entry is not None:
            flags = entry.flags | ENTRY_PINNED if pinned else entry.flags & ~ENTRY_PINNED
            self._amend(key.digest, entry, flags=flags)

    def _pin(self, digest: bytes, pinned: bool) -> None:
        if digest not in self._policy:
            return
        if pinned:
            self._policy.pin(digest)
        else:
            self._policy.unpin(digest)


def _unretired(row: NameRow) -> NameRow:
    """The row of an object that has a new name: what takes its old one does not take this."""
    return replace(row, flags=row.flags & ~RETIRED)


def new_row(identity: int, attributes: Attributes, flags: int) -> NameRow:
    """The row of a new name, still without a size. Raises what its encoding would, before anything is done."""
    now = time.time_ns()
    row = NameRow(
        object_id=identity,
        ino=attributes.ino or identity,
        size_bytes=0,
        mode=attributes.mode & 0o7777,
        uid=attributes.uid,
        gid=attributes.gid,
        mtime_ns=now if attributes.mtime_ns is None else attributes.mtime_ns,
        ctime_ns=now,
        sequence=identity,
        flags=flags | (PINNED if attributes.pinned else 0),
        user_metadata=attributes.user_metadata,
    )
    row.encode()
    return row
