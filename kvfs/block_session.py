"""The session behind one namespace's blocks: begun when it is needed, and again when it is lost.

Responsibility: connect, open the namespace, grant and seal drafts, and say what a lost session means for the
call that met it. `Blocks` (kvfs.blocks) is what callers see.

Invariants: every wait ends with the call's deadline. What was granted in a session is never used in another:
a draft knows its session, and the service takes back what a lost one had.

Concurrency: calls from any thread; a lock keeps beginning apart, the transport's keeps requests apart.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvfs import limits
from kvfs._native.writer import Draft
from kvfs.errors import DeadlinePassed, InvalidRequest, SessionClosed
from kvfs.exchange import Exchange, check, status_error
from kvfs.messages import NO_PARENT, Abort, BlockSeal, HelloAnswer, Op, Reserve, SealBlocks
from kvfs.puts import Grants
from kvfs.transport import Deadline, Transport

T = TypeVar("T")

_RETRY_PAUSE_S = 0.02
"""Between two attempts to reach a service that does not answer: it may be starting."""


class Live:
    """One session with the namespace open in it, for one call."""

    __slots__ = ("bucket", "deadline", "digest", "grants", "handle", "transport")

    def __init__(
        self,
        transport: Transport,
        handle: int,
        bucket: str,
        digest: bytes,
        grants: Grants,
        deadline: Deadline,
    ) -> None:
        self.transport = transport
        self.handle = handle
        self.bucket = bucket
        self.digest = digest
        self.grants = grants
        self.deadline = deadline

    def until(self, deadline: Deadline) -> Live:
        return Live(self.transport, self.handle, self.bucket, self.digest, self.grants, deadline)

    @property
    def exchange(self) -> Exchange:
        """Requests that are answered by the call's deadline."""
        return Exchange(self.transport, max(self.deadline.left_s, 0.0))

    def reserve(
        self, keys: Sequence[bytes], sizes: Sequence[int], parents: Sequence[bytes], layers: int = 0
    ) -> list[Draft]:
        """A draft for each key. Raises the first one's error (NoSpace, ...), and then has none."""
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
        """Seal closed drafts: True where the block is new, False where it was there. Raises the first failure."""
        seals = [BlockSeal(draft.slot, draft.generation, draft.key, draft.parent) for draft in drafts]
        results = self.exchange.results(SealBlocks(self.handle, tuple(seals)))
        for draft, result in zip(drafts, results, strict=True):
            if result.status != errno.EEXIST:
                check(result, draft.key.hex())
        return [result.status == 0 for result in results]

    def abort(self, drafts: Sequence[Draft]) -> None:
        """Give drafts back. Those that were sealed are not this session's any more, which is no error here."""
        for draft in drafts:
            draft.close()
        if drafts and self.transport.is_open:
            self.exchange.results(Abort(tuple((draft.slot, draft.generation) for draft in drafts)))


class BlockSession:
    """A session with one namespace open. `begin` connects: it is given the seconds it may take."""

    def __init__(self, begin: Callable[[float], Transport], namespace: dict[str, Any]) -> None:
        self._begin = begin
        self._namespace = namespace
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._closed = False

    def run(self, do: Callable[[Live], T], deadline: Deadline, *, again: bool = True) -> T:
        """What `do` returns with a session. Where that is lost meanwhile, once more with another, if `again`.

        Raises SessionClosed when no service answers until the deadline, DeadlinePassed, and what `do` raises.
        """
        while True:
            live = self._with_session(deadline)
            try:
                return do(live.until(deadline))
            except (SessionClosed, OSError):
                if live.transport.is_open or not again or deadline.left_s <= 0:
                    raise

    def _with_session(self, deadline: Deadline) -> Live:
        live = self._live
        if live is not None and live.transport.is_open:
            return live
        while True:
            try:
                if not self._lock.acquire(timeout=max(deadline.left_s, 0.0)):
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
                if self._closed:  # meanwhile, by who could not wait for this
                    self.close()
                    self._check_open()
                return live
            except SessionClosed:
                if deadline.left_s <= _RETRY_PAUSE_S:
                    raise
                time.sleep(_RETRY_PAUSE_S)

    def _open(self, deadline: Deadline) -> Live:
        transport = self._begin(max(deadline.left_s, 0.0))
        try:
            found = Exchange(transport, max(deadline.left_s, 0.0)).control(
                Op.OPEN_NAMESPACE, **self._namespace
            )
        except BaseException:
            transport.close()
            raise
        digest = bytes.fromhex(found["digest"])
        bucket = found["bucket"]["name"]
        return Live(transport, found["handle"], bucket, digest, Grants(transport), deadline)

    @property
    def hello(self) -> HelloAnswer:
        """What the service said last. REQUIRES that there was a session."""
        assert self._live is not None
        return self._live.transport.hello

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("these blocks are closed")

    def close(self) -> None:
        """End the session; drafts that were not sealed go with it. Closing twice is harmless.

        What is under way ends with SessionClosed. A thread that is connecting ends its session itself, where that takes
        longer than limits.CLIENT_CLOSE_WAIT_S.
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
        """In a child: let go of what only the parent may use, whose threads' locks are nobody's here."""
        self._closed = True
        if self._live is not None:
            self._live.grants.after_fork()

    @property
    def grants(self) -> Grants | None:
        """Of the session that there is."""
        return self._live.grants if self._live is not None else None


def parents_of(parents: Sequence[bytes | None] | None, count: int) -> list[bytes]:
    """A parent for each of `count` blocks, zeros for none. Raises InvalidRequest."""
    if parents is None:
        return [NO_PARENT] * count
    if len(parents) != count:
        raise InvalidRequest(f"{count} keys and {len(parents)} parents")
    for parent in parents:
        if parent is not None and len(parent) != len(NO_PARENT):
            raise InvalidRequest(f"a parent is a prefix hash of 16 bytes, not {parent!r:.80}")
    return [parent or NO_PARENT for parent in parents]


AT_ONCE = limits.MAX_FDS_PER_MESSAGE
"""Blocks of one request that brings descriptors, so that the usual 1,024 open files are never met."""
