"""The cold tier's index compared with the listing of its bucket.

Responsibility: find what a killed service left behind, what somebody else deleted, and, where the index was lost, the
blocks that are still there.

Invariants:
- What is in the bucket under a name of the tier's, and not in the index, is deleted; such a name is never used again,
  so nothing else can go. Unless the index is new (`ColdIndex.is_complete`): then blocks are adopted, since a block is
  what its prefix hash says, whoever wrote it. Other objects are not: which of them had a name last is not known there,
  and an old version under a name would be wrong bytes. Names of another form are not touched.
- What is in the index and not in the bucket is a miss.
- A name that is written or deleted while a page of the listing is fetched and compared is passed over
  (`ColdTier.changed_names`).

Concurrency: one task, which lets others run after every limits.COLD_NAMES_AT_ONCE names.
"""

from __future__ import annotations

import logging
import time
from functools import partial

import trio

from kvfs import limits
from kvfs.errors import Corrupt, KvfsError, NotFound, TierUnreachable
from kvfs.index.rows import BucketRow, load_row
from tiers.cold.format import BLOCKS, BUCKETS, HEADER_BYTES, OBJECTS, ColdName, parse_name
from tiers.cold.index import ColdRow, block_of
from tiers.cold.tier import ColdTier

log = logging.getLogger("kvfs.cold")

_LAST = "\U0010ffff"
"""Behind every name that a prefix begins."""


async def compare(tier: ColdTier) -> None:
    """Compare the whole listing with the index. Raises TierUnreachable; then nothing is changed wrongly."""
    adopts = not tier.index.is_complete
    before = (tier.counts.adopted, tier.counts.lost, len(tier.deleting))
    await _compare_buckets(tier, adopts)
    for prefix in (BLOCKS, OBJECTS):
        await _compare_under(tier, prefix, adopts and prefix == BLOCKS)
    tier.index.set_complete(True)
    after = (tier.counts.adopted, tier.counts.lost, len(tier.deleting))
    if after != before:
        log.info(
            "cold tier: %d blocks adopted, %d objects lost, %d to be deleted",
            after[0] - before[0],
            after[1] - before[1],
            max(after[2] - before[2], 0),
        )


async def _compare_under(tier: ColdTier, prefix: str, adopts: bool) -> None:
    after, more = prefix, True
    while more:
        tier.changed_names = changed = set(tier.writing)
        try:
            page, more = await tier.in_thread(partial(tier.bucket.page, prefix, after))
            until = page[-1][0] if page and more else prefix + _LAST
            await _compare_page(tier, after, until, dict(page), changed, adopts)
        finally:
            tier.changed_names = None
        after = until
        await _wait_for_deletions(tier)


async def _compare_page(
    tier: ColdTier, after: str, until: str, page: dict[str, int], changed: set[str], adopts: bool
) -> None:
    """Compare the names past `after` and up to `until` with the index."""
    known = _known(tier, after, until)
    for number, (text, row) in enumerate(known.items()):
        await _checkpoint(number)
        if text in changed or (row is not None and page.get(text) == row.size_bytes + HEADER_BYTES):
            continue
        name = parse_name(text)
        tier.counts.lost += 1
        if name is not None and name.key.digest in tier and tier.store.cold_name(name.key.digest) == name:
            tier.drop(name.key.digest)
        else:
            tier.index.remove(text)
            tier.delete(text, page.get(text, 0))
    for number, (text, size_bytes) in enumerate(page.items()):
        await _checkpoint(number)
        if text in known or text in changed or text in tier.writing or text in tier.deleting:
            continue
        name = parse_name(text)
        if name is None or (adopts and _adopt(tier, name, size_bytes - HEADER_BYTES)):
            continue
        tier.delete(text, size_bytes)


async def _wait_for_deletions(tier: ColdTier) -> None:
    """Wait while too many objects are to be deleted. Raises TierUnreachable after a minute."""
    for _ in range(60):
        if len(tier.deleting) <= limits.COLD_DELETIONS_AHEAD:
            return
        await trio.sleep(limits.COLD_BACKOFF_S)
    raise TierUnreachable(f"{len(tier.deleting)} objects wait to be deleted")


async def _checkpoint(number: int) -> None:
    if number % limits.COLD_NAMES_AT_ONCE == 0:
        await trio.lowlevel.checkpoint()


def _known(tier: ColdTier, after: str, until: str) -> dict[str, ColdRow | None]:
    found: dict[str, ColdRow | None] = {}
    while page := tier.index.page(after, until, limits.MAX_LIST_ENTRIES):
        found.update(page)
        after = page[-1][0]
    return found


def _adopt(tier: ColdTier, name: ColdName, size_bytes: int) -> bool:
    """Enter a block that only the bucket has; return False for one that the store has no use or room for."""
    digest = name.key.digest
    row = tier.names.get_bucket(name.bucket)
    if row is None or row.namespace is None or row.class_ == "durable" or size_bytes < 0:
        return False
    if size_bytes > tier.largest_object_bytes or not any(digest[:8]) or tier.index.is_forbidden(digest):
        return False
    if tier.used_bytes + size_bytes + HEADER_BYTES > tier.capacity_bytes:
        return False
    found = ColdRow(size_bytes, row.uid, time.time_ns())
    if not tier.store.adopt_cold_block(digest, block_of(name, found)):
        return False
    tier.add(name, found)
    tier.counts.adopted += 1
    return True


async def _compare_buckets(tier: ColdTier, adopts: bool) -> None:
    """Make the buckets beside the blocks again where the index was lost; else delete those that are removed here."""
    after, more = "", True
    while more:
        page, more = await tier.in_thread(partial(tier.bucket.page, BUCKETS, after))
        for text, size_bytes in page:
            name = text.removeprefix(BUCKETS).encode()
            if tier.names.get_bucket(name) is not None:
                continue
            if adopts:
                await _make_bucket(tier, name, text)
            else:
                tier.delete(text, size_bytes)
        after = page[-1][0] if page else after


async def _make_bucket(tier: ColdTier, name: bytes, text: str) -> None:
    try:
        data = await tier.in_thread(partial(tier.bucket.read, text, limits.MAX_BUCKET_ROW_BYTES))
        tier.adopt_bucket(BucketRow.decode(name, load_row(name, data)))
    except (Corrupt, NotFound, KvfsError) as error:
        log.warning("cold tier: bucket %s is not made again: %s", name.decode(), error)
