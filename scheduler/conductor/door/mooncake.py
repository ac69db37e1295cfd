"""The paths of Mooncake's Conductor indexer, for tools that speak to it: `/register`, `/query`, `/services`, ...

Responsibility: publishers that bind their endpoint become instances that are asked about and sent nothing, one for each
data-parallel rank; how much of a prompt each instance holds, by medium and rank; and who is registered. Bodies are JSON
or MessagePack, as `Content-Type` says; answers are as their questions.

Invariants: a tenant's instances are in pools of their own. What is asked with an adapter or a salt is held by nobody,
since events of such blocks are not indexed.

Concurrency: one thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvfs.errors import InvalidRequest, LimitExceeded, NotFound, NotReady
from kvfs.events.kv_events import CPU, GPU
from kvfs.keys import HASH_BYTES
from kvfs.limits import MAX_CONDUCTOR_BODY_BYTES, MAX_NAME_BYTES, MAX_ROUTE_HASHES
from kvfs.namespaces import Namespace
from scheduler.conductor.door.mooncake_bodies import (
    DEFAULT_TENANT,
    READ_TYPES,
    Asked,
    GlobalView,
    HashQuery,
    ModelContext,
    Query,
    Registered,
    Registration,
    Service,
    Services,
    Unregistered,
    Unregistration,
)
from scheduler.conductor.door.operations import OPERATIONS, Context, Operation, Reply
from scheduler.conductor.pool import Member, Pool
from scheduler.conductor.values import Instance, RouteRequest

_NO_BLOCK: Final = bytes(HASH_BYTES)


class _Identity(NamedTuple):
    """What somebody who asks knows a member by."""

    instance_id: str
    tenant_id: str
    dp_rank: str


def _name(body: Registration | Unregistration) -> str:
    return f"{body.instance_id}|{body.tenant_id or DEFAULT_TENANT}|{body.dp_rank}"


def _model(model: str, tenant: str) -> str:
    return model if tenant in ("", DEFAULT_TENANT) else f"{tenant}/{model}"


# --- registrations ---------------------------------------------------------------------------------------
def _register(context: Context, _: str, body: Registration) -> Reply:
    registry, model = context.conductor.registry, _model(body.modelname, body.tenant_id)
    if body.dp_rank < 0:
        raise InvalidRequest(
            f"instance {body.instance_id!r}: dp_rank is {body.dp_rank}: must be a number from 0 on"
        )
    engine_type = READ_TYPES.get(body.type.lower())
    if engine_type is None:
        raise InvalidRequest(
            f"instance {body.instance_id!r}: type is {body.type[:MAX_NAME_BYTES]!r}: "
            f"events are read of {' and '.join(READ_TYPES.values())}"
        )
    try:
        pool = registry.pool(model)
    except (NotFound, NotReady):
        namespace, weights = _namespace(model, body.block_size), ""
    else:
        namespace, weights = pool.namespace.as_mapping(), pool.weights
        _check_block_size(pool, body.block_size)
    instance = Instance(
        name=_name(body),
        url="",
        model=model,
        namespace=namespace,
        weights=weights,
        engine_type=engine_type,
        engine_topic=_name(body),
        engine_endpoint=body.endpoint,
        engine_replay=body.replay_endpoint,
        routable=False,
    )
    registry.add(instance)
    context.follows.follow(instance)
    return Reply(200, Registered("registered successfully", body.instance_id))


def _namespace(model: str, block_tokens: int) -> dict[str, Any]:
    """Return a namespace for a pool that nobody but these publishers is in: all but the size of blocks is alike."""
    return Namespace.of_one_device(
        model=model,
        revision="any",
        dtype="bfloat16",
        layout="LKTHD",
        block_tokens=block_tokens,
    ).as_mapping()


def _check_block_size(pool: Pool, block_size: int) -> None:
    if pool.namespace.block_tokens != block_size:
        raise InvalidRequest(
            f"block_size is {block_size} tokens, but {pool.namespace.block_tokens} in the pool of {pool.model!r}"
        )


def _unregister(context: Context, _: str, body: Unregistration) -> Reply:
    name = _name(body)
    context.conductor.remove(name)
    context.follows.sync()
    return Reply(200, Unregistered("unregistered successfully", [name]))


# --- questions -------------------------------------------------------------------------------------------
def _query(context: Context, _: str, body: Query) -> Reply:
    tokens = body.token_ids
    if isinstance(tokens, bytes):
        if len(tokens) % 4:
            raise InvalidRequest(f"token_ids: {len(tokens)} bytes are not whole tokens of 4")
        tokens = list(struct.unpack(f"<{len(tokens) // 4}I", tokens))
    pool = _pool(context, body)
    hashes = pool.question(RouteRequest(model=pool.model, tokens=tokens))[0]
    if body.is_salted:
        hashes = b""
    return _answered(
        body, pool, [(member, _depths(context, pool, member, hashes)) for member in _members(body, pool)]
    )


def _query_by_hash(context: Context, _: str, body: HashQuery) -> Reply:
    asked = body.seq_hashes if body.seq_hashes is not None else body.block_hash
    if asked is None:
        raise InvalidRequest("seq_hashes: the hashes of the prompt's blocks are wanted")
    if len(asked) > MAX_ROUTE_HASHES:
        raise LimitExceeded(f"seq_hashes: {len(asked)}, the limit is {MAX_ROUTE_HASHES}")
    pool, found = _pool(context, body), []
    for member in _members(body, pool):
        hashes = b"".join(_keys(context, pool, member, [] if body.is_salted else asked))
        found.append((member, _depths(context, pool, member, hashes)))
    return _answered(body, pool, found)


def _pool(context: Context, body: Asked) -> Pool:
    pool = context.conductor.registry.pool(_model(body.model, body.tenant_id))
    _check_block_size(pool, body.block_size)
    return pool


def _members(body: Asked, pool: Pool) -> list[Member]:
    return [
        member
        for member in pool.members.values()
        if body.instance_id in (None, "", _identity(member).instance_id)
    ]


def _identity(member: Member) -> _Identity:
    parts = member.instance.name.rsplit("|", 2)
    if member.instance.routable or len(parts) < 3 or not parts[2].isdecimal():
        known = member.instance
        rank = known.engine_rank if known.data_parallel_rank is None else known.data_parallel_rank
        return _Identity(known.name, DEFAULT_TENANT, str(rank))
    return _Identity(*parts)


def _keys(context: Context, pool: Pool, member: Member, hashes: list[int]) -> Iterator[bytes]:
    """Find the keys of the first blocks that an engine announced; without full attention some of them may be gone."""
    for hash in hashes:
        keys = (context.follows.key_of(stream.name, hash) for stream in member.streams)
        key = next((key for key in keys if key is not None), None)
        if key is None and pool.has_full:
            return
        yield key or _NO_BLOCK


def _depths(context: Context, pool: Pool, member: Member, hashes: bytes) -> dict[str, int]:
    """Return how many tokens an instance holds, in all and on each tier."""
    masks = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0}
    for medium, mask in pool.masks_by_medium(member).items():
        masks["longest_matched"] |= mask
        masks[_tier(medium)] |= mask
    depths = context.conductor.depths(hashes, list(masks.values()))
    return {tier: depth * pool.namespace.block_tokens for tier, depth in zip(masks, depths, strict=True)}


def _tier(medium: str) -> str:
    return "GPU" if medium == GPU else "CPU" if medium.startswith(CPU) else "DISK"


def _answered(body: Asked, pool: Pool, found: list[tuple[Member, dict[str, int]]]) -> Reply:
    """Answer by tenant, as Mooncake's page says, and under `instances`, where its proxy looks."""
    instances: dict[str, dict[str, Any]] = {}
    for member, depths in found:
        instance_id, _, rank = _identity(member)
        shown = instances.setdefault(instance_id, {**dict.fromkeys(depths, 0), "DP": {}})
        for tier, tokens in depths.items():
            shown[tier] = max(shown[tier], tokens)
        shown["DP"][rank] = depths["longest_matched"]
    return Reply(200, {body.tenant_id or DEFAULT_TENANT: instances, "instances": instances})


# --- who is registered -----------------------------------------------------------------------------------
def _services(context: Context, _: str, __: object) -> Reply:
    found = [
        _service(pool, member)
        for pool, member in context.conductor.registry.members()
        if member.instance.engine_topic
    ]
    return Reply(200, Services(len(found), found))


def _service(pool: Pool, member: Member) -> Service:
    instance_id, tenant, rank = _identity(member)
    return Service(
        endpoint=member.instance.engine_endpoint,
        replay_endpoint=member.instance.engine_replay,
        type=member.instance.engine_type,
        model_name=_own_model(pool.model, tenant),
        tenant_id=tenant,
        instance_id=instance_id,
        block_size=pool.namespace.block_tokens,
        dp_rank=int(rank),
    )


def _global_view(context: Context, _: str, __: object) -> Reply:
    found = [_context_of(context, pool) for pool in context.conductor.registry.pools()]
    return Reply(200, GlobalView(len(found), found))


def _context_of(context: Context, pool: Pool) -> ModelContext:
    identities = [_identity(member) for member in pool.members.values()]
    instances: dict[str, list[int]] = {}
    for instance_id, _, rank in identities:
        instances.setdefault(instance_id, []).append(int(rank))
    streams = [stream for member in pool.members.values() for stream in member.streams]
    sources = {source for stream in streams for source in stream.block_sources(pool.cache_model)}
    tenant = identities[0].tenant_id  # a pool has a member, and each tenant has pools of its own
    return ModelContext(
        model_name=_own_model(pool.model, tenant),
        block_size=pool.namespace.block_tokens,
        tenant_id=tenant,
        prefix_count=context.conductor.count_blocks(sources),
        instances={name: sorted(ranks) for name, ranks in instances.items()},
    )


def _own_model(model: str, tenant: str) -> str:
    """Return the model of a pool by the name that its tenant gave it."""
    return model if tenant == DEFAULT_TENANT else model.removeprefix(f"{tenant}/")


ALL_OPERATIONS = (
    *OPERATIONS,
    Operation(
        "mooncake_register",
        "POST",
        "/register",
        "Follow a publisher of KV events that binds its endpoint; nothing is routed to its instance.",
        _register,
        Registration,
        Registered,
        (200, 409),
        packs=True,
    ),
    Operation(
        "mooncake_unregister",
        "POST",
        "/unregister",
        "Follow a publisher no more.",
        _unregister,
        Unregistration,
        Unregistered,
        (200, 404),
        packs=True,
    ),
    Operation(
        "mooncake_query",
        "POST",
        "/query",
        "Say how many tokens of a prompt each instance holds, by tier and data-parallel rank.",
        _query,
        Query,
        dict[str, Any],
        (200, 404),
        MAX_CONDUCTOR_BODY_BYTES,
        packs=True,
    ),
    Operation(
        "mooncake_query_by_hash",
        "POST",
        "/query_by_hash",
        "The same, by the hashes that the engine announced the prompt's blocks under.",
        _query_by_hash,
        HashQuery,
        dict[str, Any],
        (200, 404),
        MAX_CONDUCTOR_BODY_BYTES,
        packs=True,
    ),
    Operation(
        "mooncake_services",
        "GET",
        "/services",
        "List the publishers of KV events that are followed.",
        _services,
        answer=Services,
    ),
    Operation(
        "mooncake_global_view",
        "GET",
        "/global_view",
        "List the models, their instances, and how many blocks were announced of each.",
        _global_view,
        answer=GlobalView,
    ),
)
