"""The control operations of a session, each with a JSON object of arguments.

Responsibility: find the operation, wait for what it depends on, and answer once its changes are durable. Operations
are in `tiers.sessions.name_operations`, `bucket_operations`, `cluster_operations` and
`large`, those on the service here.

Concurrency: the service's trio thread. An operation is one step; the waits are for a publication, before anything is
checked, and for the log, when everything is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvfs import limits
from kvfs.protocol.messages import Control, Op
from tiers.sessions.arguments import Arguments
from tiers.sessions.bucket_operations import BUCKET_OPERATIONS
from tiers.sessions.cluster_operations import CLUSTER_OPERATIONS
from tiers.sessions.large import LARGE_OPERATIONS
from tiers.sessions.name_operations import NAME_OPERATIONS, remove_names
from tiers.sessions.state import Service, Session


async def serve_control(service: Service, session: Session, request: Control) -> dict[str, Any]:
    """Serve one control request; return its result. Raises KvfsError."""
    arguments = Arguments(request.op.name, request.arguments)
    creates = request.arguments.get("replace", request.op is not Op.SYMLINK) is False
    for key in ("name", "source", "target") if creates else ("name", "source"):
        if isinstance(request.arguments.get(key), list):
            name = Arguments("", request.arguments).name(key)
            await session.store.wait_published(name, creates=creates and key != "source")
    if request.op is Op.REMOVE_NAMES:
        names = Arguments(request.op.name, request.arguments).names("names")[: limits.MAX_REMOVED_NAMES]
        result = remove_names(session, arguments, await session.store.wait_all_published(names))
    elif request.op in LARGE_OPERATIONS:
        result = await LARGE_OPERATIONS[request.op](session, arguments)
    elif request.op in CLUSTER_OPERATIONS:
        result = await CLUSTER_OPERATIONS[request.op](service, session, arguments)
    elif request.op in NAME_OPERATIONS:
        result = NAME_OPERATIONS[request.op](session, arguments)
    else:
        result = _OPERATIONS[request.op](service, session, arguments)
    if request.op not in _READ_ONLY:
        await session.store.journal.settle()
    return result


def _promise(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    slot, generation = arguments.integer("slot", 0), arguments.integer("generation", 0)
    size_bytes = arguments.integer("size_bytes", 0)
    arguments.done()
    session.store.promise(session.draft(slot, generation), size_bytes)
    return {}


def _status(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    arguments.done()
    held = session.store.dram.charged_bytes(session.caller.uid)
    return {
        **session.store.usage(),
        **service.status(),
        "caller": {"uid": session.caller.uid, "held_bytes": held},
    }


def _shutdown(service: Service, session: Session, arguments: Arguments) -> dict[str, Any]:
    arguments.done()
    session.access.need_privilege("stop the service")
    service.stop()
    return {}


_READ_ONLY = frozenset(
    (
        Op.STAT,
        Op.LIST,
        Op.BUCKET_LIST,
        Op.STATUS,
        Op.SHUTDOWN,
        Op.RESERVE_BYTES,
        Op.LARGE_OPEN,
        Op.LARGE_READ,
        Op.LARGE_CLOSE,
        *CLUSTER_OPERATIONS,
    )
)
"""Operations that change nothing but what is cached; others are answered once their changes are durable."""

_OPERATIONS: dict[Op, Callable[[Service, Session, Arguments], dict[str, Any]]] = {
    **BUCKET_OPERATIONS,
    Op.RESERVE_BYTES: _promise,
    Op.STATUS: _status,
    Op.SHUTDOWN: _shutdown,
}
