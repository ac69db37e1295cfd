"""Objects larger than DRAM takes, over a session: written and read in pieces that a draft of the session carries.

Responsibility: the operations LARGE_*. A session has one large object at a time: one that it writes, in order, or one
that it reads anywhere. Bytes do not cross the socket: a piece is what a draft's slot holds, filled by the client before
LARGE_APPEND, by the service in LARGE_READ, which truncates the slot first, so that bytes still on their way out of a
`sendfile` stay as they were.

Invariants: the object is the session's lease, or its draft, and ends with it. LARGE_APPEND is answered once the slot
was read, so the client may truncate it and fill it again.

Concurrency: the service's trio thread, one request of a session at a time; they wait for the device.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from kvfs import limits
from kvfs.errors import InvalidRequest, IsDirectory, IsLink
from kvfs.protocol.messages import Op
from kvfs.rights import READ, SEARCH, WRITE
from tiers.model.objects import Attributes, Directory
from tiers.nvme.large_draft import LargeDraft
from tiers.nvme.large_objects import LargeReader
from tiers.sessions.arguments import Arguments, entry_object
from tiers.sessions.state import Session

_PIECE_BYTES = limits.MIB
"""Read from a slot at once, for the extents' buffers."""


async def _create(session: Session, arguments: Arguments) -> dict[str, Any]:
    bucket = arguments.text("bucket")
    arguments.done()
    _need_idle(session)
    session.access.need_bucket(bucket, WRITE | SEARCH)
    session.large = session.store.begin_large(bucket, uid=session.caller.uid)
    return {}


async def _append(session: Session, arguments: Arguments) -> dict[str, Any]:
    slot, generation = arguments.integer("slot", 0), arguments.integer("generation", 0)
    arguments.done()
    target = _draft(session)
    descriptor = session.store.open_draft(session.draft(slot, generation))
    try:
        at = 0
        while data := os.pread(descriptor, _PIECE_BYTES, at):
            at += await target.write(target.size_bytes, data)
    finally:
        os.close(descriptor)
    return {"size_bytes": target.size_bytes}


async def _seal(session: Session, arguments: Arguments) -> dict[str, Any]:
    name, mode = arguments.name(), arguments.mode(0o644)
    replace, expected_id = arguments.flag("replace", True), arguments.optional_integer("expected_id")
    mtime_ns, needs = arguments.optional_integer("mtime_ns"), arguments.optional_name("needs")
    user_metadata = arguments.optional_bytes("user_metadata", limits.MAX_USER_METADATA_BYTES)
    arguments.done()
    draft, caller = _draft(session), session.caller
    session.access.need_write_in(name)
    attributes = Attributes(
        mode=mode, uid=caller.uid, gid=caller.gid, mtime_ns=mtime_ns, user_metadata=user_metadata or b""
    )
    await draft.flush()
    if needs is not None:
        session.need_marker(needs)
    info = session.store.seal_large(draft, name, attributes, replace=replace, expected_id=expected_id)
    session.release_large()
    return entry_object(name.key, info)


async def _open(session: Session, arguments: Arguments) -> dict[str, Any]:
    name = arguments.name()
    arguments.done()
    _need_idle(session)
    session.access.need_path(name)
    info = session.store.lookup(name)
    if isinstance(info, Directory):
        raise IsDirectory(f"{name} is a directory")
    if info.target:
        raise IsLink(f"{name} is a symbolic link")
    session.access.need(info, READ, str(name))
    if not session.store.is_large(info):
        raise InvalidRequest(f"{name} is not larger than DRAM takes: OPEN_NAMED opens it")
    session.large = session.store.open_large(info)
    return entry_object(name.key, info)


async def _read(session: Session, arguments: Arguments) -> dict[str, Any]:
    slot, generation = arguments.integer("slot", 0), arguments.integer("generation", 0)
    offset = arguments.integer("offset", 0)
    size_bytes = arguments.integer("size", 0, most=limits.MAX_LARGE_PIECE_BYTES)
    arguments.done()
    if not isinstance(session.large, LargeReader):
        raise InvalidRequest("LARGE_READ: no large object is open")
    descriptor = session.store.open_draft(session.draft(slot, generation))
    try:
        os.ftruncate(descriptor, 0)
        view, at = memoryview(await session.large.read(offset, size_bytes)), 0
        while at < len(view):
            at += os.pwrite(descriptor, view[at:], at)
    finally:
        os.close(descriptor)
    return {"size_bytes": len(view)}


async def _close(session: Session, arguments: Arguments) -> dict[str, Any]:
    arguments.done()
    session.release_large()
    return {}


def _need_idle(session: Session) -> None:
    if session.large is not None:
        raise InvalidRequest("a session has one large object at a time")


def _draft(session: Session) -> LargeDraft:
    if not isinstance(session.large, LargeDraft):
        raise InvalidRequest("no large object is being written")
    return session.large


LARGE_OPERATIONS: dict[Op, Callable[[Session, Arguments], Awaitable[dict[str, Any]]]] = {
    Op.LARGE_CREATE: _create,
    Op.LARGE_APPEND: _append,
    Op.LARGE_SEAL: _seal,
    Op.LARGE_OPEN: _open,
    Op.LARGE_READ: _read,
    Op.LARGE_CLOSE: _close,
}
