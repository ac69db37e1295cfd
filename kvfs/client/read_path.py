"""Two ways to read blocks: in place, and through the service for processes that may not open slots themselves.

Responsibility: `LocalReader` keeps `kvfs._native.blocks.reader.Reader` on the table of the service that runs now;
`ServedReader` asks the service, which checks the bucket's rights and sends read-only descriptors. That costs a round
trip; the service counts these hits itself.

Invariants: results are the native reader's codes; a service that cannot be reached has no blocks.
Concurrency: any thread; a lock for attaching.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from kvfs import limits
from kvfs._native.blocks import reader
from kvfs._native.blocks.pieces import Pieces
from kvfs._native.blocks.reader import Reader, View
from kvfs._native.shared.table import TIER_DRAM, Table
from kvfs.client.exchange import Opened
from kvfs.client.session import AT_ONCE, BlockSession, Live, batches
from kvfs.client.transport import Deadline, close_all
from kvfs.errors import KvfsError, SessionClosed, status_error
from kvfs.protocol.messages import DIGEST_BYTES, DigestBatch, ExtentResult, HelloAnswer, Op
from kvfs.system.linux import hides_reads
from kvfs.system.topology import last_level_cache_bytes

T = TypeVar("T")


class BlockReader(Protocol):
    """Read blocks by their prefix hashes, 16 bytes each, joined."""

    native: Reader | None
    """The reader in place, once it is attached."""

    def match(self, keys: bytes, deadline: Deadline) -> int:
        """Return how many blocks are there without a gap from the first on, in whatever tier."""
        ...

    def find(self, keys: bytes, deadline: Deadline) -> bytes:
        """Return a byte for each block: 0 where it is not there."""
        ...

    def read(self, keys: bytes, pieces: Pieces, deadline: Deadline) -> list[int]:
        """Copy blocks; return the bytes of each, or MISS, BELOW, NO_ROOM. Raises LimitExceeded."""
        ...

    def map(self, keys: bytes, deadline: Deadline) -> list[View | int]:
        """Return a view of each block, or MISS, BELOW. Raises LimitExceeded."""
        ...

    def take_hits(self) -> bytes:
        """Take the keys of hits that were not reported to the service, one batch at most."""
        ...


class LocalReader:
    """Implement `BlockReader` in place. `hello` returns the service's last greeting: where its table and slots are.

    Views are mapped by `served` where the kernel would not note that (a read-only mount in a container): a view's
    pages may be with a device after its end, and the slot is reused with its pages if nobody has read it.
    """

    def __init__(self, hello: Callable[[], HelloAnswer], served: BlockReader) -> None:
        self._hello, self._served = hello, served
        self._hides_reads = False
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
        if found and self._hides_reads:
            return self._served.map(keys, deadline)
        return found.map(keys) if found else [reader.MISS] * (len(keys) // DIGEST_BYTES)

    def take_hits(self) -> bytes:
        return self.native.take_hits(limits.MAX_BATCH) if self.native else b""

    def _current(self) -> Reader | None:
        """Return a reader of the table of the service that runs now; None without one."""
        found = self.native
        return found if found is not None and found.alive else self._attach()

    def _attach(self) -> Reader | None:
        with self._lock:
            if self.native is not None and self.native.alive:
                return self.native
            hello = self._hello()
            try:
                table = Table.attach(hello.details["table"], hello.store_id)
                found = Reader(table, hello.details["directory"], last_level_cache_bytes())
                self._hides_reads = hello.details["keeps_pages"] and hides_reads(hello.details["directory"])
            except (KvfsError, OSError):  # no service since, or one with another store
                return None
            self.native = found if found.alive else None
            return self.native


class ServedReader:
    """Implement `BlockReader` through the service, which brings blocks up from lower tiers. BELOW: there is no room to
    read it now."""

    def __init__(self, session: BlockSession) -> None:
        self._session = session
        self.native: Reader | None = None

    def match(self, keys: bytes, deadline: Deadline) -> int:
        hits = 0
        for some in batches(keys, limits.MAX_BATCH):
            found = self._ask(Op.MATCH, some, deadline, lambda live, batch: live.exchange.count(batch), 0)
            hits += found
            if found < len(some) // DIGEST_BYTES:
                break
        return hits

    def find(self, keys: bytes, deadline: Deadline) -> bytes:
        """Return the bit of DRAM for a block that is there, in whatever tier."""
        found = b""
        for some in batches(keys, limits.MAX_BATCH):
            found += self._ask(Op.LOOKUP_BLOCK, some, deadline, _lookup, bytes(len(some) // DIGEST_BYTES))
        return found

    def read(self, keys: bytes, pieces: Pieces, deadline: Deadline) -> list[int]:
        results: list[int] = []
        for some in batches(keys, AT_ONCE):
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
        for some in batches(keys, AT_ONCE):
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
        """Open blocks; yield each one's answer, with its descriptor where it was opened, and close them at the end.

        Raises LimitExceeded, and the error (QuotaExceeded, ...) where none was opened and one failed.
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
    return bytes(
        TIER_DRAM if entry.status in (0, errno.EAGAIN) else 0 for entry in live.exchange.extents(batch)
    )
