"""Answers of batch operations: each entry's outcome, durability awaited, and descriptors frame by frame.

Responsibility: do something for every entry of a batch, and send the outcomes.

Invariants: other tasks run at least every SESSION_TURN_S; descriptors that go out are opened and sent without others in
between, so that however many sessions there are, those of one message are open here at a time.

Concurrency: the service's trio thread, one task per session, one request at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import trio

from kvfs import limits
from kvfs.errors import Corrupt, KvfsError, NotFound
from kvfs.protocol.messages import ExtentAnswer, ExtentResult, Op, Result, ResultAnswer
from tiers.model.objects import ObjectInfo
from tiers.model.tier import NO_SLOT
from tiers.sessions.channel import Channel, OpenedFrame, close_all
from tiers.sessions.state import Session

log = logging.getLogger("kvfs.sessions")

T = TypeVar("T")
R = TypeVar("R")
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

Opened = tuple[ExtentResult, int | None]
"""An entry's answer and, where its status is 0, the descriptor that goes with it."""


_Leases = dict[bytes, tuple[ObjectInfo, int] | KvfsError | OSError]
"""Digest -> the object and a descriptor of its bytes, or why there is none."""


def extent_result(info: ObjectInfo) -> ExtentResult:
    """Answer where an object is."""
    if info.extent is None:
        return ExtentResult(0, NO_SLOT, 0, info.size_bytes)
    return ExtentResult(0, info.extent.slot, info.extent.generation, info.size_bytes)


async def each(items: Sequence[T], do: Callable[[T], R], failed: Callable[[int], R]) -> list[R]:
    """Do something for every item; where it fails, take `failed` of the errno. Other tasks run in between."""
    done = list(_in_one_turn(items, do, failed))
    while len(done) < len(items):
        await trio.lowlevel.checkpoint()
        done += _in_one_turn(items[len(done) :], do, failed)
    return done


def _in_one_turn(items: Sequence[T], do: Callable[[T], R], failed: Callable[[int], R]) -> Iterator[R]:
    end = time.monotonic() + limits.SESSION_TURN_S
    for item in items:
        try:
            result = do(item)
        except KvfsError as error:
            log_refusal(error)
            result = failed(type(error).errno)
        except OSError as error:
            log.warning("%s", error)
            result = failed(error.errno or errno.EIO)
        yield result
        if time.monotonic() >= end:
            return


def log_refusal(error: KvfsError) -> None:
    """Log an error that is a client's answer: at its level and with its trace where the store itself is at fault, else
    for debugging."""
    level = type(error).log_level
    if level >= logging.ERROR:
        log.log(level, "%s", error, exc_info=error)
    else:
        log.debug("%s", error)


async def send_results(
    session: Session, op: Op, items: Sequence[T], do: Callable[[T], Result], channel: Channel
) -> None:
    """Do something for every item, and answer once that is durable; where it cannot be, it has failed."""
    journal = session.store.journal
    lost_before = journal.durable_losses
    results = await each(items, do, Result)
    try:
        await journal.settle()
        if journal.durable_losses != lost_before:
            raise Corrupt(f"{op.name}: bytes of a durable object changed in DRAM before they were written")
    except KvfsError as error:
        log_refusal(error)
        results = [Result(type(error).errno) if result.status == 0 else result for result in results]
    await channel.send(ResultAnswer(op, 0, tuple(results)))


async def send_opened(op: Op, items: Sequence[T], do: Callable[[T], Opened], channel: Channel) -> None:
    """Answer with descriptors, frame by frame; other tasks run in between."""
    first, more = 0, True
    while more:
        frame = await channel.send_opened(partial(_open_some, op, items, first, do))
        first, more = first + len(frame.answer.entries), frame.more


async def send_objects(
    session: Session, op: Op, items: Sequence[T], find: Callable[[T], ObjectInfo], channel: Channel
) -> None:
    """Answer with descriptors of objects. One that is not in DRAM is leased first, until its answer is sent; all are,
    again, where one was evicted from DRAM, or replaced by one that is, before it was opened."""
    first, more, lease_all = 0, True, False
    while more:
        some = items[first : first + limits.MAX_FDS_PER_MESSAGE]
        leases = await _lease(session, some, find, lease_all=lease_all)

        def open_item(item: T, leases: _Leases = leases) -> Opened:
            info = find(item)
            leased = leases.get(info.key.digest)
            if isinstance(leased, Exception):
                raise leased
            if leased is not None and leased[0].object_id == info.object_id:
                return extent_result(leased[0]), os.dup(leased[1])
            if info.extent is None:
                raise _EvictedError
            return extent_result(info), session.store.open_read(info, uid=session.caller.uid)

        try:
            frame = await channel.send_opened(partial(_open_some, op, items, first, open_item))
        except _EvictedError:
            lease_all = True
            continue
        finally:
            _end_leases(leases)
        first, more, lease_all = first + len(frame.answer.entries), frame.more, False


class _EvictedError(Exception):
    """Says that an object that needed no lease needs one by now, or that it is another than was leased."""


async def _lease(
    session: Session, items: Sequence[T], find: Callable[[T], ObjectInfo], *, lease_all: bool
) -> _Leases:
    """Lease what is not in DRAM now, or all; return the leases by digest."""
    leases: _Leases = {}

    async def lease(item: T, digest: bytes) -> None:
        try:
            leases[digest] = await session.store.lease(find(item), uid=session.caller.uid)
        except (KvfsError, OSError) as error:
            log.debug("%s", error)
            leases[digest] = error

    try:
        async with trio.open_nursery() as nursery:
            for item in items:
                try:
                    info = find(item)
                except KvfsError:
                    continue
                if (lease_all or info.extent is None) and info.key.digest not in leases:
                    leases[info.key.digest] = NotFound(f"object {info.object_id} is gone")
                    nursery.start_soon(lease, item, info.key.digest)
    except BaseException:
        _end_leases(leases)
        raise
    return leases


def _end_leases(leases: _Leases) -> None:
    close_all([leased[1] for leased in leases.values() if isinstance(leased, tuple)])


def _open_some(op: Op, items: Sequence[T], first: int, do: Callable[[T], Opened]) -> OpenedFrame:
    results: list[ExtentResult] = []
    descriptors: list[int] = []
    try:
        for result, descriptor in _in_one_turn(
            items[first : first + limits.MAX_FDS_PER_MESSAGE], do, lambda status: (ExtentResult(status), None)
        ):
            if result.status in _OUT_OF_DESCRIPTORS and descriptors:
                break  # the rest is tried again when these are sent and closed
            results.append(result)
            if descriptor is not None:
                descriptors.append(descriptor)
    except BaseException:
        close_all(descriptors)
        raise
    return OpenedFrame(
        ExtentAnswer(op, first, tuple(results)), descriptors, more=first + len(results) < len(items)
    )
