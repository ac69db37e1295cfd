"""The batch operations of a session: reserve, seal, abort, remove, look up, match, open, touch.

Responsibility: turn a decoded batch into calls of the store, one entry after the other, and each entry's
outcome into a status. A failing entry fails alone; a request fails as a whole only where nothing of it can
be done (no such namespace handle, no right to the bucket).

Concurrency: the service's trio thread, one task per session, one request at a time (`tiers.sessions.answers`).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence

import trio

from kvfs._native.seal.sealer import SEALS_AT_ONCE
from kvfs.errors import Busy, InvalidRequest, IsDirectory, IsLink, KvfsError, NotFound, NotPermitted
from kvfs.keys import split_keys
from kvfs.protocol.messages import (
    NO_PARENT,
    Abort,
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
    SealBlocks,
    SealNames,
)
from kvfs.rights import READ, SEARCH, WRITE
from tiers.model.objects import Attributes, Bucket, Directory, Name, ObjectInfo
from tiers.model.tier import Kind, StoreKey
from tiers.sessions.answers import Opened, each, extent_result, send_objects, send_opened, send_results
from tiers.sessions.channel import Channel
from tiers.sessions.state import Session

log = logging.getLogger("kvfs.sessions")

Batch = Reserve | SealBlocks | SealNames | Abort | DigestBatch | OpenNames


async def serve_batch(session: Session, request: Batch, channel: Channel) -> None:
    """Answer one batch. Raises the KvfsError that fails it as a whole."""
    match request:
        case Reserve(size_hints=hints, kept=kept):
            await send_opened(Op.RESERVE, hints, lambda hint: _reserve(session, hint, kept), channel)
        case SealBlocks():
            bucket = _writable(session, request.namespace)
            seals = [(bucket, seal) for seal in request.seals]
            await send_results(
                session, Op.SEAL_BLOCK, seals, lambda item: _seal_block(session, *item), channel
            )
        case SealNames(seals=names):
            conditional = [Name(seal.bucket, seal.key) for seal in names if _is_conditional(seal)]
            busy = await session.store.wait_all_published(conditional, creates=True)
            await send_results(
                session, Op.SEAL_NAMED, names, lambda seal: _seal_named(session, seal, busy), channel
            )
        case Abort(drafts=drafts):
            await send_results(session, Op.ABORT, drafts, lambda draft: _abort(session, *draft), channel)
        case OpenNames(names=found):
            wanted = [Name(bucket, key) for bucket, key in found]
            busy = await session.store.wait_all_published(wanted)
            await send_objects(
                session, Op.OPEN_NAMED, wanted, lambda name: _find_name(session, name, busy), channel
            )
        case DigestBatch():
            await _serve_digests(session, request, channel)


async def _serve_digests(session: Session, request: DigestBatch, channel: Channel) -> None:
    digests = split_keys(request.digests)
    if request.op is Op.TOUCH and request.namespace == 0:
        touched = await each(digests, lambda digest: _touch_any(session, digest), lambda _: 0)
        await channel.send(CountAnswer(Op.TOUCH, sum(touched)))
        return
    if request.op is Op.REMOVE_BLOCK:
        bucket = _writable(session, request.namespace)
        await send_results(
            session, request.op, digests, lambda digest: _remove(session, bucket, digest), channel
        )
        return
    if request.op is Op.OPEN_SEALER:
        handle = request.namespace
        await send_opened(request.op, digests, lambda digest: _open_sealer(session, handle, digest), channel)
        return
    wanted = session.namespace_bucket(request.namespace)
    where = session.access.need_bucket(wanted, READ | SEARCH)
    bucket = where.name
    match request.op:
        case Op.OPEN_BLOCK:
            await send_objects(
                session, request.op, digests, lambda digest: _block(session, bucket, digest), channel
            )
        case Op.LOOKUP_BLOCK:
            found = await each(digests, lambda digest: _find_block(session, where, digest), ExtentResult)
            await channel.send(ExtentAnswer(request.op, 0, tuple(found)))
        case Op.MATCH:
            hits = session.store.match(request.digests)
            own = next((i for i in range(hits) if not _is_in(session, bucket, digests[i])), hits)
            await channel.send(CountAnswer(request.op, own))
        case Op.PREFETCH:
            await channel.send(CountAnswer(request.op, await _prefetch(session, bucket, digests)))
        case _:
            known = [digest for digest in digests if _is_in(session, bucket, digest)]
            touch = session.store.touch
            await each(known, lambda digest: touch(StoreKey(Kind.BLOCK, digest)), lambda _: None)
            await channel.send(CountAnswer(Op.TOUCH, len(known)))


async def _prefetch(session: Session, bucket: bytes, digests: Sequence[bytes]) -> int:
    """Promote blocks, as many at a time as the store reads; return how many DRAM has. What fails is no error."""
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


def _reserve(session: Session, size_bytes: int, kept: bool) -> Opened:
    """Reserve a draft of a size; with `kept`, one that may have so many bytes of an earlier object, if the caller might
    read that, too."""
    if kept:
        draft, descriptor = session.reserve(0, kept_bytes=size_bytes if session.may_open else 0)
    else:
        draft, descriptor = session.reserve(size_bytes)
    kept_bytes = session.store.dram.kept(draft.extent)
    return ExtentResult(0, draft.extent.slot, draft.extent.generation, kept_bytes), descriptor


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
        session.drop_ended(draft)
    first = info.extent is not None and info.extent.slot == draft.extent.slot
    return Result(0 if first else errno.EEXIST, info.object_id)


def _is_conditional(seal: NameSeal) -> bool:
    """Return whether the seal depends on what has the name now."""
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
        if seal.needs is not None:
            session.need_marker(Name(*seal.needs))
        info = session.store.seal(
            draft,
            name,
            attributes,
            replace=seal.replace,
            expected_id=seal.expected_id,
            checksum=seal.checksum,
        )
    finally:
        session.drop_ended(draft)
    return Result(0, info.object_id)


def _abort(session: Session, slot: int, generation: int) -> Result:
    draft = session.draft(slot, generation)
    session.store.abort(draft)
    session.drop_ended(draft)
    return Result(0)


def _remove(session: Session, bucket: bytes, digest: bytes) -> Result:
    info = _block(session, bucket, digest)
    session.store.remove_block(digest)
    return Result(0, info.size_bytes)


def _find_name(session: Session, name: Name, busy: Mapping[Name, Busy]) -> ObjectInfo:
    session.access.need_path(name)
    if name in busy:
        raise Busy(str(busy[name]))
    info = session.store.lookup(name)
    if isinstance(info, Directory):
        raise IsDirectory(f"{name} is a directory")
    if info.target:
        raise IsLink(f"{name} is a symbolic link")
    session.access.need(info, READ, str(name))
    return info


def _touch_any(session: Session, digest: bytes) -> int:
    """Count a hit of any object by its store key; return 1, or 0 where there is none."""
    if not session.access.privileged:
        raise NotPermitted("only the service's user reports hits of named objects")
    kind = Kind.BLOCK if any(digest[:8]) else Kind.OBJECT
    if session.store.table.get(digest) is None:
        return 0
    session.store.touch(StoreKey(kind, digest))
    return 1


def _block(session: Session, bucket: bytes, digest: bytes) -> ObjectInfo:
    """Look a block up in this bucket alone: blocks of others have other rights and writers. Raises NotFound."""
    if not _is_in(session, bucket, digest):
        raise NotFound(f"no block {digest.hex()} in bucket {bucket.decode(errors='replace')}")
    return session.store.lookup_block(digest)


def _find_block(session: Session, bucket: Bucket, digest: bytes) -> ExtentResult:
    """Say where a block is. Raises NotFound, Busy in a durable bucket until it is durable."""
    info, journal = _block(session, bucket.name, digest), session.store.journal
    if bucket.durable and (journal.is_needed(info.object_id) or not journal.holds(info.object_id)):
        raise Busy(f"block {digest.hex()} is not durable yet")
    return extent_result(info)


def _is_in(session: Session, bucket: bytes, digest: bytes) -> bool:
    return session.store.block_bucket(digest) == bucket


def _writable(session: Session, handle: int) -> bytes:
    return session.access.need_bucket(session.namespace_bucket(handle), WRITE | SEARCH).name
