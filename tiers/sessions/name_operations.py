"""The control operations on names: stat, list, remove, rename, directories, attributes, pins, eviction.

Responsibility: one function per operation, from a request's arguments to the answer's object, after the rights
were checked. Concurrency: the service's trio thread; nothing awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvfs import limits
from kvfs.errors import Busy, InvalidRequest, KvfsError
from kvfs.protocol.encode import encode_object
from kvfs.protocol.messages import Op, text
from kvfs.rights import READ, SEARCH
from tiers.model.objects import Attributes, Name
from tiers.sessions.answers import log_refusal
from tiers.sessions.arguments import Arguments, entry_object
from tiers.sessions.state import Session

LIST_PAGE_BYTES = limits.MAX_FRAME_BYTES // 2
"""A page of a listing ends here, whatever its count: the answer must fit in one frame."""


def _stat(session: Session, arguments: Arguments) -> dict[str, Any]:
    name = arguments.name()
    arguments.done()
    session.access.need_path(name)
    return entry_object(name.key, session.store.lookup(name))


def _list(session: Session, arguments: Arguments) -> dict[str, Any]:
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
    entries: list[dict[str, Any]] = []
    size_bytes = 0
    for key, found in page.entries:
        if not session.access.may_list(where, key, above):
            continue
        entries.append(entry_object(key, found))
        size_bytes += len(encode_object(entries[-1]))
        if size_bytes > LIST_PAGE_BYTES:
            return {"entries": entries, "next_after": text(key)}
    return {"entries": entries, "next_after": None if page.next_after is None else text(page.next_after)}


def _remove(session: Session, arguments: Arguments) -> dict[str, Any]:
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


def remove_names(session: Session, arguments: Arguments, busy: Mapping[Name, Busy]) -> dict[str, Any]:
    """Remove names one by one; the result has a status for each."""
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
            log_refusal(error)
            statuses.append(error.errno)
        else:
            statuses.append(0)
    return {"statuses": statuses}


def _rename(session: Session, arguments: Arguments) -> dict[str, Any]:
    source, target = arguments.name("source"), arguments.name("target")
    replace = arguments.flag("replace", True)
    arguments.done()
    session.access.need_write_in(source)
    session.access.need_write_in(target)
    session.store.rename(source, target, replace=replace)
    return {}


def _mkdir(session: Session, arguments: Arguments) -> dict[str, Any]:
    name, mode = arguments.name(), arguments.mode(0o755)
    marker = arguments.optional_bytes("marker", limits.MAX_USER_METADATA_BYTES)
    arguments.done()
    session.access.need_write_in(name)
    caller = session.caller
    attributes = Attributes(mode=mode, uid=caller.uid, gid=caller.gid, user_metadata=marker or b"")
    if marker is None:
        return entry_object(name.key, session.store.make_directory(name, attributes))
    return entry_object(name.key, session.store.put_marker(name, attributes))


def _symlink(session: Session, arguments: Arguments) -> dict[str, Any]:
    name, target = arguments.name(), arguments.text("target")
    replace = arguments.flag("replace", False)
    expected_id = arguments.optional_integer("expected_id")
    user_metadata = arguments.optional_bytes("user_metadata", limits.MAX_USER_METADATA_BYTES)
    arguments.done()
    session.access.need_write_in(name)
    caller = session.caller
    attributes = Attributes(uid=caller.uid, gid=caller.gid, user_metadata=user_metadata or b"")
    made = session.store.make_link(name, target, attributes, replace=replace, expected_id=expected_id)
    return entry_object(name.key, made)


def _set_attributes(session: Session, arguments: Arguments) -> dict[str, Any]:
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
    session.access.need_new_owner(uid, gid)
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


def _pin(session: Session, arguments: Arguments) -> dict[str, Any]:
    name, pinned = arguments.name(), arguments.flag("pinned", True)
    expected_id = arguments.optional_integer("expected_id")
    arguments.done()
    session.access.need_control(name, session.store.lookup(name))
    changed = session.store.set_attributes(name, pinned=pinned, expected_id=expected_id)
    return entry_object(name.key, changed)


def _evict(session: Session, arguments: Arguments) -> dict[str, Any]:
    if arguments.has("names"):
        names = arguments.names("names")
        arguments.done()
        for name in names:
            session.access.need_control(name, session.store.lookup(name))
        return {"freed_bytes": session.store.evict(names=names)}
    wanted = arguments.integer("bytes", 0)
    arguments.done()
    session.access.need_privilege("evict by policy")
    return {"freed_bytes": session.store.evict(wanted)}


NAME_OPERATIONS: dict[Op, Callable[[Session, Arguments], dict[str, Any]]] = {
    Op.STAT: _stat,
    Op.LIST: _list,
    Op.REMOVE: _remove,
    Op.RENAME: _rename,
    Op.MKDIR: _mkdir,
    Op.SYMLINK: _symlink,
    Op.PIN: _pin,
    Op.EVICT: _evict,
    Op.SET_ATTRIBUTES: _set_attributes,
}
