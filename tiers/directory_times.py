"""When names last came to a directory or left it: its mtime and ctime as the path view shows them.

Responsibility: remember that for the directories of late, in memory, so that a change of names costs no write; a clean
stop writes it to the rows of those that have one (markers and buckets). What is not here has its row's times.

Invariants: at most limits.MAX_DIRECTORY_TIMES; the longest unchanged goes first, to its row.
Concurrency: the service's trio thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvfs import limits, paths
from kvfs.name_rows import DIRECTORY
from kvfs.names import NameIndex
from tiers.base import Kind
from tiers.model import Change, ChangeKind, Directory, Name


class DirectoryTimes:
    """See the module's header."""

    def __init__(self, names: NameIndex) -> None:
        self._names = names
        self._times: dict[Name, tuple[int, int]] = {}
        self._still = 0

    def of(self, directory: Directory) -> Directory:
        """The directory with the times that it has now."""
        found = self._times.get(directory.name)
        if found is None:
            return directory
        return replace(directory, mtime_ns=found[0], ctime_ns=found[1])

    def set(self, name: Name, mtime_ns: int, ctime_ns: int) -> None:
        self._times.pop(name, None)
        self._times[name] = (mtime_ns, ctime_ns)
        if len(self._times) > limits.MAX_DIRECTORY_TIMES:
            self._write(next(iter(self._times)))

    def touch(self, name: Name, now_ns: int | None = None) -> int:
        """A name came to this directory or left it; when. Its ctime does not go back."""
        now_ns = time.time_ns() if now_ns is None else now_ns
        if not self._still and now_ns > self._times.get(name, (0, 0))[1]:
            self.set(name, now_ns, now_ns)
        return now_ns

    @contextmanager
    def still(self) -> Iterator[None]:
        """What happens meanwhile was seen before: a file that is published had its name already."""
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1

    def note(self, change: Change) -> None:
        """What a change of names means for the directories that hold them."""
        if change.kind in (ChangeKind.MOVED, ChangeKind.ATTRIBUTES) or change.name is None:
            return
        if change.key is not None and change.key.kind is Kind.BLOCK:
            return  # too many, and nobody works with their directories
        if change.kind is ChangeKind.RENAMED and change.new_name is not None:
            if change.name.key.endswith(b"/"):
                self._move(change.name, change.new_name)
            self.touch(directory_of(change.new_name))
        elif change.kind is ChangeKind.REMOVED:
            self._times.pop(change.name, None)
        self.touch(directory_of(change.name))

    def _move(self, source: Name, target: Name) -> None:
        for name in [name for name in self._times if name.bucket == source.bucket]:
            if name.key.startswith(source.key):
                key = target.key + name.key[len(source.key) :]
                self._times[Name(target.bucket, key)] = self._times.pop(name)

    def write(self) -> None:
        """Write all of them to their rows."""
        while self._times:
            self._write(next(iter(self._times)))

    def _write(self, name: Name) -> None:
        mtime_ns, ctime_ns = self._times.pop(name)
        if name.key:
            row = self._names.get(name.bucket, name.key)
            if row is not None and row.flags & DIRECTORY:
                self._names.put(name.bucket, name.key, replace(row, mtime_ns=mtime_ns, ctime_ns=ctime_ns))
            return
        bucket = self._names.get_bucket(name.bucket)
        if bucket is not None:
            self._names.put_bucket(replace(bucket, mtime_ns=mtime_ns))


def directory_of(name: Name) -> Name:
    """The directory that holds a name; a bucket's is the root, without a name."""
    return Name(name.bucket, paths.parent_prefix(name.key)) if name.key else Name(b"", b"")
