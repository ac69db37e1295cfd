"""What Mooncake's Conductor indexer is asked and answers, in its names.

Invariants: fields that are not known are passed over: Mooncake's releases add some. Concurrency: none; values never
change.
"""

from __future__ import annotations

from typing import Annotated, Final, get_args

import msgspec

from scheduler.conductor.values import EngineType

DEFAULT_TENANT = "default"
READ_TYPES: Final[dict[str, EngineType]] = {each.lower(): each for each in get_args(EngineType)}
"""Publishers whose events are read, by their names in lower case; Mooncake's own store sends others."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher of KV events: one data-parallel rank of an instance."""

    endpoint: str
    """Where it publishes: tcp://HOST:PORT."""
    replay_endpoint: str = ""
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(READ_TYPES.values())})] = "vLLM"
    """One of READ_TYPES, in any case."""
    modelname: str
    instance_id: str
    block_size: int
    dp_rank: int
    tenant_id: str = DEFAULT_TENANT


class Registered(msgspec.Struct, frozen=True):
    """Say that a publisher is followed."""

    status: str
    instance_id: str


class Unregistration(msgspec.Struct, frozen=True, kw_only=True):
    """Name a publisher that is to be followed no more."""

    instance_id: str
    dp_rank: int
    tenant_id: str = DEFAULT_TENANT


class Unregistered(msgspec.Struct, frozen=True):
    """Say which instances are followed no more."""

    status: str
    removed_instances: list[str]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Say whose blocks are asked about."""

    model: str
    block_size: int
    tenant_id: str = DEFAULT_TENANT
    instance_id: str | None = None
    """The only one that is asked about."""
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None

    @property
    def is_salted(self) -> bool:
        """Return whether the blocks are of an adapter or a salt, which say more than their tokens."""
        return bool(self.lora_name or self.cache_salt) or self.lora_id is not None


class Query(Asked, frozen=True, kw_only=True):
    """Ask how much of a prompt's tokens instances hold."""

    token_ids: list[int] | bytes
    """Numbers, or 32 bits of each, the lowest byte first."""


class HashQuery(Asked, frozen=True, kw_only=True):
    """Ask how many blocks of these hashes instances hold."""

    seq_hashes: list[int] | None = None
    """The last 64 bits of the hashes that the engine announced its blocks under."""
    block_hash: list[int] | None = None
    """The name that earlier releases gave them."""


class Service(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "endpoint": "Endpoint",
        "replay_endpoint": "ReplayEndpoint",
        "type": "Type",
        "model_name": "ModelName",
        "lora_name": "LoraName",
        "tenant_id": "TenantID",
        "instance_id": "InstanceID",
        "block_size": "BlockSize",
        "dp_rank": "DPRank",
        "cache_group": "CacheGroup",
    },
):
    """One publisher that is followed, in the names of Mooncake's answer."""

    endpoint: str
    """Empty: it connects to the Conductor."""
    replay_endpoint: str
    type: EngineType
    model_name: str
    lora_name: str = ""
    tenant_id: str
    instance_id: str
    block_size: int
    dp_rank: int
    cache_group: int | None = None


class Services(msgspec.Struct, frozen=True):
    """List the publishers that are followed."""

    count: int
    services: list[Service]


class ModelContext(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, as Mooncake's answer names it."""

    model_name: str
    lora_name: str = ""
    block_size: int
    tenant_id: str
    prefix_count: int
    """Blocks that were announced: one of several instances or media counts once for each."""
    instances: dict[str, list[int]]
    """Their data-parallel ranks."""


class GlobalView(msgspec.Struct, frozen=True):
    """Count what is held for each model."""

    context_count: int
    contexts: list[ModelContext]
