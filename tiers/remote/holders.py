"""Who holds the blocks of a request: what a directory says, as reads of a few machines.

Responsibility: the port of a directory and its null object; runs of blocks that the same machines hold.
Concurrency: pure functions; a directory's calls are the service's trio thread's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import trio

Holders = Sequence[tuple[str, ...]]
"""For each block, the addresses of the machines that are said to hold it."""


class BlockDirectory(Protocol):
    """Says who holds which block; see `tiers.cluster.directory`."""

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Keep the directory up to date until cancelled."""

    async def holders(self, digests: Sequence[bytes]) -> Holders | None:
        """Return the holders of each block; None where it is not known now. Waits a bounded time."""

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all other machines."""

    def status(self) -> dict[str, Any]:
        """Describe the directory as JSON values."""


class NoDirectory:
    """Implements `BlockDirectory` where none is configured: nothing is known."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()

    async def holders(self, digests: Sequence[bytes]) -> Holders | None:
        return None

    def addresses(self) -> tuple[str, ...]:
        return ()

    def status(self) -> dict[str, Any]:
        return {}


def runs(holders: Holders) -> Iterator[tuple[range, tuple[str, ...]]]:
    """Yield runs of consecutive blocks with the machines that hold all of a run, without blocks that nobody holds."""
    first, common = 0, holders[0] if holders else ()
    for at, some in enumerate(holders[1:], 1):
        both = tuple(each for each in common if each in some)
        if (common and not both) or not common:
            if common:
                yield range(first, at), common
            first, common = at, some
        else:
            common = both
    if common:
        yield range(first, len(holders)), common


def leading(holders: Holders) -> dict[str, int]:
    """Return how many blocks each machine holds without a gap from the first on."""
    counts: Counter[str] = Counter()
    left: set[str] | None = None
    for some in holders:
        left = set(some) if left is None else left & set(some)
        counts.update(left)
    return dict(counts)
