"""The number of uploads that each owner has under way, as one process knows it, so that it has a limit.

Responsibility: count what this process begins on top of the last look at the records, and look again only where the
limit seems reached: beginning an upload costs the same however many there are.

Invariants: a count is what was there at the last look and what this process has begun since. What other processes
began since, and what has ended, is seen at the next look; so an owner may have limits.MAX_UPLOADS more for each process
beside this one, and is refused only where a look of the last limits.UPLOADS_LOOK_S says so.

Concurrency: one trio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import trio

from gateway.protocol.errors import S3Error
from kvfs import limits


class Owned(Protocol):
    """An upload."""

    @property
    def owner(self) -> str:
        """Return the id of who began the upload."""


class UploadCounts:
    """See the module's header."""

    def __init__(self, look: Callable[[], Awaitable[Iterable[Owned]]]) -> None:
        """Make counts of nothing; `look` reads the records of all uploads."""
        self._records = look
        self._by_owner: Counter[str] = Counter()
        self._looked_s = float("-inf")

    async def begin(self, owner: str) -> None:
        """Count one more. Raises S3Error SlowDown."""
        if self._by_owner[owner] >= limits.MAX_UPLOADS or self._looked_s == float("-inf"):
            await self._look()
        count = self._by_owner[owner]
        if count >= limits.MAX_UPLOADS:
            raise S3Error(
                "SlowDown",
                f"{owner} has {count} uploads under way, which is the limit: abort or complete some.",
            )
        self._by_owner[owner] = count + 1

    async def _look(self) -> None:
        if trio.current_time() - self._looked_s >= limits.UPLOADS_LOOK_S:
            self._looked_s = trio.current_time()
            self._by_owner = Counter(upload.owner for upload in await self._records())
