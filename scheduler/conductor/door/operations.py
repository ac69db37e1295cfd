"""What can be asked of a Conductor over HTTP: one entry for each method and path.

Responsibility: bodies and answers as types, and what each operation does with the Conductor. The document at
`/openapi.json` is made of the same entries (`scheduler.conductor.door.openapi`).

Invariants: an operation is bounded by the size of its body and the counts in it. Its function does no I/O.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from kvfs.errors import LimitExceeded, NotFound
from kvfs.limits import (
    MAX_CONDUCTOR_BODY_BYTES,
    MAX_NAME_BYTES,
    MAX_ROUTE_BATCH,
    MAX_ROUTE_TOKENS,
    MAX_SMALL_BODY_BYTES,
)
from kvfs.protocol.copy_orders import NodeOrders
from kvfs.watch.panels import Panel, Snapshot
from kvfs.watch.window import Window
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.door.conductor_panels import conductor_snapshot, decision_panel
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.sources import StreamName
from scheduler.conductor.values import NOTHING_SAID, Instance, Refused, Routed, RouteRequest, Usage


class Follows(Protocol):
    """Follow the streams of instances (`feeds.listener`)."""

    def follow(self, instance: Instance) -> None:
        """Follow the streams of an instance."""

    def sync(self) -> None:
        """Follow no stream that is of no instance."""
        ...

    def key_of(self, name: StreamName, hash: int) -> bytes | None:
        """Return the key of a block that an engine announced under a hash, by its last 64 bits."""
        ...


class RouteBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask where several prompts go."""

    requests: Annotated[list[RouteRequest], msgspec.Meta(extra_json_schema={"maxItems": MAX_ROUTE_BATCH})]


class BatchAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the two."""

    routed: Routed | None = None
    refused: Refused | None = None


class RoutedBatch(msgspec.Struct, frozen=True):
    """Answer a RouteBatch."""

    answers: list[BatchAnswer]
    """In the order of the requests."""


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say whether an instance is to take no more requests."""

    draining: bool = True


class Heard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say what a proxy sees."""

    instances: list[str] = []
    """Those of whose answers bytes came."""
    waiting: list[str] = []
    """Ids of answers that deferred a request which waits on."""


class RoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say which label an instance is to have."""

    role: Role


class Matches(msgspec.Struct, frozen=True):
    """Tokens of the prompt that each instance holds, from the first on."""

    instances: dict[str, int]


class ErrorBody(msgspec.Struct, frozen=True):
    """Say what went wrong: a code, and a sentence for people."""

    code: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Answer a request that failed."""

    error: ErrorBody


class Reply(msgspec.Struct, frozen=True):
    """A status and its JSON value; no value: no body."""

    status: int
    value: Any = None
    retry_after_s: float | None = None


class Context(NamedTuple):
    """What operations work on."""

    conductor: Conductor
    follows: Follows


Function = Callable[[Context, str, Any], Reply]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path; `{}` in the path is the argument."""

    name: str
    method: str
    path: str
    text: str
    run: Function
    body: Any = None
    answer: Any = None
    statuses: tuple[int, ...] = (200,)
    max_body_bytes: int = MAX_SMALL_BODY_BYTES
    optional_body: bool = False
    packs: bool = False
    """Whether body and answer may be MessagePack."""


def _route(context: Context, _: str, body: RouteRequest) -> Reply:
    return _answered(context.conductor.route(body))


def _answered(found: Routed | Refused) -> Reply:
    if isinstance(found, Refused):
        return Reply(429, found, found.retry_after_s)
    return Reply(200, found)


def check_batch(body: RouteBatch) -> None:
    """Raise LimitExceeded for too many prompts."""
    if len(body.requests) > MAX_ROUTE_BATCH:
        raise LimitExceeded(f"requests: {len(body.requests)} prompts, the limit is {MAX_ROUTE_BATCH}")


def _match(context: Context, _: str, body: RouteRequest) -> Reply:
    return Reply(200, Matches(context.conductor.match(body)))


def _live(context: Context, id: str) -> None:
    if not context.conductor.is_live(id):
        raise NotFound(f"reservation {id[:MAX_NAME_BYTES]!r}: over, or of another process")


def _prefilled(context: Context, id: str, _: object) -> Reply:
    _live(context, id)
    context.conductor.prefilled(id)
    return Reply(204)


def _prefill_failed(context: Context, id: str, _: object) -> Reply:
    _live(context, id)
    context.conductor.prefill_failed(id)
    return Reply(204)


def _first_token(context: Context, id: str, _: object) -> Reply:
    _live(context, id)
    context.conductor.first_token(id)
    return Reply(204)


def _done(context: Context, id: str, body: Usage | None) -> Reply:
    _live(context, id)
    usage = body or NOTHING_SAID
    for name in ("cached_tokens", "output_tokens"):
        if not 0 <= (getattr(usage, name) or 0) <= MAX_ROUTE_TOKENS:
            raise LimitExceeded(f"{name} is {getattr(usage, name)}: must be from 0 to {MAX_ROUTE_TOKENS}")
    context.conductor.done(id, usage)
    return Reply(204)


def _cancel(context: Context, id: str, _: object) -> Reply:
    if not context.conductor.waits(id):
        _live(context, id)
    context.conductor.cancel(id)
    return Reply(204)


def _explain(context: Context, id: str, _: object) -> Reply:
    return Reply(200, context.conductor.explain(id))


def _panels(context: Context, _: str, __: object) -> Reply:
    return Reply(200, conductor_snapshot(context.conductor, Window()))


def _decisions(context: Context, _: str, __: object) -> Reply:
    return Reply(200, decision_panel(context.conductor))


def _orders(context: Context, topic: str, _: object) -> Reply:
    copies = context.conductor.copies
    if copies is None:
        raise NotFound("this Conductor orders no copies: [conductor] copies is false")
    return Reply(200, copies.for_store(topic))


def _status(context: Context, _: str, __: object) -> Reply:
    return Reply(200, context.conductor.status())


def _add(context: Context, _: str, body: Instance) -> Reply:
    context.conductor.registry.add(body)
    context.follows.follow(body)
    return Reply(201, body)


def _remove(context: Context, name: str, _: object) -> Reply:
    context.conductor.remove(name)
    context.follows.sync()
    return Reply(204)


def _drain(context: Context, name: str, body: DrainRequest | None) -> Reply:
    context.conductor.registry.drain(name, draining=body is None or body.draining)
    return Reply(204)


def _role(context: Context, name: str, body: RoleRequest) -> Reply:
    context.conductor.registry.set_role(name, body.role)
    return Reply(204)


def _unreachable(context: Context, name: str, _: object) -> Reply:
    context.conductor.registry.member(name)
    context.conductor.unreachable(name)
    return Reply(204)


def _heard(context: Context, _: str, body: Heard) -> Reply:
    context.conductor.heard(body.instances, body.waiting)
    return Reply(204)


def _never(*_: object) -> Reply:
    raise AssertionError("a batch is run prompt by prompt")


_PROMPTS = MAX_CONDUCTOR_BODY_BYTES
ROUTE_BATCH = Operation(
    "route_batch",
    "POST",
    "/v1/route_batch",
    "Choose instances for several prompts, one after the other.",
    _never,
    RouteBatch,
    RoutedBatch,
    (200, 404),
    _PROMPTS,
)
OPERATIONS = (
    Operation(
        "route",
        "POST",
        "/v1/route",
        "Choose instances for a prompt, and reserve them; 429 says why not, when to retry, and whether to wait.",
        _route,
        RouteRequest,
        Routed,
        (200, 404, 429),
        _PROMPTS,
    ),
    ROUTE_BATCH,
    Operation(
        "match",
        "POST",
        "/v1/match",
        "Say how much of a prompt each instance holds.",
        _match,
        RouteRequest,
        Matches,
        (200, 404),
        _PROMPTS,
    ),
    Operation(
        "prefilled",
        "POST",
        "/v1/reservations/{}/prefilled",
        "Report the end of the prefill.",
        _prefilled,
        statuses=(204, 404),
    ),
    Operation(
        "prefill_failed",
        "POST",
        "/v1/reservations/{}/prefill_failed",
        "Report that the prefill leg failed or is left out.",
        _prefill_failed,
        statuses=(204, 404),
    ),
    Operation(
        "first_token",
        "POST",
        "/v1/reservations/{}/first_token",
        "Report the first token.",
        _first_token,
        statuses=(204, 404),
    ),
    Operation(
        "done",
        "POST",
        "/v1/reservations/{}/done",
        "End a request, with what the engine's usage says.",
        _done,
        Usage,
        statuses=(204, 404),
        optional_body=True,
    ),
    Operation(
        "cancel",
        "DELETE",
        "/v1/reservations/{}",
        "End a request whose client left, or that failed.",
        _cancel,
        statuses=(204, 404),
    ),
    Operation(
        "explain",
        "GET",
        "/v1/explain/{}",
        "Say why a request went where it went.",
        _explain,
        answer=dict[str, Any],
        statuses=(200, 404),
    ),
    Operation(
        "panels",
        "GET",
        "/v1/panels",
        "Show figures and tables of what runs, since the start.",
        _panels,
        answer=Snapshot,
    ),
    Operation(
        "decisions",
        "GET",
        "/v1/decisions",
        "Show the last decisions and what became of them.",
        _decisions,
        answer=Panel,
    ),
    Operation(
        "orders",
        "GET",
        "/v1/orders/{}",
        "Show what the store of this topic is to fetch from its peers, and which copies are to go.",
        _orders,
        answer=NodeOrders,
        statuses=(200, 404),
    ),
    Operation(
        "status",
        "GET",
        "/v1/instances",
        "Show instances, streams of events and counters.",
        _status,
        answer=dict[str, Any],
    ),
    Operation(
        "add_instance",
        "POST",
        "/v1/instances",
        "Register an instance.",
        _add,
        Instance,
        Instance,
        (201, 409),
    ),
    Operation(
        "remove_instance",
        "DELETE",
        "/v1/instances/{}",
        "Remove an instance; its requests end.",
        _remove,
        statuses=(204, 404),
    ),
    Operation(
        "drain_instance",
        "POST",
        "/v1/instances/{}/drain",
        "Give an instance no more requests, or some again.",
        _drain,
        DrainRequest,
        statuses=(204, 404),
        optional_body=True,
    ),
    Operation(
        "set_role",
        "POST",
        "/v1/instances/{}/role",
        "Change what an instance is for; its cache is kept.",
        _role,
        RoleRequest,
        statuses=(204, 404),
    ),
    Operation(
        "unreachable",
        "POST",
        "/v1/instances/{}/unreachable",
        "Pass an instance over until it answers again.",
        _unreachable,
        statuses=(204, 404),
    ),
    Operation(
        "heard",
        "POST",
        "/v1/heard",
        "Say of which instances bytes came, so that one that is late at /health is not out, and who waits.",
        _heard,
        Heard,
        None,
        (204,),
        _PROMPTS,
    ),
)
