"""Whether the cold tier's endpoint can be used, and whose its prefix is.

Responsibility: look at the endpoint before anything else is asked of it, again after each failure and every
limits.COLD_CHECK_S; refuse a prefix that is another store's; have a listing held against the index now and then.

Invariants: a prefix has one owner, whose store id stands in `owner.json` there. Two stores in one prefix would delete
each other's objects as unknown, so one that finds another's id touches nothing, unless its settings say to take over;
then the other finds that out at its next look.

Concurrency: one task of the tier; requests in its threads.
"""

from __future__ import annotations

import json
import logging
from functools import partial

import trio

from kvfs import limits
from kvfs.errors import ConfigError, KvfsError, NotFound, TierUnreachable
from kvfs.system.pauses import Pause
from tiers.cold.bucket import ColdBucket
from tiers.cold.format import OWNER
from tiers.cold.reconcile import compare
from tiers.cold.tier import ColdTier

log = logging.getLogger("kvfs.cold")

_FORMAT = 1


async def keep_up(tier: ColdTier) -> None:
    """Check the endpoint until cancelled."""
    recheck = trio.Event()
    pause = Pause(limits.COLD_BACKOFF_S, limits.MAX_COLD_BACKOFF_S)
    compare_at = -float("inf")

    tier.on_failure = lambda: recheck.set()
    reported = ""
    while True:
        recheck = trio.Event()
        try:
            await _look(tier)
        except KvfsError as error:
            tier.failed(error if isinstance(error, TierUnreachable) else TierUnreachable(str(error)))
            if str(error) != reported:
                log.warning("cold tier %s: %s", tier.bucket.place, error)
                reported = str(error)
            await trio.sleep(pause.failed(trio.current_time()))
            continue
        tier.recovered()
        reported = ""
        if trio.current_time() >= compare_at:
            try:
                await compare(tier)
                compare_at = trio.current_time() + limits.COLD_COMPARE_S
            except KvfsError as error:
                log.warning("cold tier: its listing was not gone through: %s", error)
                await trio.sleep(pause.failed(trio.current_time()))
                continue
        with trio.move_on_after(limits.COLD_CHECK_S) as scope:
            await recheck.wait()
        if scope.cancelled_caught:
            pause.succeeded()
        else:
            await trio.sleep(pause.failed(trio.current_time()))


async def _look(tier: ColdTier) -> None:
    """Check whose the prefix is. Raises TierUnreachable, ConfigError where the prefix is another store's."""
    mine = tier.store_id.hex()
    with trio.move_on_after(limits.COLD_FETCH_S) as scope:
        owner = await tier.in_thread(partial(_owner, tier.bucket, mine))
    if scope.cancelled_caught:
        raise TierUnreachable(f"{OWNER} took longer than {limits.COLD_FETCH_S} s")
    if owner == mine:
        return
    if not tier.take_over:
        raise ConfigError(
            f"it is another store's ({owner}): give this one a prefix of its own, or set [cold] take_over "
            "if that store is gone"
        )
    await tier.in_thread(partial(tier.bucket.put, OWNER, [_mark(mine)]))
    tier.take_over = False
    tier.index.set_complete(False)
    log.warning("cold tier %s is taken over from store %s", tier.bucket.place, owner)


def _owner(bucket: ColdBucket, mine: str) -> str:
    """Return the id of the store that has the prefix, which is `mine` if nobody had it."""
    for _ in range(2):
        try:
            return _read_mark(bucket.read(OWNER, limits.MAX_COLD_OWNER_BYTES))
        except NotFound:
            if bucket.create(OWNER, _mark(mine)):
                return mine
    raise TierUnreachable(f"{OWNER} is neither there nor can it be made")


def _mark(store_id: str) -> bytes:
    return json.dumps({"format": _FORMAT, "store_id": store_id}).encode()


def _read_mark(data: bytes) -> str:
    try:
        found = json.loads(data)
        version, owner = int(found["format"]), str(found["store_id"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{OWNER} is no mark of kvfs") from None
    if version > _FORMAT:
        raise ConfigError(f"{OWNER} has format {version}, this kvfs reads up to {_FORMAT}")
    return owner
