"""The control operations on blocks in GPU memory: a session's place in a pool, and what it may do there.

Responsibility: one function per operation, after the rights were checked: who may read a bucket finds its blocks, who
may write there seals them. Whoever sends an answer closes its descriptors.

Invariants: a block's size, and the block before it, are what the store says, never the client.
Concurrency: the service's trio thread; nothing awaits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvfs import limits
from kvfs.errors import Exists, InvalidRequest, KvfsError, NotFound, Unsupported
from kvfs.keys import split_keys
from kvfs.protocol.messages import DIGEST_BYTES, Control, Op
from kvfs.rights import READ, SEARCH, WRITE
from tiers.hbm.allocator import Place
from tiers.hbm.device_pools import Seat
from tiers.hbm.handover import HandedBlock
from tiers.model.blocks import Block
from tiers.model.objects import Bucket
from tiers.model.tier import Extent, Kind, Sealed, SealHeader, StoreKey
from tiers.sessions.answers import log_refusal
from tiers.sessions.arguments import Arguments
from tiers.sessions.channel import is_memory
from tiers.sessions.state import Service, Session

Answered = tuple[dict[str, Any], list[int]]
"""The result, and the descriptors that go with it, for the sender to close."""
_CHECKSUM_BYTES = 8


def serve_hbm(service: Service, session: Session, request: Control) -> Answered:
    """Serve one operation; return its result and descriptors. Raises KvfsError."""
    arguments = Arguments(request.op.name, request.arguments)
    return HBM_OPERATIONS[request.op](service, session, arguments)


def _attach(service: Service, session: Session, arguments: Arguments) -> Answered:
    device, token = (
        arguments.text("device").decode(errors="replace"),
        arguments.hex("token", limits.HBM_TOKEN_BYTES),
    )
    left = {number for (number,) in arguments.rows("left", limits.HBM_TOKEN_BYTES)}
    arguments.done()
    if service.pools is None:
        raise Unsupported("this service has no [hbm]")
    if session.seat is not None:
        raise Exists(f"{session} is attached to device {session.seat.pool.tier.device} already")
    caller = session.caller
    session.seat = service.pools.attach(
        device, caller.uid, caller.pid, session.open_pidfd, token=token, left=left
    )
    tier = session.seat.pool.tier
    descriptors = [os.dup(tier.generations.fd), os.dup(session.seat.client.hazards.fd)]
    return {"segment_bytes": tier.segment_bytes, "descriptors": len(descriptors)}, descriptors


def _detach(service: Service, session: Session, arguments: Arguments) -> Answered:
    arguments.done()
    seat = _seat(session)
    session.seat = None
    seat.pool.tier.detach(seat.client)
    return {}, []


def _map(service: Service, session: Session, arguments: Arguments) -> Answered:
    segment = arguments.integer("segment", 0)
    arguments.done()
    seat = _seat(session)
    descriptor, token = seat.pool.tier.map_segment(seat.client, segment)
    return {"descriptors": 1, "token": token.hex()}, [os.dup(descriptor)]


def _find(service: Service, session: Session, arguments: Arguments) -> Answered:
    bucket, digests = _blocks(session, arguments, READ | SEARCH)
    arguments.done()
    found = _seat(session).pool.find(digests, bucket.bucket_id)
    return {"blocks": [each and _block_row(*each) for each in found]}, []


def _block_row(sealed: Sealed, place: Place) -> list[Any]:
    return [*_place_row(sealed.extent, place), sealed.size_bytes, f"{sealed.checksum:016x}"]


def _place_row(extent: Extent, place: Place) -> list[int]:
    return [extent.slot, extent.generation, place.segment, place.offset_bytes]


def _reserve(service: Service, session: Session, arguments: Arguments) -> Answered:
    bucket, digests = _blocks(session, arguments, WRITE | SEARCH)
    arguments.done()
    seat = _seat(session)
    return {"drafts": [_reserve_one(session, seat, bucket, digest) for digest in digests]}, []


def _reserve_one(session: Session, seat: Seat, bucket: Bucket, digest: bytes) -> list[int] | None:
    """Reserve a draft for a block of the store; None where it gets none."""
    block = _stored(session, bucket, digest)
    if block is None:
        return None
    try:
        reserved = seat.pool.reserve(seat.client, digest, block.size_bytes, session.quota.drafts)
    except KvfsError as error:
        log_refusal(error)
        return None
    return reserved and [*_place_row(*reserved), block.size_bytes]


def _seal(service: Service, session: Session, arguments: Arguments) -> Answered:
    bucket = _bucket(session, arguments, WRITE | SEARCH)
    rows = arguments.rows("seals", 0, 0, DIGEST_BYTES, _CHECKSUM_BYTES)
    arguments.done()
    seat, statuses = _seat(session), []
    for slot, generation, digest, checksum in rows:
        try:
            _seal_one(
                session, seat, bucket, Extent(slot, generation), digest.to_bytes(DIGEST_BYTES), checksum
            )
            statuses.append(0)
        except KvfsError as error:
            log_refusal(error)
            statuses.append(type(error).errno)
    return {"statuses": statuses}, []


def _seal_one(
    session: Session, seat: Seat, bucket: Bucket, draft: Extent, digest: bytes, checksum: int
) -> None:
    block = _stored(session, bucket, digest)
    if block is None:
        seat.pool.refuse(draft, seat.client)
        raise NotFound(f"no block {digest.hex()} in bucket {bucket.name.decode(errors='replace')}")
    seat.pool.seal(draft, seat.client, _header(session, bucket, digest, block), checksum)


def _header(session: Session, bucket: Bucket, digest: bytes, block: Block) -> SealHeader:
    return SealHeader(
        StoreKey(Kind.BLOCK, digest),
        block.sequence,
        block.sequence,
        parent=block.parent or bytes(DIGEST_BYTES),
        uid=session.caller.uid,
        bucket_id=bucket.bucket_id,
    )


def _abort(service: Service, session: Session, arguments: Arguments) -> Answered:
    rows = arguments.rows("drafts", 0, 0)
    arguments.done()
    seat = _seat(session)
    for slot, generation in rows:
        seat.pool.tier.abort(Extent(slot, generation), seat.client)
    return {}, []


def _drop(service: Service, session: Session, arguments: Arguments) -> Answered:
    bucket = _bucket(session, arguments, READ | SEARCH)
    rows = arguments.rows("blocks", 0, 0, DIGEST_BYTES)
    arguments.done()
    pool = _seat(session).pool
    dropped = [
        pool.drop_damaged(digest.to_bytes(DIGEST_BYTES), Extent(slot, generation), bucket.bucket_id)
        for slot, generation, digest in rows
    ]
    return {"count": sum(dropped)}, []


def adopt_segment(service: Service, session: Session, request: Control, descriptor: int) -> dict[str, Any]:
    """Serve HBM_ADOPT: take over what the store has of a segment's blocks; the descriptor stays the caller's. Raises
    KvfsError."""
    arguments = Arguments(request.op.name, request.arguments)
    bucket = _bucket(session, arguments, WRITE | SEARCH)
    token = arguments.hex("token", limits.HBM_SEGMENT_TOKEN_BYTES).to_bytes(limits.HBM_SEGMENT_TOKEN_BYTES)
    rows = arguments.rows("blocks", 0, 0, DIGEST_BYTES, _CHECKSUM_BYTES)
    arguments.done()
    seat = _seat(session)
    assert service.pools is not None
    if not is_memory(descriptor):
        raise InvalidRequest("the descriptor is neither a memory file nor a device, as a segment's is")
    blocks = {
        number: block
        for number, row in enumerate(rows)
        if (block := _handed(session, bucket, *row)) is not None
    }
    adopted = service.pools.adopt(seat, os.dup(descriptor), token, list(blocks.values()))
    places = dict(zip(blocks, adopted, strict=True))
    return {"blocks": [(found := places.get(number)) and _place_row(*found) for number in range(len(rows))]}


def _handed(
    session: Session, bucket: Bucket, offset_bytes: int, size_bytes: int, number: int, checksum: int
) -> HandedBlock | None:
    """Return a block that is handed back; None for one that the store has not, or has in another size."""
    digest = number.to_bytes(DIGEST_BYTES)
    block = _stored(session, bucket, digest)
    if block is None or block.size_bytes != size_bytes:
        return None
    return HandedBlock(offset_bytes, size_bytes, _header(session, bucket, digest, block), checksum)


def _seat(session: Session) -> Seat:
    if session.seat is None:
        raise InvalidRequest(f"{session} is attached to no device")
    return session.seat


def _bucket(session: Session, arguments: Arguments, want: int) -> Bucket:
    return session.access.need_bucket(session.namespace_bucket(arguments.integer("namespace", 0)), want)


def _blocks(session: Session, arguments: Arguments, want: int) -> tuple[Bucket, list[bytes]]:
    """Take the bucket of a namespace's handle and at most limits.MAX_BATCH prefix hashes."""
    bucket = _bucket(session, arguments, want)
    joined = arguments.optional_bytes("digests", limits.MAX_BATCH * DIGEST_BYTES) or b""
    if len(joined) % DIGEST_BYTES:
        raise InvalidRequest(f"digests have {len(joined)} bytes: {DIGEST_BYTES} for each are wanted")
    return bucket, split_keys(joined)


def _stored(session: Session, bucket: Bucket, digest: bytes) -> Block | None:
    """Return what the store knows of a block of this bucket."""
    in_bucket = session.store.block_bucket(digest) == bucket.name
    return session.store.catalog.blocks.get(digest) if in_bucket else None


HBM_OPERATIONS: dict[Op, Callable[[Service, Session, Arguments], Answered]] = {
    Op.HBM_ATTACH: _attach,
    Op.HBM_DETACH: _detach,
    Op.HBM_MAP: _map,
    Op.HBM_FIND: _find,
    Op.HBM_RESERVE: _reserve,
    Op.HBM_SEAL: _seal,
    Op.HBM_ABORT: _abort,
    Op.HBM_DROP: _drop,
}
