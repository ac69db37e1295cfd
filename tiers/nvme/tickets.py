"""Which records of the log a settle waits for, and deletions, which others wait behind.

Responsibility: tickets of the newest records that durable objects, blocks and buckets depend on; what is dropped from
the log, in which order.

Invariants: only what a durable object depends on (`required`) may fail a request. A change of a cache's name waits for
nothing: a start after a kill has it from the index, and one after a power cut has it or what was before it. It is
queued in the order of the changes, and durable with the log's next sync.
Concurrency: the service's trio thread; `settle` awaits the log.
"""

from __future__ import annotations

from kvfs.errors import DeviceFailed, NoSpace
from tiers.log.entries import Barrier
from tiers.nvme.tier import NvmeTier


class Tickets:
    """See the module's header."""

    def __init__(self, nvme: NvmeTier) -> None:
        self._nvme = nvme
        self.required = 0
        """Of the newest entry that a durable object depends on."""
        self.awaited = 0
        """Of the newest bucket, or removal of a block: waited for, too."""

    @property
    def newest(self) -> int:
        """Return the ticket up to which all is durable once everything so far is settled."""
        return max(self.required, self.awaited, self._nvme.deletion_ticket)

    async def settle(self) -> None:
        """Wait until everything so far is durable. Raises NoSpace, DeviceFailed for durable objects."""
        required = self.required
        try:
            await self._nvme.log.settle(self.newest)
        except (NoSpace, DeviceFailed):
            if self._nvme.log.durable_ticket < required:
                raise

    def drop(self, object_id: int | None, *, behind: bool = False, awaited: bool = True) -> None:
        """Drop an object from the log, if there is one. `behind`: after what was queued before, which replaces it, and
        of a durable object once that is durable; not `awaited` where that stays."""
        stored = None if object_id is None else self._nvme.objects.get(object_id)
        if stored is None:
            return
        kept = stored.kept
        if behind and kept:
            self._nvme.log.append(Barrier())
        ticket = self._nvme.drop(stored.object_id, behind=behind, is_final=awaited and (behind or not kept))
        if ticket is not None and kept and not behind:
            self.required = ticket

    def fence(self) -> None:
        """Wait for what reclaim evicts before the removal of a block is settled: it has no deletion in the log, and a
        crash could bring it back."""
        if any(self._nvme.log.evicted.values()):
            self.awaited = self._nvme.log.append(Barrier())
