"""What the service keeps for one session, and the bounds on it.

Responsibility: the caller as the kernel vouches for it, the drafts granted and the namespaces opened.
Invariant: a draft of the store that is open and was granted here stands in `drafts` until it is sealed or
aborted, so that `release` leaves nothing behind. Concurrency: the service's trio thread.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfs import limits
from kvfs.errors import InvalidRequest, KvfsError, LimitExceeded, QuotaExceeded, Superseded
from kvfs.rights import Caller
from tiers.access import Access
from tiers.large import LargeDraft, LargeReader
from tiers.model import Draft
from tiers.native_seals import NativeSeals

if TYPE_CHECKING:
    from tiers.store import TieredStore

log = logging.getLogger("kvfs.sessions")

SO_PEERGROUPS = 59
"""asm-generic/socket.h; Python has no name for it."""
_CREDENTIALS = struct.Struct("iII")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class SessionQuota:
    """Bounds on one session and one uid. Bytes per uid, held and reserved, are the store's quota."""

    drafts: int = limits.MAX_DRAFTS_PER_SESSION
    sessions_per_uid: int = limits.MAX_SESSIONS_PER_UID
    sessions: int = limits.MAX_SESSIONS


@dataclass(slots=True)
class Session:
    """One connection."""

    number: int
    caller: Caller
    access: Access
    store: TieredStore
    quota: SessionQuota
    seals: NativeSeals
    drafts: dict[tuple[int, int], Draft] = field(default_factory=dict)
    large: LargeDraft | LargeReader | None = None
    """The object larger than DRAM takes that it writes or reads (`tiers.session_large`)."""
    channel: int | None = None
    """Its seal channel, if it has one."""
    client: str = ""
    _namespaces: list[bytes] = field(default_factory=list)

    def __str__(self) -> str:
        return f"session {self.number} (uid {self.caller.uid}, pid {self.caller.pid}, {self.client!r})"

    def reserve(self, size_hint_bytes: int) -> tuple[Draft, int]:
        """A new draft and its writable descriptor. Raises QuotaExceeded and what the store raises."""
        if len(self.drafts) >= self.quota.drafts:
            raise QuotaExceeded(f"{self} has {len(self.drafts)} drafts open, which is the limit")
        draft = self.store.reserve(size_hint_bytes, uid=self.caller.uid)
        try:
            descriptor = self.store.open_draft(draft)
        except BaseException:
            self.store.abort(draft)
            raise
        self.drafts[draft.extent.slot, draft.extent.generation] = draft
        self.seals.grant(self, draft)
        return draft, descriptor

    def draft(self, slot: int, generation: int) -> Draft:
        """A draft that is from here on the caller's. Raises Superseded for one that is not, or no longer, granted."""
        self.seals.reclaim(slot)
        try:
            return self.drafts[slot, generation]
        except KeyError:
            raise Superseded(f"slot {slot} generation {generation} is no draft of this session") from None

    def settle(self, draft: Draft) -> None:
        """Forget a draft that was sealed or aborted."""
        if not draft.open:
            self.drafts.pop((draft.extent.slot, draft.extent.generation), None)

    def add_namespace(self, bucket: bytes) -> int:
        """The handle of a bucket that is bound to a namespace; the same one when it is open already."""
        if bucket not in self._namespaces:
            if len(self._namespaces) >= limits.MAX_NAMESPACE_HANDLES:
                raise LimitExceeded(
                    f"{self}: {limits.MAX_NAMESPACE_HANDLES} namespaces open, which is the limit"
                )
            self._namespaces.append(bucket)
        return self._namespaces.index(bucket) + 1

    def namespace_bucket(self, handle: int) -> bytes:
        if not 1 <= handle <= len(self._namespaces):
            raise InvalidRequest(f"namespace handle {handle} was not opened in this session")
        return self._namespaces[handle - 1]

    def release_large(self) -> None:
        """End the lease or draft of a large object, if there is one."""
        large, self.large = self.large, None
        if isinstance(large, LargeDraft):
            self.store.abort_large(large)
        elif large is not None:
            large.close()

    def release(self) -> int:
        """Abort every draft; how many there were."""
        self.seals.end(self)
        self.release_large()
        drafts = list(self.drafts.values())
        self.drafts.clear()
        for draft in drafts:
            try:
                self.store.abort(draft)
            except (KvfsError, OSError):
                log.exception("%s: slot %d was not given back", self, draft.extent.slot)
        return len(drafts)


def peer(connection: socket.socket) -> Caller:
    """Who connected, as the kernel recorded it then."""
    pid, uid, gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return Caller(uid=uid, gid=gid, groups=_peer_groups(connection), pid=pid)


def _peer_groups(connection: socket.socket) -> frozenset[int]:
    """Every supplementary group. Python's own getsockopt takes 1,024 bytes at most, which are 256 groups."""
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
