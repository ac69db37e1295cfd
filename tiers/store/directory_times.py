"""Times of directories as the path view shows them: when names last came to one or went from it.

Responsibility: keep the times of directories changed of late in memory, so that a change of names costs no write; a
clean stop writes them to the rows of markers and buckets. Other directories have their rows' times.

Invariants: at most limits.MAX_DIRECTORY_TIMES are kept; the longest unchanged are written to their rows first.
Concurrency: the service's trio thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from kvfs import limits, paths
from kvfs.index.names import NameIndex
from kvfs.index.rows import DIRECTORY
from tiers.model.objects import Change, ChangeKind, Directory, Name
from tiers.model.tier import Kind


class DirectoryTimes:
    """See the module's header."""

    def __init__(self, names: NameIndex) -> None:
        self._names = names
        self._times: dict[Name, tuple[int, int]] = {}
        self._still = 0

    def of(self, directory: Directory) -> Directory:
        """Return the directory with the times that it has now."""
        found = self._times.get(directory.name)
        if found is None:
            return directory
        return replace(directory, mtime_ns=found[0], ctime_ns=found[1])

    def set(self, name: Name, mtime_ns: int, ctime_ns: int) -> None:
        """Keep the times of a directory; over limits.MAX_DIRECTORY_TIMES the oldest ones are written."""
        self._times.pop(name, None)
        self._times[name] = (mtime_ns, ctime_ns)
        if len(self._times) > limits.MAX_DIRECTORY_TIMES:
            self._write_oldest(limits.DIRECTORY_TIMES_AT_ONCE)

    def touch(self, name: Name, now_ns: int | None = None) -> int:
        """Record that a name came to this directory or went from it; return when. Its ctime does not go back."""
        now_ns = time.time_ns() if now_ns is None else now_ns
        if now_ns > self._times.get(name, (0, 0))[1]:
            self.set(name, now_ns, now_ns)
        return now_ns

    @contextmanager
    def still(self) -> Iterator[None]:
        """Take no times from changes within the block: a file that is published had its name already, and others set
        the times themselves."""
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1

    def note(self, change: Change) -> None:
        """Record what a change of names means for the directories that hold them."""
        if change.kind in (ChangeKind.MOVED, ChangeKind.ATTRIBUTES) or change.name is None:
            return
        if change.key is not None and change.key.kind is Kind.BLOCK:
            return  # too many, and nobody works with their directories
        if change.kind is ChangeKind.RENAMED and change.new_name is not None:
            if change.name.key.endswith(b"/"):
                self._move(change.name, change.new_name)
            self._touch_above(change.new_name)
        elif change.kind is ChangeKind.REMOVED:
            self._times.pop(change.name, None)
        self._touch_above(change.name)

    def _touch_above(self, name: Name) -> None:
        if not self._still:
            self.touch(directory_of(name))

    def _move(self, source: Name, target: Name) -> None:
        for name in [name for name in self._times if name.bucket == source.bucket]:
            if name.key.startswith(source.key):
                key = target.key + name.key[len(source.key) :]
                self._times[Name(target.bucket, key)] = self._times.pop(name)

    def write(self) -> None:
        """Write all times to their rows."""
        while self._times:
            self._write_oldest(limits.MAX_LIST_ENTRIES)

    def _write_oldest(self, count: int) -> None:
        """Write the times of the longest unchanged directories to their rows, in one transaction."""
        rows = list[tuple[bytes, bytes]]()
        for name in list(
            islice(self._times, count)
        ):  # one by one, each look would pass over all that went before it
            mtime_ns, ctime_ns = self._times.pop(name)
            if not name.key:
                self._write_bucket(name.bucket, mtime_ns)
                continue
            row = self._names.get(name.bucket, name.key)
            if row is not None and row.flags & DIRECTORY:
                row = replace(row, mtime_ns=mtime_ns, ctime_ns=ctime_ns)
                rows.append((name.bucket + b"\0" + name.key, row.encode()))
        self._names.put_many(rows)

    def _write_bucket(self, name: bytes, mtime_ns: int) -> None:
        bucket = self._names.get_bucket(name)
        if bucket is not None:
            self._names.put_bucket(replace(bucket, mtime_ns=mtime_ns))


def directory_of(name: Name) -> Name:
    """Return the directory that holds a name; a bucket's is the root, without a name."""
    return Name(name.bucket, paths.parent_prefix(name.key)) if name.key else Name(b"", b"")
