"""The state of one session, and its bounds.

Responsibility: the caller as the kernel vouches for it, the drafts granted and the namespaces opened.
Invariant: a draft of the store that is open and was granted here stands in `drafts` until it is sealed or
aborted, so that nothing stays after `release`. Concurrency: the service's trio thread.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvfs import limits
from kvfs.errors import InvalidRequest, KvfsError, LimitExceeded, QuotaExceeded, Superseded, Unsupported
from kvfs.rights import Caller
from tiers.hbm.device_pools import DevicePools, Seat
from tiers.model.objects import Bucket, Draft, Name
from tiers.nvme.large_draft import LargeDraft
from tiers.nvme.large_objects import LargeReader
from tiers.sessions.native_seals import NativeSeals
from tiers.sessions.permissions import Access
from tiers.store.store import Store

log = logging.getLogger("kvfs.sessions")

SO_PEERGROUPS = 59
SO_PEERPIDFD = 77
"""asm-generic/socket.h; Python has no names for them."""
_CREDENTIALS = struct.Struct("iII")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class SessionQuota:
    """Bounds one session and one uid. Bytes per uid, held and reserved, are the store's quota."""

    drafts: int = limits.MAX_DRAFTS_PER_SESSION
    sessions_per_uid: int = limits.MAX_SESSIONS_PER_UID
    sessions: int = limits.MAX_SESSIONS


class RemoteBlocks(Protocol):
    """Finds blocks on other machines and brings them here; see `tiers.remote.cluster`."""

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int:
        """Fetch blocks that are not here; return how many are here then. Raises InvalidRequest of an unknown hint."""

    async def match(self, bucket: Bucket, digests: Sequence[bytes]) -> dict[str, int]:
        """Return by machine how many blocks it has, from the first on; those that have none are left out."""

    async def copy(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin to copy the blocks of buckets to another machine; describe the task. Raises InvalidRequest, Busy,
        Unsupported."""

    async def move(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin to move the blocks of caches among buckets to another machine; describe the task. Raises as `copy`."""

    async def drain(self) -> dict[str, Any]:
        """Begin to bring what this machine alone has to others; describe the task. Raises Busy, Unsupported."""

    async def cancel(self, kind: str) -> dict[str, Any]:
        """Cancel the task of a kind; describe it. Raises NotFound where none is under way."""


class NoCluster:
    """Implements `RemoteBlocks` on a machine that has no cluster configured."""

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int:
        raise Unsupported("this service has no [cluster]")

    async def match(self, bucket: Bucket, digests: Sequence[bytes]) -> dict[str, int]:
        raise Unsupported("this service has no [cluster]")

    async def copy(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        raise Unsupported("this service has no [cluster]")

    async def move(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        raise Unsupported("this service has no [cluster]")

    async def drain(self) -> dict[str, Any]:
        raise Unsupported("this service has no [cluster]")

    async def cancel(self, kind: str) -> dict[str, Any]:
        raise Unsupported("this service has no [cluster]")


@dataclass(frozen=True, slots=True)
class Service:
    """Holds what control operations need of the service besides the store."""

    service_uid: int
    group_gid: int | None
    status: Callable[[], dict[str, Any]]
    stop: Callable[[], None]
    cluster: RemoteBlocks
    pools: DevicePools | None

    @property
    def devices(self) -> list[str]:
        """Return the UUIDs of the devices that have pools."""
        return [] if self.pools is None else self.pools.devices

    def is_member(self, caller: Caller) -> bool:
        """Return whether the caller is in the service's group."""
        return self.group_gid is not None and (
            caller.gid == self.group_gid or self.group_gid in caller.groups
        )


@dataclass(slots=True)
class Session:
    """Keeps the caller, the drafts and the namespaces of one connection."""

    number: int
    caller: Caller
    access: Access
    store: Store
    quota: SessionQuota
    seals: NativeSeals
    open_pidfd: Callable[[], int]
    """Opens a descriptor of the process that connected."""
    drafts: dict[tuple[int, int], Draft] = field(default_factory=dict)
    large: LargeDraft | LargeReader | None = None
    """The object larger than DRAM takes that it writes or reads (`tiers.sessions.large`)."""
    seat: Seat | None = None
    """Its place in a pool of GPU memory, if it is attached to one."""
    channel: int | None = None
    """Its seal channel, if it has one."""
    may_open: bool = False
    """Whether the caller may open slots itself, and so read all of the tier."""
    client: str = ""
    _namespaces: list[bytes] = field(default_factory=list)

    def __str__(self) -> str:
        return f"session {self.number} (uid {self.caller.uid}, pid {self.caller.pid}, {self.client!r})"

    def reserve(self, size_hint_bytes: int, *, kept_bytes: int = 0) -> tuple[Draft, int]:
        """Reserve a draft and open it for writing; with `kept_bytes` as `DramTier.reserve` does. Raises QuotaExceeded
        and what the store raises."""
        if len(self.drafts) >= self.quota.drafts:
            raise QuotaExceeded(f"{self} has {len(self.drafts)} drafts open, which is the limit")
        draft = self.store.reserve(size_hint_bytes, uid=self.caller.uid, kept_bytes=kept_bytes)
        try:
            descriptor = self.store.open_draft(draft)
        except BaseException:
            self.store.abort(draft)
            raise
        self.drafts[draft.extent.slot, draft.extent.generation] = draft
        self.seals.grant(self, draft)
        return draft, descriptor

    def draft(self, slot: int, generation: int) -> Draft:
        """Take a draft back from its sealing thread. Raises Superseded for one that is not, or no longer, granted."""
        self.seals.reclaim(slot)
        try:
            return self.drafts[slot, generation]
        except KeyError:
            raise Superseded(f"slot {slot} generation {generation} is no draft of this session") from None

    def drop_ended(self, draft: Draft) -> None:
        """Drop a draft that was sealed or aborted."""
        if not draft.open:
            self.drafts.pop((draft.extent.slot, draft.extent.generation), None)

    def add_namespace(self, bucket: bytes) -> int:
        """Open a bucket that is bound to a namespace; return its handle, the same one each time."""
        if bucket not in self._namespaces:
            if len(self._namespaces) >= limits.MAX_NAMESPACE_HANDLES:
                raise LimitExceeded(
                    f"{self}: {limits.MAX_NAMESPACE_HANDLES} namespaces open, which is the limit"
                )
            self._namespaces.append(bucket)
        return self._namespaces.index(bucket) + 1

    def namespace_bucket(self, handle: int) -> bytes:
        """Return the bucket of a handle. Raises InvalidRequest."""
        if not 1 <= handle <= len(self._namespaces):
            raise InvalidRequest(f"namespace handle {handle} was not opened in this session")
        return self._namespaces[handle - 1]

    def need_marker(self, marker: Name) -> None:
        """Check that a directory has a marker, in the step that depends on it. Raises NotFound."""
        self.access.need_path(marker)
        self.store.check_marker(marker)

    def release_large(self) -> None:
        """End the lease or draft of a large object, if there is one."""
        large, self.large = self.large, None
        if isinstance(large, LargeDraft):
            self.store.abort_large(large)
        elif large is not None:
            large.close()

    def release(self) -> int:
        """Abort every draft; return how many there were."""
        self.seals.end(self)
        self.release_large()
        if self.seat is not None:
            self.seat.pool.tier.end(self.seat.client)
        drafts = list(self.drafts.values())
        self.drafts.clear()
        for draft in drafts:
            try:
                self.store.abort(draft)
            except (KvfsError, OSError):
                log.exception("%s: slot %d was not aborted", self, draft.extent.slot)
        return len(drafts)


def peer(connection: socket.socket) -> Caller:
    """Return who connected, as the kernel recorded it then."""
    pid, uid, gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return Caller(uid=uid, gid=gid, groups=_peer_groups(connection), pid=pid)


def peer_pidfd(connection: socket.socket, pid: int) -> int:
    """Open a descriptor of the process that connected. Raises OSError where that is gone.

    Before Linux 6.5 the pid alone names it, which may be another process's by now if a child goes on with the session:
    what the child has leased is then guarded for as long as that one runs.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(pid)


def _peer_groups(connection: socket.socket) -> frozenset[int]:
    """Return every supplementary group. Python's own getsockopt takes at most 1,024 bytes, or 256 groups."""
    size_bytes = ctypes.c_uint32(0)
    groups: ctypes.Array[ctypes.c_uint32] = (ctypes.c_uint32 * 0)()
    while _libc.getsockopt(
        connection.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, groups, ctypes.byref(size_bytes)
    ):
        number = ctypes.get_errno()
        if number != errno.ERANGE:
            raise OSError(number, os.strerror(number), "SO_PEERGROUPS")
        groups = (ctypes.c_uint32 * (size_bytes.value // 4))()
    return frozenset(groups)
