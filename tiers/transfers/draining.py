"""`kvfs cluster drain`: what this machine alone has, to the other machines.

Invariants:
- A block counts as held elsewhere where another machine says so itself: where there is a directory, one that it names.
- A block goes where its parent went or is, while that machine takes more, else to the machine that was given least.
  What one machine does not take goes to another one, and is a failure once all were asked.
- One pull is under way at a machine, limits.REMOTE_PULLS in all. Walks through all blocks follow each other until one
  finds nothing alone: what was put or evicted meanwhile is seen by the next. limits.DRAIN_WALKS at most.

Concurrency: the service's trio thread; a task walks, and one for each pull under way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import trio
import trio.lowlevel

from kvfs import limits
from kvfs.errors import KvfsError
from tiers.store.store import Store
from tiers.transfers.block_batches import Batch, Batches, Found, Place, walk
from tiers.transfers.bringing import Left, bring
from tiers.transfers.other_machines import MISSING, Cause, Machines, Target
from tiers.transfers.progress import Progress

_NOBODY = "no other machine is up that takes them"
_UNKNOWN = "the directory does not say who has them"


class Drain:
    """Brings the blocks of caches to other machines."""

    def __init__(self, store: Store, machines: Machines, progress: Progress) -> None:
        self._store, self._machines, self._progress = store, machines, progress
        self._namespaces: dict[bytes, bytes] = {}
        """Of the buckets whose blocks are brought."""
        self._askers: dict[str, Target] = {}
        self._takers: dict[str, Target] = {}
        self._at_one: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        self._turns = trio.Semaphore(limits.REMOTE_PULLS)
        self._unusable: dict[str | Place, str] = {}
        """Machines, or buckets of this one at a machine, that take no more in this walk, and why."""
        self._mute: set[str] = set()
        """Machines that do not say in this walk what they have."""
        self._went: OrderedDict[bytes, str] = OrderedDict()
        """By block, the machine that has it, of the latest limits.DRAIN_PARENTS."""
        self._given_bytes: Counter[str] = Counter()
        """By machine, what was meant for it."""

    async def run(self) -> str:
        """Bring all; return the result. Raises KvfsError where something stays that this machine alone has."""
        progress = self._progress
        try:
            for number in range(limits.DRAIN_WALKS):
                found_alone = await self._walk(is_first=number == 0)
                if progress.failed_blocks:
                    raise KvfsError(f"{progress.failed_blocks} blocks are here alone; {self._staying()}")
                if not found_alone:
                    return f"nothing is here alone; {self._staying()}"
        finally:
            for link in (*self._askers.values(), *self._takers.values()):
                link.close()
        raise KvfsError(
            "blocks came here, or went from the other machines for want of room, as fast as others were brought"
        )

    async def _walk(self, *, is_first: bool) -> bool:
        """Bring elsewhere what is here alone; return whether there was any."""
        buckets, blocks = self._store.buckets(), self._store.catalog.blocks
        self._namespaces = {b.name: b.namespace for b in buckets if b.namespace is not None and not b.durable}
        self._unusable.clear()
        self._mute.clear()
        progress = self._progress
        if is_first:
            progress.of_blocks = sum(map(blocks.count, self._namespaces))
            progress.of_bytes = sum(map(blocks.size_bytes, self._namespaces))
            await self._bring_alone(progress)
            progress.pass_over_rest()
            return progress.blocks > progress.there_blocks
        again = Progress(progress.kind)
        await self._bring_alone(again)
        progress.add_brought(again)
        return again.blocks > again.there_blocks

    async def _bring_alone(self, progress: Progress) -> None:
        batches = Batches()
        async with trio.open_nursery() as nursery:
            for some in walk(self._store, self._namespaces):
                for found, holder in await self._located(some, progress):
                    if holder:
                        self._note_holder(found, holder)
                        progress.count(found.size_bytes, was_there=True)
                    elif full := batches.add(self._place(found), found):
                        await self._begin(nursery, full, progress)
                await trio.lowlevel.checkpoint()
            for batch in batches.rest():
                await self._begin(nursery, batch, progress)

    # --- who has what ------------------------------------------------------------------------------------
    async def _located(self, some: Sequence[Found], progress: Progress) -> list[tuple[Found, str]]:
        """Return each block with a machine that has it, or an empty address."""
        if not some:
            return []
        if not self._machines.has_directory:
            return await self._asked(some)
        for _ in range(limits.PULL_TRIES):
            holders = await self._machines.holders([each.digest for each in some])
            if holders is not None:
                named = {each.digest: at for each, at in zip(some, holders, strict=True)}
                return await self._asked(some, named)
            await trio.sleep(limits.PULL_PAUSE_S)
        progress.fail(_UNKNOWN, len(some))
        return []

    async def _asked(
        self, some: Sequence[Found], named: Mapping[bytes, Collection[str]] | None = None
    ) -> list[tuple[Found, str]]:
        """Ask all machines at once which of the blocks they have. `named`: by block, those that may have it."""
        holders: dict[bytes, str] = {}

        async def ask(address: str, namespace: bytes, digests: list[bytes]) -> None:
            pulled = await self._link(self._askers, address).ask(namespace, digests)
            if pulled.cause in (Cause.REFUSED, Cause.PASSING):
                self._mute.add(address)
                self._unusable[address] = f"{address}: {pulled.reason}"
            for digest, status in zip(digests, pulled.statuses, strict=True):
                if status != MISSING:
                    holders[digest] = address

        for bucket in dict.fromkeys(each.bucket for each in some):
            digests = [each.digest for each in some if each.bucket == bucket]
            async with trio.open_nursery() as nursery:
                for address in set(self._machines.addresses()) - self._mute:
                    may_have = [each for each in digests if named is None or address in named[each]]
                    if may_have:
                        nursery.start_soon(ask, address, self._namespaces[bucket], may_have)
        return [(each, holders.get(each.digest, "")) for each in some]

    def _note_holder(self, found: Found, address: str) -> None:
        self._went[found.digest] = address
        self._went.move_to_end(found.digest)
        if len(self._went) > limits.DRAIN_PARENTS:
            self._went.popitem(last=False)

    # --- where it goes -----------------------------------------------------------------------------------
    def _usable(self, bucket: bytes) -> list[str]:
        """Return the machines that may take blocks of a bucket."""
        return [
            address
            for address in self._machines.addresses()
            if address not in self._unusable and Place(address, bucket) not in self._unusable
        ]

    def _place(self, found: Found) -> Place:
        usable = self._usable(found.bucket)
        address = self._went.get(found.parent, "") if found.parent is not None else ""
        if address not in usable:
            address = min(usable, key=self._given_bytes.__getitem__, default="")
        self._given_bytes[address] += found.size_bytes
        self._note_holder(found, address)
        return Place(address, found.bucket)

    def _others(self, bucket: bytes, tried: set[str]) -> Iterator[str]:
        """Yield the machines to ask, the least busy ones first, until all were asked."""
        while left := [each for each in self._usable(bucket) if each not in tried]:
            yield min(left, key=lambda each: self._at_one[each].locked())

    async def _begin(self, nursery: trio.Nursery, batch: Batch, progress: Progress) -> None:
        await self._turns.acquire()
        nursery.start_soon(self._bring, batch, progress)

    async def _bring(self, batch: Batch, progress: Progress) -> None:
        """Bring a batch to its place, and what that does not take to others."""
        try:
            await self._bring_somewhere(batch, progress)
        finally:
            self._turns.release()

    async def _bring_somewhere(self, batch: Batch, progress: Progress) -> None:
        address, bucket = batch.place
        blocks, reasons, tried = batch.blocks, [], {""}
        others = self._others(bucket, tried)
        if address not in self._usable(bucket):
            address = next(others, "")
        while blocks and address:
            tried.add(address)
            left = await self._bring_to(address, bucket, blocks, progress)
            for each in set(blocks) - set(left.blocks):
                self._note_holder(each, address)
            if left.blocks:
                reasons.append(f"{address}: {left.reason}")
            blocks, address = left.blocks, next(others, "")
        if blocks:
            all_reasons = sorted({*reasons, *self._reasons(bucket)})
            progress.fail("; ".join(all_reasons) or _NOBODY, len(blocks))

    async def _bring_to(
        self, address: str, bucket: bytes, blocks: Sequence[Found], progress: Progress
    ) -> Left:
        async with self._at_one[address]:
            link = self._link(self._takers, address)
            left = await bring(self._store, link, self._namespaces[bucket], blocks, progress)
        if left.blocks and left.cause is not Cause.NONE:
            which = Place(address, bucket) if left.cause is Cause.NAMESPACE else address
            self._unusable[which] = f"{address}: {left.reason}"
        return left

    def _reasons(self, bucket: bytes) -> list[str]:
        """Return why machines take no blocks of a bucket."""
        reasons = self._unusable.items()
        return [each for which, each in reasons if not isinstance(which, Place) or which.bucket == bucket]

    def _link(self, links: dict[str, Target], address: str) -> Target:
        if address not in links:
            links[address] = self._machines.link(address)
        return links[address]

    def _staying(self) -> str:
        """Say what never moves."""
        catalog = self._store.catalog
        durable = sum(catalog.blocks.count(each.name) for each in self._store.buckets() if each.durable)
        return f"{len(catalog.name_of)} named objects and {durable} blocks of durable buckets stay"
