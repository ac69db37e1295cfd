"""The control operations on buckets, and on the namespaces that are bound to them.

Responsibility: one function per operation, after the rights were checked. Rights on the root, which holds the
buckets, are `ROOT_MODE` of the service's user and group: members of the group may make buckets.

Concurrency: the service's trio thread; nothing awaits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvfs import limits, paths
from kvfs.errors import (
    AccessDenied,
    BucketNotFound,
    InvalidNamespace,
    InvalidRequest,
    LimitExceeded,
    NotPermitted,
)
from kvfs.keys import Namespace
from kvfs.protocol.messages import Op, text
from kvfs.rights import SEARCH, WRITE, allows
from tiers.model.objects import Bound, Bucket
from tiers.sessions.arguments import Arguments, bucket_object
from tiers.sessions.state import Service, Session

ROOT_MODE = 0o775
NAMESPACE_BUCKET_MODE = 0o770
"""KV cache holds what users wrote in their prompts: not for everybody unless its owner says so."""


def _bucket_create(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    name, mode, durable = arguments.text("bucket"), arguments.mode(0o755), arguments.flag("durable", False)
    admits_all, large = arguments.flag("admits_all", True), arguments.flag("large", False)
    uid, gid = arguments.optional_integer("uid"), arguments.optional_integer("gid")
    arguments.done()
    paths.check_bucket(name)
    _need_root(service, session)
    session.access.need_new_owner(uid, gid)
    caller = session.caller
    made = session.store.create_bucket(
        name,
        uid=caller.uid if uid is None else uid,
        gid=caller.gid if gid is None else gid,
        mode=mode,
        durable=durable,
        admits_all=admits_all,
        large=large,
    )
    return bucket_object(made)


def _bucket_list(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    after = arguments.text("after", "")
    arguments.done()
    found = sorted(
        (bucket for bucket in session.store.buckets() if bucket.name > after), key=lambda b: b.name
    )
    page = found[: limits.MAX_LIST_ENTRIES]
    return {
        "buckets": [
            bucket_object(bucket) | _bound_object(session.store.bound(bucket.name)) for bucket in page
        ],
        "next_after": text(page[-1].name) if len(found) > len(page) else None,
    }


def _bound_object(bound: Bound | None) -> dict[str, Any]:
    if bound is None:
        return {}
    return {"model": bound.model, "blocks": bound.blocks, "block_bytes": bound.size_bytes}


def _bucket_remove(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    name = arguments.text("bucket")
    arguments.done()
    bucket = session.store.bucket(name)
    if not session.access.privileged and bucket.uid != session.caller.uid:
        raise NotPermitted(f"bucket {text(name)} belongs to uid {bucket.uid}")
    session.store.remove_bucket(name)
    return {}


def _open_namespace(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    if arguments.has("description"):
        namespace = _parse_namespace(arguments.object("description"))
        digest = namespace.digest
    else:
        namespace, digest = None, _parse_digest(arguments.text("digest"))
    bucket = arguments.text("bucket", f"kv-{digest.hex()[:12]}")
    arguments.done()
    bound = _bound_bucket(service, session, bucket, namespace, digest)
    session.access.need(bound, SEARCH, f"bucket {text(bucket)}")
    return {
        "handle": session.add_namespace(bound.name),
        "digest": digest.hex(),
        "bucket": bucket_object(bound),
    }


def _bound_bucket(
    service: Service, session: Session, name: bytes, namespace: Namespace | None, digest: bytes
) -> Bucket:
    """Return the bucket of this name, bound to the namespace: bound before, bound now, or created."""
    caller, store = session.caller, session.store
    try:
        bucket = store.bucket(name)
    except BucketNotFound:
        if namespace is None:
            raise
        _need_root(service, session)
        gid = caller.gid
        if service.group_gid is not None and service.is_member(caller):
            gid = service.group_gid
        return store.create_bucket(
            name, uid=caller.uid, gid=gid, mode=NAMESPACE_BUCKET_MODE, namespace=namespace
        )
    if bucket.namespace == digest:
        return bucket
    if namespace is None or bucket.namespace is not None:
        raise InvalidNamespace(f"bucket {text(name)} is not bound to namespace {digest.hex()}")
    if not session.access.privileged and bucket.uid != caller.uid:
        raise NotPermitted(
            f"bucket {text(name)} belongs to uid {bucket.uid}, who alone may bind it to a namespace"
        )
    return store.set_bucket(name, namespace=namespace)


def _parse_namespace(description: dict[str, Any]) -> Namespace:
    size_bytes = len(json.dumps(description))
    if size_bytes > limits.MAX_NAMESPACE_BYTES:
        raise LimitExceeded(f"namespace description of {size_bytes} bytes, over {limits.MAX_NAMESPACE_BYTES}")
    return Namespace.from_mapping(description)


def _parse_digest(value: bytes) -> bytes:
    try:
        digest = bytes.fromhex(value.decode())
    except ValueError:
        digest = b""
    if len(digest) != 16:
        raise InvalidRequest(f"OPEN_NAMESPACE: digest {text(value)[:64]!r} is not 32 hex digits")
    return digest


def _need_root(service: Service, session: Session) -> None:
    """Raise AccessDenied for who may not create buckets."""
    gid = -1 if service.group_gid is None else service.group_gid
    allowed = allows(session.caller, mode=ROOT_MODE, uid=service.service_uid, gid=gid, want=WRITE | SEARCH)
    if not allowed and not session.access.privileged:
        raise AccessDenied(
            f"uid {session.caller.uid} may not create buckets: it is not in the service's group"
        )


BUCKET_OPERATIONS: dict[Op, Callable[[Service, Session, Arguments], dict[str, Any]]] = {
    Op.BUCKET_CREATE: _bucket_create,
    Op.BUCKET_LIST: _bucket_list,
    Op.BUCKET_REMOVE: _bucket_remove,
    Op.OPEN_NAMESPACE: _open_namespace,
}
