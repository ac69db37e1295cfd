"""The session behind one namespace's blocks: begun when it is needed, and again when it is lost.

Responsibility: connect, open the namespace, ask for batches of blocks, reserve and seal drafts. A call that loses its
session is tried once more in a new one.

Invariants: every wait ends with the call's deadline. A draft is used only in the session that granted it; the service
aborts the drafts of a lost session.

Concurrency: calls from any thread; one lock for beginning a session, the transport's for requests.
"""

from __future__ import annotations

import base64
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvfs import limits
from kvfs._native.blocks.writer import Draft
from kvfs.client.exchange import Exchange, check
from kvfs.client.grants import Grants
from kvfs.client.transport import Deadline, Transport
from kvfs.errors import AccessDenied, DeadlinePassed, InvalidRequest, SessionClosed, block_error, status_error
from kvfs.keys import key_at
from kvfs.protocol.messages import (
    DIGEST_BYTES,
    NO_PARENT,
    Abort,
    BlockSeal,
    DigestBatch,
    HelloAnswer,
    Op,
    Reserve,
    SealBlocks,
)

T = TypeVar("T")

AT_ONCE = limits.MAX_FDS_PER_MESSAGE
"""Blocks of one request that brings descriptors: well below the usual limit of 1,024 open files."""
_RETRY_PAUSE_S = 0.02
"""Between two attempts to reach a service that does not answer: it may be starting."""


@dataclass(slots=True)
class Live:
    """One session with the namespace open in it, for one call."""

    transport: Transport
    handle: int
    bucket: str
    digest: bytes
    durable: bool
    """Whether the bucket is."""
    grants: Grants
    deadline: Deadline

    def until(self, deadline: Deadline) -> Live:
        """Return the same session for another call."""
        return Live(
            self.transport, self.handle, self.bucket, self.digest, self.durable, self.grants, deadline
        )

    @property
    def exchange(self) -> Exchange:
        """Make an exchange that ends with the call's deadline."""
        return Exchange(self.transport, self.deadline.left_s)

    def count(self, op: Op, keys: bytes) -> int:
        """Return what the service counts of these blocks."""
        return self.exchange.count(DigestBatch(op, self.handle, keys))

    def find_durable(self, keys: bytes) -> bytes:
        """Return a byte for each block: 0 where this durable bucket does not have it durably, whatever others have."""
        try:
            asked = [
                DigestBatch(Op.LOOKUP_BLOCK, self.handle, some) for some in batches(keys, limits.MAX_BATCH)
            ]
            return bytes(entry.status == 0 for each in asked for entry in self.exchange.extents(each))
        except AccessDenied:  # who may only write here has the seals look
            return bytes(len(keys) // DIGEST_BYTES)

    def fetch(self, keys: bytes, hint: str | None, urgent: bool) -> int:
        """Have blocks fetched from peers; return how many are here then."""
        digests = digests_text(keys)
        found = self.exchange.control(
            Op.FETCH, namespace=self.handle, digests=digests, hint=hint, urgent=urgent
        )
        return int(found["count"])

    def match_cluster(self, keys: bytes) -> dict[str, int]:
        """Return how many blocks each peer has, from the first on."""
        digests = digests_text(keys)
        found = self.exchange.control(Op.MATCH_CLUSTER, namespace=self.handle, digests=digests)
        return dict(found["peers"])

    def remove(self, keys: bytes) -> int:
        """Remove blocks; return how many were there."""
        results = self.exchange.results(DigestBatch(Op.REMOVE_BLOCK, self.handle, keys))
        for result in results:
            if result.status != errno.ENOENT:
                check(result, "removing blocks")
        return sum(result.status == 0 for result in results)

    def pin(self, name: list[str], pinned: bool) -> None:
        """Pin or unpin a block by its name. Raises NotFound, NotPermitted."""
        self.exchange.control(Op.PIN, name=name, pinned=pinned)

    def open_sealer(self) -> int | None:
        """Ask for the seal channel; None where the service offers none."""
        [(_, descriptor)] = self.exchange.open(DigestBatch(Op.OPEN_SEALER, self.handle, self.digest))
        return descriptor

    def reserve(
        self, keys: Sequence[bytes], sizes: Sequence[int], parents: Sequence[bytes], layers: int = 0
    ) -> list[Draft]:
        """Reserve a draft for each key. Raises the first error (NoSpace, ...); then none is reserved."""
        opened = self.exchange.open(Reserve(tuple(sizes)))
        drafts = [
            Draft(key, parent, size, entry.slot, entry.generation, descriptor, self.transport, layers)
            for key, parent, size, (entry, descriptor) in zip(keys, parents, sizes, opened, strict=True)
            if descriptor is not None
        ]
        failed = next((entry.status for entry, _ in opened if entry.status), 0)
        if failed:
            self.abort(drafts)
            raise status_error(failed, f"reserving {sum(sizes)} bytes for {len(sizes)} blocks")
        return drafts

    def seal(self, drafts: Sequence[Draft]) -> list[bool]:
        """Seal closed drafts: True where the block is new, False where it was there.

        Raises SessionClosed for a draft of another session, else the first failure.
        """
        if any(draft.session is not self.transport for draft in drafts):
            raise SessionClosed("the session that granted these drafts is gone, and they with it")
        seals = [BlockSeal(draft.slot, draft.generation, draft.key, draft.parent) for draft in drafts]
        results = self.exchange.results(SealBlocks(self.handle, tuple(seals)))
        for draft, result in zip(drafts, results, strict=True):
            if result.status not in (0, errno.EEXIST):
                raise block_error(result.status, draft.key)
        return [result.status == 0 for result in results]

    def abort(self, drafts: Sequence[Draft]) -> None:
        """Abort drafts of this session, and close those of others. A sealed one is no error here."""
        for draft in drafts:
            draft.close()
        own = tuple((draft.slot, draft.generation) for draft in drafts if draft.session is self.transport)
        if own and self.transport.is_open:
            self.exchange.results(Abort(own))


class BlockSession:
    """A session with one namespace open. `begin` connects within the seconds given; `namespace` are the arguments of
    OPEN_NAMESPACE."""

    def __init__(self, begin: Callable[[float], Transport], namespace: dict[str, Any]) -> None:
        self._begin = begin
        self._namespace = namespace
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._closed = False

    def run(self, do: Callable[[Live], T], deadline: Deadline, *, again: bool = True) -> T:
        """Call `do` with a session; with `again`, call it once more in a new one where the session was lost.

        Raises SessionClosed when no service answers until the deadline, DeadlinePassed, and what `do` raises.
        """
        while True:
            live = self._with_session(deadline)
            try:
                return do(live.until(deadline))
            except (SessionClosed, OSError):
                if live.transport.is_open or not again or deadline.left_s <= 0:
                    raise

    def count(self, op: Op, keys: bytes, deadline: Deadline) -> int:
        """Return the sum of what the service counts of these blocks, batch by batch."""
        some = batches(keys, limits.MAX_BATCH)
        return sum(self.run(partial(Live.count, op=op, keys=each), deadline) for each in some)

    def _with_session(self, deadline: Deadline) -> Live:
        live = self._live
        if live is not None and live.transport.is_open:
            return live
        while True:
            try:
                if not self._lock.acquire(timeout=deadline.left_s):
                    raise DeadlinePassed(f"no session within {deadline.limit_s:g} s")
                try:
                    self._check_open()
                    if self._live is None or not self._live.transport.is_open:
                        if self._live is not None:
                            self._live.grants.close()
                        self._live = self._open(deadline)
                    live = self._live
                finally:
                    self._lock.release()
                if self._closed:  # meanwhile, by a close that did not wait for this thread
                    self.close()
                    self._check_open()
                return live
            except SessionClosed:
                if deadline.left_s <= _RETRY_PAUSE_S:
                    raise
                time.sleep(_RETRY_PAUSE_S)

    def _open(self, deadline: Deadline) -> Live:
        transport = self._begin(deadline.left_s)
        try:
            found = Exchange(transport, deadline.left_s).control(Op.OPEN_NAMESPACE, **self._namespace)
        except BaseException:
            transport.close()
            raise
        digest = bytes.fromhex(found["digest"])
        bucket, durable = found["bucket"]["name"], found["bucket"]["durable"]
        return Live(transport, found["handle"], bucket, digest, durable, Grants(transport), deadline)

    @property
    def hello(self) -> HelloAnswer:
        """Return the service's last greeting. REQUIRES that there was a session."""
        assert self._live is not None
        return self._live.transport.hello

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("these blocks are closed")

    def close(self) -> None:
        """End the session, which aborts its drafts. Closing twice is harmless.

        Calls under way raise SessionClosed. A thread that is still connecting after limits.CLIENT_CLOSE_WAIT_S ends
        its session itself.
        """
        self._closed = True
        if not self._lock.acquire(timeout=limits.CLIENT_CLOSE_WAIT_S):
            return
        try:
            if self._live is not None:
                self._live.transport.close()
                self._live.grants.close()
        finally:
            self._lock.release()

    def after_fork(self) -> None:
        """Close in a forked child what only the parent may use, without the locks that the parent's threads hold."""
        self._closed = True
        if self._live is not None:
            self._live.grants.after_fork()

    @property
    def grants(self) -> Grants | None:
        """Return the grants of the present session; None without one."""
        return self._live.grants if self._live is not None else None


def parents_of(parents: Sequence[bytes | None] | None, count: int) -> list[bytes]:
    """Return a parent for each of `count` blocks, zeros for none. Raises InvalidRequest."""
    if parents is None:
        return [NO_PARENT] * count
    if len(parents) != count:
        raise InvalidRequest(f"{count} keys and {len(parents)} parents")
    for parent in parents:
        if parent is not None and len(parent) != len(NO_PARENT):
            raise InvalidRequest(f"a parent is a prefix hash of 16 bytes, not {parent!r:.80}")
    return [parent or NO_PARENT for parent in parents]


def choose_keys(joined: bytes, which: Sequence[int]) -> bytes:
    """Return some of several prefix hashes in one bytes object, by their numbers."""
    return b"".join([key_at(joined, number) for number in which])


def digests_text(joined: bytes) -> str:
    """Return prefix hashes as control operations take them."""
    return base64.b64encode(joined).decode()


def batches(joined: bytes, count: int) -> Iterator[bytes]:
    """Yield prefix hashes, `count` at a time."""
    step = count * DIGEST_BYTES
    return (joined[at : at + step] for at in range(0, len(joined), step))
