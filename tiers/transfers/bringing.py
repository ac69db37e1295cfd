"""One batch of blocks to one machine, tried again where that may help.

Responsibility: pulls, and what is left after them. Invariants: limits.PULL_TRIES pulls of a batch at most; blocks that
went away here meanwhile are gone, and no failure. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import trio

from kvfs import limits
from tiers.store.store import Store
from tiers.transfers.block_batches import Found, is_served
from tiers.transfers.other_machines import MISSING, THERE, Cause, Target
from tiers.transfers.progress import Progress


class Left(NamedTuple):
    """Names the blocks of a batch that a machine did not take, and why."""

    blocks: list[Found]
    cause: Cause = Cause.NONE
    reason: str = ""


async def bring(
    store: Store, target: Target, namespace: bytes, blocks: Sequence[Found], progress: Progress
) -> Left:
    """Have a machine fetch blocks of a namespace from this one; return those that it has not then."""
    left = Left(list(blocks))
    for tries in range(1, limits.PULL_TRIES + 1):
        pulled = await target.pull(namespace, [each.digest for each in left.blocks])
        missing = []
        for found, status in zip(left.blocks, pulled.statuses, strict=True):
            if status == MISSING:
                missing.append(found)
            else:
                progress.count(found.size_bytes, was_there=status == THERE)
        kept = [each for each in missing if is_served(store, each.digest)]
        came = len(missing) < len(left.blocks)
        left = Left(kept, pulled.cause, pulled.reason)
        if not kept or tries == limits.PULL_TRIES:
            break
        if not came:
            if pulled.cause not in (Cause.PASSING, Cause.NONE):
                break
            await trio.sleep(limits.PULL_PAUSE_S)
    return left
