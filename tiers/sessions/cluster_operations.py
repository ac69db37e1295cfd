"""The control operations on blocks of other machines.

Responsibility: one function per operation, after the rights were checked: who may read a cache's blocks here may have
the service fetch them; what is fetched into a durable bucket stays there, and takes the right to write. Tasks of the
whole service are for root and its own user.
Concurrency: the service's trio thread; a session waits for its own operation alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvfs import limits
from kvfs.errors import InvalidRequest
from kvfs.keys import split_keys
from kvfs.protocol.messages import DIGEST_BYTES, Op, text
from kvfs.rights import READ, SEARCH, WRITE
from tiers.model.objects import Bucket
from tiers.sessions.arguments import Arguments
from tiers.sessions.state import Service, Session


async def _fetch(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    bucket, digests = _blocks(session, arguments)
    hint = text(arguments.text("hint", "")) or None
    urgent = arguments.flag("urgent", True)
    arguments.done()
    if bucket.durable:
        session.access.need_bucket(bucket.name, WRITE | SEARCH)
    here = await service.cluster.fetch(bucket, digests, uid=session.caller.uid, hint=hint, urgent=urgent)
    return {"count": here}


async def _match_cluster(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    bucket, digests = _blocks(session, arguments)
    arguments.done()
    return {"peers": await service.cluster.match(bucket, digests)}


async def _copy(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    to, bound = _chosen(session, arguments, "copy")
    return await service.cluster.copy(to, bound)


async def _move(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    to, bound = _chosen(session, arguments, "move")
    return await service.cluster.move(to, bound)


def _chosen(session: Session, arguments: Arguments, verb: str) -> tuple[str, list[Bucket]]:
    """Take a machine's address, and the buckets whose blocks are to go there. Raises NotPermitted, InvalidRequest,
    BucketNotFound."""
    to, bucket = text(arguments.text("to")), arguments.text("bucket", "")
    namespace = arguments.hex("namespace", DIGEST_BYTES) if arguments.has("namespace") else None
    arguments.done()
    session.access.need_privilege(f"{verb} blocks to other machines")
    if bucket and namespace is not None:
        raise InvalidRequest("give a bucket or a namespace, not both")
    bound = [each for each in session.store.buckets() if each.namespace is not None]
    if bucket:
        bound = [each for each in [session.store.bucket(bucket)] if each.namespace is not None]
    elif namespace is not None:
        bound = [each for each in bound if each.namespace == namespace.to_bytes(DIGEST_BYTES, "big")]
    if not bound:
        raise InvalidRequest(f"no such bucket here is bound to a namespace: there are no blocks to {verb}")
    return to, bound


async def _drain(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    arguments.done()
    session.access.need_privilege("drain the machine")
    return await service.cluster.drain()


async def _cancel(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    kind = text(arguments.text("kind"))
    arguments.done()
    session.access.need_privilege("cancel tasks")
    return await service.cluster.cancel(kind)


def _blocks(session: Session, arguments: Arguments) -> tuple[Bucket, list[bytes]]:
    """Take the bucket of a namespace's handle and prefix hashes, 1 to limits.MAX_FETCH_BLOCKS of them."""
    bucket = session.access.need_bucket(
        session.namespace_bucket(arguments.integer("namespace", 0)), READ | SEARCH
    )
    digests = arguments.optional_bytes("digests", limits.MAX_FETCH_BLOCKS * DIGEST_BYTES) or b""
    if not digests or len(digests) % DIGEST_BYTES:
        raise InvalidRequest(
            f"digests have {len(digests)} bytes: {DIGEST_BYTES} for each of 1 or more are wanted"
        )
    return bucket, split_keys(digests)


CLUSTER_OPERATIONS: dict[Op, Callable[[Service, Session, Arguments], Awaitable[dict[str, Any]]]] = {
    Op.FETCH: _fetch,
    Op.MATCH_CLUSTER: _match_cluster,
    Op.CLUSTER_COPY: _copy,
    Op.CLUSTER_CANCEL: _cancel,
    Op.CLUSTER_DRAIN: _drain,
    Op.CLUSTER_MOVE: _move,
}
