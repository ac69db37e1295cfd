"""The batch operations of a session: reserve, seal, abort, remove, look up, match, open, touch.

Responsibility: turn a decoded batch into calls of the store, one entry after the other, and each entry's
outcome into a status. A failing entry fails alone; a request fails as a whole only where nothing of it can
be done (no such namespace handle, no right to the bucket).

Invariants: the event loop gets a turn at least every SESSION_TURN_S; descriptors that go out are opened and
sent within one turn, so that however many sessions there are, one message's worth of them is open here at a
time.

Concurrency: the service's trio thread, one task per session, one request at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import trio

from kvfs import limits
from kvfs._native.sealer import SEALS_AT_ONCE
from kvfs.errors import Busy, Corrupt, InvalidRequest, IsDirectory, KvfsError, NotFound, NotPermitted
from kvfs.messages import (
    DIGEST_BYTES,
    NO_PARENT,
    Abort,
    Answer,
    BlockSeal,
    CountAnswer,
    DigestBatch,
    ExtentAnswer,
    ExtentResult,
    NameSeal,
    Op,
    OpenNames,
    Reserve,
    Result,
    ResultAnswer,
    SealBlocks,
    SealNames,
)
from kvfs.rights import READ, SEARCH, WRITE
from tiers.base import NO_SLOT, Kind, StoreKey
from tiers.model import Attributes, Directory, Name, ObjectInfo
from tiers.session_state import Session

log = logging.getLogger("kvfs.sessions")

T = TypeVar("T")
R = TypeVar("R")
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

Opened = tuple[ExtentResult, int | None]
"""An entry's answer and, where its status is 0, the descriptor that goes with it."""


_Leases = dict[bytes, tuple[ObjectInfo, int] | KvfsError | OSError]
"""Digest -> the object and a descriptor of its bytes, or why there is none."""


@dataclass(frozen=True, slots=True)
class OpenedFrame:
    """One frame of an answer that carries descriptors; whoever sends it closes them."""

    answer: ExtentAnswer
    descriptors: list[int]
    more: bool


class Reply(Protocol):
    """Where answers go."""

    async def send(self, answer: Answer) -> None: ...

    async def send_opened(self, prepare: Callable[[], OpenedFrame]) -> OpenedFrame:
        """Wait until the socket takes a message, only then prepare it, and send it in the same turn."""
        ...


Batch = Reserve | SealBlocks | SealNames | Abort | DigestBatch | OpenNames


async def serve_batch(session: Session, request: Batch, reply: Reply) -> None:
    """Answer one batch. Raises the KvfsError that fails it as a whole."""
    match request:
        case Reserve(size_hints=hints):
            await _send_opened(Op.RESERVE, hints, lambda hint: _reserve(session, hint), reply)
        case SealBlocks():
            bucket = _writable(session, request.namespace)
            seals = [(bucket, seal) for seal in request.seals]
            await _send_results(
                session, Op.SEAL_BLOCK, seals, lambda item: _seal_block(session, *item), reply
            )
        case SealNames(seals=names):
            conditional = [Name(seal.bucket, seal.key) for seal in names if _is_conditional(seal)]
            busy = await session.store.wait_all_published(conditional, creates=True)
            await _send_results(
                session, Op.SEAL_NAMED, names, lambda seal: _seal_named(session, seal, busy), reply
            )
        case Abort(drafts=drafts):
            await _send_results(session, Op.ABORT, drafts, lambda draft: _abort(session, *draft), reply)
        case OpenNames(names=found):
            wanted = [Name(bucket, key) for bucket, key in found]
            busy = await session.store.wait_all_published(wanted)
            await _send_found(
                session, Op.OPEN_NAMED, wanted, lambda name: _find_name(session, name, busy), reply
            )
        case DigestBatch():
            await _serve_digests(session, request, reply)


async def _serve_digests(session: Session, request: DigestBatch, reply: Reply) -> None:
    digests = [request.digests[at : at + DIGEST_BYTES] for at in range(0, len(request.digests), DIGEST_BYTES)]
    if request.op is Op.TOUCH and request.namespace == 0:
        touched = await _each(digests, lambda digest: _touch_any(session, digest), lambda _: 0)
        await reply.send(CountAnswer(Op.TOUCH, sum(touched)))
        return
    if request.op is Op.REMOVE_BLOCK:
        bucket = _writable(session, request.namespace)
        await _send_results(
            session, request.op, digests, lambda digest: _remove(session, bucket, digest), reply
        )
        return
    if request.op is Op.OPEN_SEALER:
        handle = request.namespace
        await _send_opened(request.op, digests, lambda digest: _open_sealer(session, handle, digest), reply)
        return
    bucket = _readable(session, request.namespace)
    match request.op:
        case Op.OPEN_BLOCK:
            await _send_found(
                session, request.op, digests, lambda digest: _block(session, bucket, digest), reply
            )
        case Op.LOOKUP_BLOCK:
            found = await _each(digests, lambda digest: (_lookup(session, bucket, digest), None), _no_extent)
            await reply.send(ExtentAnswer(request.op, 0, tuple(result for result, _ in found)))
        case Op.MATCH:
            hits = session.store.match(request.digests)
            own = next((i for i in range(hits) if not _is_in(session, bucket, digests[i])), hits)
            await reply.send(CountAnswer(request.op, own))
        case Op.PREFETCH:
            await reply.send(CountAnswer(request.op, await _prefetch(session, bucket, digests)))
        case _:
            known = [digest for digest in digests if _is_in(session, bucket, digest)]
            await _each(known, lambda digest: _touch(session, digest), lambda _: None)
            await reply.send(CountAnswer(Op.TOUCH, len(known)))


async def _prefetch(session: Session, bucket: bytes, digests: Sequence[bytes]) -> int:
    """Bring blocks up into DRAM, as many at a time as the store reads; how many are there. What fails is no error."""
    there = 0

    async def load(digest: bytes) -> None:
        nonlocal there
        try:
            await session.store.load(_block(session, bucket, digest), uid=session.caller.uid)
        except (KvfsError, OSError) as error:
            log.debug("%s", error)
        else:
            there += 1

    async with trio.open_nursery() as nursery:
        for digest in digests:
            nursery.start_soon(load, digest)
    return there


# --- entries ---------------------------------------------------------------------------------------------
def _reserve(session: Session, size_hint_bytes: int) -> Opened:
    draft, descriptor = session.reserve(size_hint_bytes)
    return ExtentResult(0, draft.extent.slot, draft.extent.generation), descriptor


def _open_sealer(session: Session, handle: int, digest: bytes) -> Opened:
    bucket = session.store.bucket(_writable(session, handle))
    if digest != bucket.namespace:
        raise InvalidRequest(f"OPEN_SEALER: {digest.hex()} is not the digest of handle {handle}")
    return ExtentResult(0, size_bytes=SEALS_AT_ONCE), session.seals.open(session, bucket)


def _seal_block(session: Session, bucket: bytes, seal: BlockSeal) -> Result:
    draft = session.draft(seal.slot, seal.generation)
    try:
        info = session.store.seal_block(
            draft,
            bucket,
            seal.digest,
            parent=None if seal.parent == NO_PARENT else seal.parent,
            uid=session.caller.uid,
            checksum=seal.checksum,
        )
    finally:
        session.settle(draft)
    first = info.extent is not None and info.extent.slot == draft.extent.slot
    return Result(0 if first else errno.EEXIST, info.object_id)


def _is_conditional(seal: NameSeal) -> bool:
    """Whether the seal depends on what has the name now."""
    return not seal.replace or seal.expected_id is not None


def _seal_named(session: Session, seal: NameSeal, busy: Mapping[Name, Busy]) -> Result:
    draft = session.draft(seal.slot, seal.generation)
    name = Name(seal.bucket, seal.key)
    if seal.key.endswith(b"/") or seal.mode & ~0o777:
        raise InvalidRequest(
            f"{name} with mode {seal.mode:o}: an object's key has no final '/', its mode 9 bits"
        )
    session.access.need_write_in(name)
    attributes = Attributes(
        mode=seal.mode,
        uid=session.caller.uid,
        gid=session.caller.gid,
        mtime_ns=seal.mtime_ns,
        user_metadata=seal.user_metadata,
    )
    try:
        if name in busy and _is_conditional(seal):
            raise Busy(str(busy[name]))
        info = session.store.seal(
            draft,
            name,
            attributes,
            replace=seal.replace,
            expected_id=seal.expected_id,
            checksum=seal.checksum,
        )
    finally:
        session.settle(draft)
    return Result(0, info.object_id)


def _abort(session: Session, slot: int, generation: int) -> Result:
    draft = session.draft(slot, generation)
    session.store.abort(draft)
    session.settle(draft)
    return Result(0)


def _remove(session: Session, bucket: bytes, digest: bytes) -> Result:
    info = _block(session, bucket, digest)
    session.store.remove_block(digest)
    return Result(0, info.size_bytes)


def _lookup(session: Session, bucket: bytes, digest: bytes) -> ExtentResult:
    return _extent(_block(session, bucket, digest))


def _find_name(session: Session, name: Name, busy: Mapping[Name, Busy]) -> ObjectInfo:
    session.access.need_path(name)
    if name in busy:
        raise Busy(str(busy[name]))
    info = session.store.lookup(name)
    if isinstance(info, Directory):
        raise IsDirectory(f"{name} is a directory")
    session.access.need(info, READ, str(name))
    return info


def _touch(session: Session, digest: bytes) -> None:
    session.store.touch(StoreKey(Kind.BLOCK, digest))


def _touch_any(session: Session, digest: bytes) -> int:
    """Count a hit of any object by its store key; 1 where it is there."""
    if not session.access.privileged:
        raise NotPermitted("only the service's user reports hits of named objects")
    kind = Kind.BLOCK if any(digest[:8]) else Kind.OBJECT
    if session.store.table.get(digest) is None:
        return 0
    session.store.touch(StoreKey(kind, digest))
    return 1


def _block(session: Session, bucket: bytes, digest: bytes) -> ObjectInfo:
    """The block, if it is in this bucket: another one's have other rights and other writers."""
    if not _is_in(session, bucket, digest):
        raise NotFound(f"no block {digest.hex()} in bucket {bucket.decode(errors='replace')}")
    return session.store.lookup_block(digest)


def _is_in(session: Session, bucket: bytes, digest: bytes) -> bool:
    return session.store.block_bucket(digest) == bucket


def _extent(info: ObjectInfo) -> ExtentResult:
    if info.extent is None:
        return ExtentResult(0, NO_SLOT, 0, info.size_bytes)
    return ExtentResult(0, info.extent.slot, info.extent.generation, info.size_bytes)


# --- batches ---------------------------------------------------------------------------------------------
def _readable(session: Session, handle: int) -> bytes:
    return session.access.need_bucket(session.namespace_bucket(handle), READ | SEARCH).name


def _writable(session: Session, handle: int) -> bytes:
    return session.access.need_bucket(session.namespace_bucket(handle), WRITE | SEARCH).name


def _no_extent(status: int) -> Opened:
    return ExtentResult(status), None


async def _each(items: Sequence[T], do: Callable[[T], R], failed: Callable[[int], R]) -> list[R]:
    """`do` for every item, or `failed` with its errno; the event loop gets its turns in between."""
    done = list(_one_turn(items, do, failed))
    while len(done) < len(items):
        await trio.lowlevel.checkpoint()
        done += _one_turn(items[len(done) :], do, failed)
    return done


def _one_turn(items: Sequence[T], do: Callable[[T], R], failed: Callable[[int], R]) -> Iterator[R]:
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
    """The client is told; the log hears of it only where the store itself is at fault."""
    level = type(error).log_level
    log.log(level if level >= logging.ERROR else logging.DEBUG, "%s", error)


async def _send_results(
    session: Session, op: Op, items: Sequence[T], do: Callable[[T], Result], reply: Reply
) -> None:
    """Answer once what was done is as durable as promised; where it is not, what was done has failed."""
    journal = session.store.journal
    lost_before = journal.durable_losses
    results = await _each(items, do, Result)
    try:
        await journal.settle()
        if journal.durable_losses != lost_before:
            raise Corrupt(f"{op.name}: bytes of a durable object changed in DRAM before they were written")
    except KvfsError as error:
        log_refusal(error)
        results = [Result(type(error).errno) if result.status == 0 else result for result in results]
    await reply.send(ResultAnswer(op, 0, tuple(results)))


async def _send_opened(op: Op, items: Sequence[T], do: Callable[[T], Opened], reply: Reply) -> None:
    """Answer with descriptors in as many frames as that takes: each is one turn of the event loop."""
    first, more = 0, True
    while more:
        frame = await reply.send_opened(partial(_open_some, op, items, first, do))
        first, more = first + len(frame.answer.entries), frame.more


async def _send_found(
    session: Session, op: Op, items: Sequence[T], find: Callable[[T], ObjectInfo], reply: Reply
) -> None:
    """The same for objects, each that is not in DRAM leased first and held until its answer is sent; and all of them,
    where one left DRAM before its turn came."""
    first, more, lease_all = 0, True, False
    while more:
        some = items[first : first + limits.MAX_FDS_PER_MESSAGE]
        leases = await _lease(session, some, find, lease_all=lease_all)

        def open_item(item: T, leases: _Leases = leases, lease_all: bool = lease_all) -> Opened:
            info = find(item)
            leased = leases.get(info.key.digest)
            if isinstance(leased, Exception):
                raise leased
            if leased is not None and leased[0].object_id == info.object_id:
                return _extent(leased[0]), os.dup(leased[1])
            if info.extent is None and not lease_all:
                raise _LeftDramError
            return _extent(info), session.store.open_read(info, uid=session.caller.uid)

        try:
            frame = await reply.send_opened(partial(_open_some, op, items, first, open_item))
        except _LeftDramError:
            lease_all = True
            continue
        finally:
            _end_leases(leases)
        first, more, lease_all = first + len(frame.answer.entries), frame.more, False


class _LeftDramError(Exception):
    """An object that needed no lease needs one by now."""


async def _lease(
    session: Session, items: Sequence[T], find: Callable[[T], ObjectInfo], *, lease_all: bool
) -> _Leases:
    """Lease what is not in DRAM now, or all, by its digest."""
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
        for result, descriptor in _one_turn(
            items[first : first + limits.MAX_FDS_PER_MESSAGE], do, _no_extent
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


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
