"""Two ways to read blocks: in place, and through the service for processes that may not open slots themselves.

Responsibility: `LocalReader` keeps `kvfs._native.reader.Reader` on the table of the service that runs now;
`ServedReader` does the same by requests: the service looks at the bucket's rights and sends read-only
descriptors. That costs a round trip; hits are counted where they are opened.

Invariants: results are the native reader's codes; what cannot be reached has no blocks.
Concurrency: any thread; a lock keeps attaching apart.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from kvfs import limits
from kvfs._native import reader
from kvfs._native.pieces import Pieces
from kvfs._native.reader import Reader, View
from kvfs._native.table import TIER_DRAM, Table
from kvfs.block_session import AT_ONCE, BlockSession, Live
from kvfs.errors import KvfsError, SessionClosed
from kvfs.exchange import Opened, status_error
from kvfs.messages import DIGEST_BYTES, DigestBatch, ExtentResult, HelloAnswer, Op
from kvfs.transport import Deadline, close_all

T = TypeVar("T")


class BlockReader(Protocol):
    """What both have. `keys` are prefix hashes of 16 bytes, joined."""

    native: Reader | None
    """For what it can do at once, if it was attached already."""

    def match(self, keys: bytes, deadline: Deadline) -> int:
        """How many are there without a gap from the first on, in whatever tier."""
        ...

    def find(self, keys: bytes, deadline: Deadline) -> bytes:
        """A byte for each: 0 for what is not there."""
        ...

    def read(self, keys: bytes, pieces: Pieces, deadline: Deadline) -> list[int]:
        """Bytes of each, or MISS, BELOW, NO_ROOM. Raises LimitExceeded."""
        ...

    def map(self, keys: bytes, deadline: Deadline) -> list[View | int]:
        """A view of each, or MISS, BELOW. Raises LimitExceeded."""
        ...

    def take_hits(self) -> bytes:
        """Keys of hits that the service has not heard of, one batch at most."""
        ...


class LocalReader:
    """Reads in place. `hello` is what the service said last of where its table and slots are."""

    def __init__(self, hello: Callable[[], HelloAnswer]) -> None:
        self._hello = hello
        self._lock = threading.Lock()
        self.native: Reader | None = None

    def match(self, keys: bytes, deadline: Deadline) -> int:
        found = self._current()
        return found.match(keys) if found else 0

    def find(self, keys: bytes, deadline: Deadline) -> bytes:
        found = self._current()
        return found.find(keys) if found else bytes(len(keys) // DIGEST_BYTES)

    def read(self, keys: bytes, pieces: Pieces, deadline: Deadline) -> list[int]:
        found = self._current()
        return found.read(keys, pieces) if found else [reader.MISS] * (len(keys) // DIGEST_BYTES)

    def map(self, keys: bytes, deadline: Deadline) -> list[View | int]:
        found = self._current()
        return found.map(keys) if found else [reader.MISS] * (len(keys) // DIGEST_BYTES)

    def take_hits(self) -> bytes:
        return self.native.take_hits(limits.MAX_BATCH) if self.native else b""

    def _current(self) -> Reader | None:
        """The reader of a table that no later service has replaced, if there is one."""
        found = self.native
        return found if found is not None and found.alive else self._attach()

    def _attach(self) -> Reader | None:
        with self._lock:
            if self.native is not None and self.native.alive:
                return self.native
            hello = self._hello()
            try:
                table = Table.attach(hello.details["table"], hello.store_id)
                found = Reader(table, hello.details["directory"])
            except (KvfsError, OSError):  # no service since, or one with another store
                return None
            self.native = found if found.alive else None
            return self.native


class ServedReader:
    """The blocks of one session's namespace, brought up from lower tiers where that is needed. A service that does not
    answer in time has none. BELOW is what there is no room to read now."""

    def __init__(self, session: BlockSession) -> None:
        self._session = session
        self.native: Reader | None = None

    def match(self, keys: bytes, deadline: Deadline) -> int:
        hits = 0
        for some in _batches(keys, limits.MAX_BATCH):
            found = self._ask(Op.MATCH, some, deadline, lambda live, batch: live.exchange.count(batch), 0)
            hits += found
            if found < len(some) // DIGEST_BYTES:
                break
        return hits

    def find(self, keys: bytes, deadline: Deadline) -> bytes:
        """The bit of DRAM for what is there, in whatever tier; 0 for what is not."""
        found = b""
        for some in _batches(keys, limits.MAX_BATCH):
            found += self._ask(Op.LOOKUP_BLOCK, some, deadline, _lookup, bytes(len(some) // DIGEST_BYTES))
        return found

    def read(self, keys: bytes, pieces: Pieces, deadline: Deadline) -> list[int]:
        results: list[int] = []
        for some in _batches(keys, AT_ONCE):
            with self._opened(some, deadline) as opened:
                descriptors = [descriptor for _, descriptor in opened]
                sizes = [entry.size_bytes for entry, _ in opened]
                found = reader.read_descriptors(descriptors, sizes, pieces, len(results))
                results += [
                    reader.BELOW if entry.status == errno.EAGAIN else result
                    for (entry, _), result in zip(opened, found, strict=True)
                ]
        return results

    def map(self, keys: bytes, deadline: Deadline) -> list[View | int]:
        views: list[View | int] = []
        for some in _batches(keys, AT_ONCE):
            with self._opened(some, deadline) as opened:
                for entry, descriptor in opened:
                    view = None if descriptor is None else View.of_descriptor(descriptor, entry.size_bytes)
                    missing = reader.BELOW if entry.status == errno.EAGAIN else reader.MISS
                    views.append(missing if view is None else view)
        return views

    def take_hits(self) -> bytes:
        return b""

    @contextmanager
    def _opened(self, keys: bytes, deadline: Deadline) -> Iterator[Opened]:
        """Every block's answer and its descriptor, None for a miss, for what there is no room to read now, and for what
        failed while another was opened.

        Raises what all of them failed for (QuotaExceeded, ...), and LimitExceeded.
        """
        nothing: Opened = [(_MISSING, None)] * (len(keys) // DIGEST_BYTES)
        opened = self._ask(
            Op.OPEN_BLOCK, keys, deadline, lambda live, batch: live.exchange.open(batch), nothing
        )
        try:
            statuses = {entry.status for entry, _ in opened} - {errno.ENOENT, errno.EAGAIN}
            if errno.E2BIG in statuses:
                raise status_error(errno.E2BIG, "opening a block")
            if statuses and 0 not in statuses:
                raise status_error(min(statuses), "opening a block")
            yield opened
        finally:
            close_all([descriptor for _, descriptor in opened if descriptor is not None])

    def _ask(
        self, op: Op, keys: bytes, deadline: Deadline, do: Callable[[Live, DigestBatch], T], otherwise: T
    ) -> T:
        try:
            return self._session.run(lambda live: do(live, DigestBatch(op, live.handle, keys)), deadline)
        except SessionClosed:
            return otherwise


_MISSING = ExtentResult(errno.ENOENT)


def _lookup(live: Live, batch: DigestBatch) -> bytes:
    return bytes(TIER_DRAM if entry.status == 0 else 0 for entry in live.exchange.extents(batch))


def _batches(keys: bytes, count: int) -> Iterator[bytes]:
    step = count * DIGEST_BYTES
    return (keys[at : at + step] for at in range(0, len(keys), step))
