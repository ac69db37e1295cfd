"""Memory for the documents that clients send, bounded over the process and for each owner.

Concurrency: one trio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.protocol.errors import S3Error
from kvfs import limits


class Held:
    """The bytes of one document that are in memory."""

    __slots__ = ("_budget", "_owner", "size_bytes")

    def __init__(self, budget: DocumentBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes that have come. Raises S3Error SlowDown."""
        self._budget.add(self._owner, size_bytes)
        self.size_bytes += size_bytes


class DocumentBudget:
    """The documents that a process has in memory, by owner: their bytes are bounded."""

    def __init__(self) -> None:
        self._by_owner: Counter[str] = Counter()

    def add(self, owner: str, size_bytes: int) -> None:
        """Count bytes that have come. Raises S3Error SlowDown."""
        own = self._by_owner[owner] + size_bytes
        most = limits.DOCUMENTS_BYTES
        total = self._by_owner.total() + size_bytes
        if own > most // limits.OWNER_SHARE_OF_DOCUMENTS or total > most:
            raise S3Error(
                "SlowDown", "Documents of requests under way take all the memory there is for them."
            )
        self._by_owner[owner] = own

    @contextmanager
    def hold(self, owner: str) -> Iterator[Held]:
        """Count the bytes of one document for its owner, until the block is left."""
        held = Held(self, owner)
        try:
            yield held
        finally:
            self._by_owner[owner] -= held.size_bytes
            if not self._by_owner[owner]:
                del self._by_owner[owner]
