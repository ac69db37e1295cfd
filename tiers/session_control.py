"""The control operations of a session: names, buckets, namespaces, pins, eviction, status, shutdown.

Responsibility: one function per operation, from a JSON object of arguments to one of results, after the
rights were checked (`tiers.access`). Rights on the root, which holds the buckets, are `ROOT_MODE` of the
service's user and group: members of the group may make buckets.

Concurrency: the service's trio thread. An operation is one step; what awaits is the wait for a publication, before
anything is checked, and for the log, when everything is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvfs import limits, paths
from kvfs.codec import encode_object
from kvfs.errors import (
    AccessDenied,
    BucketNotFound,
    Busy,
    InvalidNamespace,
    InvalidRequest,
    KvfsError,
    LimitExceeded,
    NotPermitted,
)
from kvfs.keys import Namespace
from kvfs.messages import Control, Op, text
from kvfs.rights import READ, SEARCH, WRITE, allows
from tiers.model import Attributes, Bucket, Name
from tiers.session_arguments import Arguments, bucket_object, entry_object
from tiers.session_large import LARGE_OPERATIONS
from tiers.session_state import Session

ROOT_MODE = 0o775
NAMESPACE_BUCKET_MODE = 0o770
"""KV cache holds what users wrote in their prompts: not for everybody unless its owner says so."""
LIST_PAGE_BYTES = limits.MAX_FRAME_BYTES // 2
"""A page of a listing ends here, whatever its count: the answer must fit in one frame."""

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Service:
    """What control operations need of the service besides the store."""

    service_uid: int
    group_gid: int | None
    status: Callable[[], JsonObject]
    stop: Callable[[], None]


async def serve_control(service: Service, session: Session, request: Control) -> JsonObject:
    """The result of one control request. Raises KvfsError."""
    arguments = Arguments(request.op.name, request.arguments)
    creates = request.arguments.get("replace") is False
    for key in ("name", "source", "target") if creates else ("name", "source"):
        if isinstance(request.arguments.get(key), list):
            name = Arguments("", request.arguments).name(key)
            await session.store.wait_published(name, creates=creates and key != "source")
    if request.op is Op.REMOVE_NAMES:
        names = Arguments(request.op.name, request.arguments).names("names")[: limits.MAX_REMOVED_NAMES]
        result = _remove_names(session, arguments, await session.store.wait_all_published(names))
    elif request.op in LARGE_OPERATIONS:
        result = await LARGE_OPERATIONS[request.op](session, arguments)
    else:
        result = _OPERATIONS[request.op](service, session, arguments)
    if request.op not in _READ_ONLY:
        await session.store.journal.settle()
    return result


# --- names -----------------------------------------------------------------------------------------------
def _stat(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    name = arguments.name()
    arguments.done()
    session.access.need_path(name)
    return entry_object(name.key, session.store.lookup(name))


def _list(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    bucket, prefix = arguments.text("bucket"), arguments.text("prefix", "")
    after, delimiter = arguments.text("after", ""), arguments.text("delimiter", "")
    limit = arguments.integer("limit", limits.MAX_LIST_ENTRIES, most=limits.MAX_LIST_ENTRIES)
    arguments.done()
    if max(map(len, (prefix, after, delimiter))) > limits.MAX_KEY_BYTES or limit == 0:
        raise InvalidRequest(
            f"LIST: prefix, after, delimiter have {limits.MAX_KEY_BYTES} bytes at most; limit > 0"
        )
    where = session.access.need_bucket(bucket, READ | SEARCH)
    above = session.access.need_list(where, prefix)
    page = session.store.list(bucket, prefix=prefix, after=after, delimiter=delimiter or None, limit=limit)
    entries: list[JsonObject] = []
    size_bytes = 0
    for key, found in page.entries:
        if not session.access.may_list(where, key, above):
            continue
        entries.append(entry_object(key, found))
        size_bytes += len(encode_object(entries[-1]))
        if size_bytes > LIST_PAGE_BYTES:
            return {"entries": entries, "next_after": text(key)}
    return {"entries": entries, "next_after": None if page.next_after is None else text(page.next_after)}


def _remove(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    name, marker = arguments.name(), arguments.flag("marker", False)
    expected_id = arguments.optional_integer("expected_id")
    arguments.done()
    session.access.need_write_in(name)
    if marker:
        session.store.remove_marker(name)
    elif name.key.endswith(b"/"):
        session.store.remove_directory(name)
    else:
        session.store.remove(name, expected_id=expected_id)
    return {}


def _remove_names(session: Session, arguments: Arguments, busy: Mapping[Name, Busy]) -> JsonObject:
    names = arguments.names("names")
    expected_ids = arguments.optional_integers("expected_ids", len(names))
    arguments.done()
    if len(names) > limits.MAX_REMOVED_NAMES:
        raise InvalidRequest(f"REMOVE_NAMES: {len(names)} names, over {limits.MAX_REMOVED_NAMES}")
    statuses = []
    for name, expected_id in zip(names, expected_ids, strict=True):
        try:
            session.access.need_write_in(name)
            if name in busy:
                raise busy[name]
            if name.key.endswith(b"/"):
                session.store.remove_marker(name)
            else:
                session.store.remove(name, expected_id=expected_id)
        except KvfsError as error:
            statuses.append(error.errno)
        else:
            statuses.append(0)
    return {"statuses": statuses}


def _promise(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    slot, generation = arguments.integer("slot", 0), arguments.integer("generation", 0)
    size_bytes = arguments.integer("size_bytes", 0)
    arguments.done()
    session.store.promise(session.draft(slot, generation), size_bytes)
    return {}


def _rename(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    source, target = arguments.name("source"), arguments.name("target")
    replace = arguments.flag("replace", True)
    arguments.done()
    session.access.need_write_in(source)
    session.access.need_write_in(target)
    session.store.rename(source, target, replace=replace)
    return {}


def _mkdir(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    name, mode = arguments.name(), arguments.mode(0o755)
    marker = arguments.optional_bytes("marker", limits.MAX_USER_METADATA_BYTES)
    arguments.done()
    session.access.need_write_in(name)
    caller = session.caller
    attributes = Attributes(mode=mode, uid=caller.uid, gid=caller.gid, user_metadata=marker or b"")
    if marker is None:
        return entry_object(name.key, session.store.make_directory(name, attributes))
    return entry_object(name.key, session.store.put_marker(name, attributes))


def _set_attributes(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    name = arguments.name()
    mode = arguments.optional_integer("mode", most=0o1777)
    uid = arguments.optional_integer("uid", most=0xFFFF_FFFE)
    gid = arguments.optional_integer("gid", most=0xFFFF_FFFE)
    mtime_ns = arguments.optional_time_ns("mtime_ns")
    user_metadata = arguments.optional_bytes("user_metadata", limits.MAX_USER_METADATA_BYTES)
    expected_id = arguments.optional_integer("expected_id")
    arguments.done()
    found = session.store.lookup(name)
    session.access.need_control(name, found)
    _need_new_owner(session, uid, gid)
    changed = session.store.set_attributes(
        name,
        mode=mode,
        uid=uid,
        gid=gid,
        mtime_ns=mtime_ns,
        user_metadata=user_metadata,
        expected_id=expected_id,
    )
    return entry_object(name.key, changed)


def _need_new_owner(session: Session, uid: int | None, gid: int | None) -> None:
    """chown(2): only the privileged give things away; owners may choose among their own groups."""
    caller = session.caller
    if session.access.privileged:
        return
    if uid not in (None, caller.uid) or not (gid is None or gid == caller.gid or gid in caller.groups):
        raise NotPermitted(f"uid {caller.uid} may not give anything to uid {uid}, gid {gid}")


def _pin(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    name, pinned = arguments.name(), arguments.flag("pinned", True)
    expected_id = arguments.optional_integer("expected_id")
    arguments.done()
    session.access.need_control(name, session.store.lookup(name))
    changed = session.store.set_attributes(name, pinned=pinned, expected_id=expected_id)
    return entry_object(name.key, changed)


def _evict(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    if arguments.has("names"):
        names = arguments.names("names")
        arguments.done()
        for name in names:
            session.access.need_control(name, session.store.lookup(name))
        return {"freed_bytes": session.store.evict(names=names)}
    wanted = arguments.integer("bytes", 0)
    arguments.done()
    _need_privilege(session, "evict by policy")
    return {"freed_bytes": session.store.evict(wanted)}


# --- buckets and namespaces ------------------------------------------------------------------------------
def _bucket_create(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    name, mode, durable = arguments.text("bucket"), arguments.mode(0o755), arguments.flag("durable", False)
    admits_all, large = arguments.flag("admits_all", True), arguments.flag("large", False)
    uid, gid = arguments.optional_integer("uid"), arguments.optional_integer("gid")
    arguments.done()
    paths.check_bucket(name)
    _need_root(service, session)
    _need_new_owner(session, uid, gid)
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


def _bucket_list(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    after = arguments.text("after", "")
    arguments.done()
    found = sorted(
        (bucket for bucket in session.store.buckets() if bucket.name > after), key=lambda b: b.name
    )
    page = found[: limits.MAX_LIST_ENTRIES]
    return {
        "buckets": [bucket_object(bucket) for bucket in page],
        "next_after": text(page[-1].name) if len(found) > len(page) else None,
    }


def _bucket_remove(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    name = arguments.text("bucket")
    arguments.done()
    bucket = session.store.bucket(name)
    if not session.access.privileged and bucket.uid != session.caller.uid:
        raise NotPermitted(f"bucket {text(name)} belongs to uid {bucket.uid}")
    session.store.remove_bucket(name)
    return {}


def _open_namespace(service: Service, session: Session, arguments: Arguments) -> JsonObject:
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
    """The bucket of this name, bound to the namespace: found, bound now, or created."""
    caller, store = session.caller, session.store
    try:
        bucket = store.bucket(name)
    except BucketNotFound:
        if namespace is None:
            raise
        _need_root(service, session)
        member = service.group_gid is not None and (
            caller.gid == service.group_gid or service.group_gid in caller.groups
        )
        gid = service.group_gid if member and service.group_gid is not None else caller.gid
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


def _parse_namespace(description: JsonObject) -> Namespace:
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


# --- the service -----------------------------------------------------------------------------------------
def _status(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    arguments.done()
    held = session.store.dram.charged_bytes(session.caller.uid)
    return {
        **session.store.usage(),
        **service.status(),
        "caller": {"uid": session.caller.uid, "held_bytes": held},
    }


def _shutdown(service: Service, session: Session, arguments: Arguments) -> JsonObject:
    arguments.done()
    _need_privilege(session, "stop the service")
    service.stop()
    return {}


def _need_privilege(session: Session, what: str) -> None:
    if not session.access.privileged:
        raise NotPermitted(
            f"uid {session.caller.uid} may not {what}: only root and the service's own user may"
        )


def _need_root(service: Service, session: Session) -> None:
    gid = -1 if service.group_gid is None else service.group_gid
    allowed = allows(session.caller, mode=ROOT_MODE, uid=service.service_uid, gid=gid, want=WRITE | SEARCH)
    if not allowed and not session.access.privileged:
        raise AccessDenied(
            f"uid {session.caller.uid} may not create buckets: it is not in the service's group"
        )


_READ_ONLY = frozenset(
    (
        Op.STAT,
        Op.LIST,
        Op.BUCKET_LIST,
        Op.STATUS,
        Op.SHUTDOWN,
        Op.PROMISE,
        Op.LARGE_OPEN,
        Op.LARGE_READ,
        Op.LARGE_CLOSE,
    )
)
"""What changes nothing waits for nothing; all else is answered once what it promises is durable."""

_OPERATIONS: dict[Op, Callable[[Service, Session, Arguments], JsonObject]] = {
    Op.STAT: _stat,
    Op.LIST: _list,
    Op.REMOVE: _remove,
    Op.RENAME: _rename,
    Op.MKDIR: _mkdir,
    Op.BUCKET_CREATE: _bucket_create,
    Op.BUCKET_LIST: _bucket_list,
    Op.BUCKET_REMOVE: _bucket_remove,
    Op.OPEN_NAMESPACE: _open_namespace,
    Op.PIN: _pin,
    Op.PROMISE: _promise,
    Op.EVICT: _evict,
    Op.SET_ATTRIBUTES: _set_attributes,
    Op.STATUS: _status,
    Op.SHUTDOWN: _shutdown,
}
