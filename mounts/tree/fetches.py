"""Blocks of other machines, asked for where a path on the mount names one that is not here.

Responsibility: which missed names are asked for, for whom, and how many at once; and the directories that lead to
blocks, which are shown whether any block is in them here or not: else no path would reach its last name.

Invariants:
- Others are asked for blocks of caches alone, as at the S3 door, and for nobody who may not read the bucket.
- While look-ups wait in a directory, which the kernel locks for them, its names are invalidated afterwards: the thread
  that does that would wait for the directory, and what it is to say of all others with it.
- Who waits for a batch is woken when it ends, however it does: also with the mount.
- Each look-up asks anew. A miss that was remembered would hide what another machine has a moment later.

Concurrency: the service's trio thread. `ask` is one step; a batch is a task of the mount's nursery.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvfs import limits
from kvfs.errors import KvfsError
from kvfs.keys import parse_block_name
from kvfs.rights import READ, SEARCH, Caller, allows
from mounts.kernel.backing import Backings
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.privileges import groups_of
from tiers.model.objects import Bucket, Directory, Name
from tiers.store.catalog import directory_of_bucket
from tiers.store.store import Store

log = logging.getLogger("kvfs.mount")

_BLOCK_COMPONENT_BYTES = 32
_ABOVE_BLOCKS = re.compile(rb"kv/([0-9a-f]{2}/)?")


class BlockSource(Protocol):
    """Brings blocks of other machines here; see `tiers.remote.cluster`."""

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int:
        """Fetch blocks that are not here; return how many are here then."""


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of one bucket that are asked for together, for one user."""

    bucket: Bucket
    uid: int
    digests: list[bytes] = field(default_factory=list)
    directories: list[int] = field(default_factory=list)
    """Where each was looked up."""
    ended: trio.Event = field(default_factory=trio.Event)

    async def wait(self) -> None:
        """Wait until the others were asked, also where the caller is cancelled: the batch ends with the mount then, and
        whoever looked the name up is still to be answered."""
        with trio.CancelScope(shield=True):
            await self.ended.wait()


@dataclass(slots=True, eq=False)
class Locked:
    """A directory that the kernel has locked for look-ups that wait."""

    look_ups: int = 0
    invalid: list[bytes] = field(default_factory=list)
    """Names to be invalidated when none waits any more."""


class Fetches:
    """The look-ups of one mount that other machines are asked about."""

    def __init__(
        self, store: Store, nodes: NodeTable, backings: Backings, source: BlockSource | None
    ) -> None:
        """Ask `source`; None: nobody, and no directory is shown that is not there."""
        self._store, self._nodes, self._backings, self._source = store, nodes, backings, source
        self._nursery: trio.Nursery | None = None
        self._gathering: dict[tuple[bytes, int], Batch] = {}
        """Batches that have not begun, by bucket and user."""
        self._waiting = 0
        self._locked: dict[int, Locked] = {}
        """Directories in which look-ups wait."""

    @contextmanager
    def running_in(self, nursery: trio.Nursery) -> Iterator[None]:
        """Fetch in tasks of `nursery` within the block; outside of it nothing is asked for."""
        self._nursery = None if self._source is None else nursery
        try:
            yield
        finally:
            self._nursery = None

    def covers(self, bucket: Bucket) -> bool:
        """Return whether others are asked for blocks of a bucket: what is fetched into a durable one stays there."""
        return self._source is not None and bucket.namespace is not None and not bucket.durable

    def directory(self, name: Name) -> Directory | None:
        """Describe a directory that leads to blocks which others may have; None for any other name. Raises
        BucketNotFound."""
        if self._source is None:
            return None
        key = name.key.removesuffix(b"/") + b"/"
        if _ABOVE_BLOCKS.fullmatch(key) is None or not self.covers(bucket := self._store.bucket(name.bucket)):
            return None
        return self._store.directory_times.of(directory_of_bucket(bucket, Name(name.bucket, key)))

    def ask(self, parent: Node, component: bytes, *, uid: int, gid: int, pid: int) -> Batch | None:
        """Have others asked for a name that is not here, as this caller; return the batch to wait for before the name
        is looked up again, None where nobody is asked. Raises BucketNotFound.

        Names that are missed in the same turn are asked for together.
        """
        if self._nursery is None or len(component) != _BLOCK_COMPONENT_BYTES:
            return None
        name = self._nodes.child_name(parent, component)
        digest = parse_block_name(name.key)
        if digest is None or self._waiting >= limits.MAX_MOUNT_FETCHES:
            return None
        bucket = self._store.bucket(name.bucket)
        if not self.covers(bucket) or not _may_read(bucket, uid, gid, pid):
            return None
        batch = self._gathering.get((bucket.name, uid))
        if batch is None:
            batch = self._gathering[bucket.name, uid] = Batch(bucket, uid)
            self._nursery.start_soon(self._fetch, batch)
        batch.digests.append(digest)
        batch.directories.append(parent.nodeid)
        self._waiting += 1
        self._locked.setdefault(parent.nodeid, Locked()).look_ups += 1
        return batch

    def invalidate_entry(self, parent: int, component: bytes) -> None:
        """Make the kernel look a name up again: once nobody waits in its directory, limits.MAX_LATE_INVALIDATIONS of
        each directory."""
        locked = self._locked.get(parent)
        if locked is None or len(locked.invalid) >= limits.MAX_LATE_INVALIDATIONS:
            self._backings.invalidate_entry(parent, component)
        else:
            locked.invalid.append(component)

    async def _fetch(self, batch: Batch) -> None:
        assert self._source is not None
        del self._gathering[batch.bucket.name, batch.uid]
        try:
            await self._source.fetch(batch.bucket, batch.digests, uid=batch.uid, hint=None, urgent=True)
        except KvfsError as error:
            log.debug("blocks of %s were not fetched: %s", batch.bucket.name.decode(), error)
        finally:
            batch.ended.set()
            self._waiting -= len(batch.digests)
            for nodeid in batch.directories:
                self._unlock(nodeid)

    def _unlock(self, nodeid: int) -> None:
        """Count off a look-up that waits no more; behind the last one of a directory invalidate what had to wait."""
        locked = self._locked[nodeid]
        locked.look_ups -= 1
        if not locked.look_ups:
            del self._locked[nodeid]
            for component in locked.invalid:
                self._backings.invalidate_entry(nodeid, component)


def _may_read(bucket: Bucket, uid: int, gid: int, pid: int) -> bool:
    """Return whether the caller may read the blocks of a bucket, as a session that fetches has to."""
    known = uid in (0, bucket.uid) or gid == bucket.gid
    groups = frozenset[int]() if known else frozenset(groups_of(pid))
    caller = Caller(uid, gid, groups, pid)
    return allows(caller, mode=bucket.mode, uid=bucket.uid, gid=bucket.gid, want=READ | SEARCH)
