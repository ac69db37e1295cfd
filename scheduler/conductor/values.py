"""Values of the Conductor's interface: what is asked, what is answered, what an instance is.

Responsibility: the same values for callers in the process (`Router`) and for JSON bodies. A refusal is an answer,
not an error: errors are for malformed questions.

Concurrency: none; values never change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from kvfs.errors import NotFound, NotReady
from kvfs.limits import (
    MAX_BLOCK_TOKENS,
    MAX_ENGINE_GROUPS,
    MAX_ENGINE_STREAMS,
    MAX_EXCLUDED,
    MAX_NAME_BYTES,
    MAX_NAMED_ENGINES,
    MAX_ROUTE_HASHES,
    MAX_ROUTE_TOKENS,
    MAX_URL_BYTES,
    MAX_WINDOW_TOKENS,
)
from kvfs.namespace_groups import FULL_KINDS
from scheduler.conductor.planning.planner import Role


def _shown(**limits: int | str) -> msgspec.Meta:
    """Make what the OpenAPI document says of a field; whoever reads the field checks it, with an error of its own."""
    return msgspec.Meta(extra_json_schema=limits)


Label = Annotated[str, _shown(maxLength=MAX_NAME_BYTES)]
Name = Annotated[str, _shown(minLength=1, maxLength=MAX_NAME_BYTES)]
Url = Annotated[str, _shown(maxLength=MAX_URL_BYTES)]
Token = Annotated[int, _shown(minimum=0, maximum=(1 << 32) - 1)]
Hash = Annotated[str, _shown(pattern="^[0-9a-fA-F]{32}$")]
Count = Annotated[int, _shown(minimum=0, maximum=MAX_ROUTE_TOKENS)]
Seconds = Annotated[float, _shown(minimum=0)]


EngineType = Literal["vLLM", "SGLang"]
"""Engines whose KV events are read, by their names in Mooncake's indexer."""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Layers of an engine that share blocks of their own, where its layers have several caches."""

    group: Annotated[int, _shown(minimum=0, maximum=MAX_ENGINE_GROUPS - 1)]
    """The engine's number of it, which its own KV events have as `group_idx`."""
    kind: Label
    """vLLM's KVCacheSpecKind: `full_attention`, `mla_attention`, `sliding_window`, `chunked_local_attention`, `mamba`;
    layers of another one are not followed."""
    block_tokens: Annotated[int, _shown(minimum=1, maximum=MAX_BLOCK_TOKENS)]
    layers: Label = ""
    """Which layers it has: `group_layers` of its namespace's `extra`."""
    window_tokens: Annotated[int, _shown(minimum=1, maximum=MAX_WINDOW_TOKENS)] | None = None
    chunk_tokens: Annotated[int, _shown(minimum=1, maximum=MAX_WINDOW_TOKENS)] | None = None


def first_full(groups: Iterable[CacheGroup]) -> CacheGroup | None:
    """Return the group of full attention by whose keys prompts are looked up; None without such layers."""
    return next((each for each in groups if each.kind in FULL_KINDS), None)


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One engine, as it is registered."""

    name: Name
    url: Annotated[str, _shown(maxLength=MAX_URL_BYTES, pattern="^https?://")]
    """Where its OpenAI server answers; `/health` and `/metrics` are asked for there."""
    model: Name
    """The name that clients ask for: all instances of one model form a pool."""
    namespace: dict[str, Any]
    """The fields of `kvfs.Namespace` of tensor and pipeline rank 0: all instances of a pool have the same."""
    groups: Annotated[tuple[CacheGroup, ...], _shown(maxItems=MAX_ENGINE_GROUPS)] = ()
    """All its cache groups, where its layers have several caches; of a pipeline those of the stage that `namespace` is
    of. Without them its KV events and those of its store say what they can."""
    weights: Label = ""
    """The identity of the weights, which the connector hashes with the first block of a prompt."""
    role: Role = "both"
    engine_type: EngineType = "vLLM"
    engine_topic: Label = ""
    """The topic of the engine's own KV events; empty: it publishes none."""
    engine_rank: Annotated[int, _shown(minimum=0, maximum=MAX_ENGINE_STREAMS - 1)] = 0
    """The data-parallel rank in those events."""
    engine_endpoint: Url = ""
    """Where the engine publishes, if it binds; else it connects to the Conductor, with `engine_topic`."""
    engine_replay: Url = ""
    """Where the engine answers requests for replays."""
    store_topic: Label = ""
    """The topic of the kvfs service on its node; empty: there is none."""
    store_replay: Url = ""
    store_peer: Label = ""
    """`HOST:PORT` where other nodes read its blocks (`[cluster] listen`); empty: they do not."""
    routable: bool = True
    """Whether requests are sent to it; else it is only asked about, and needs no `url`."""
    data_parallel_rank: Annotated[int, _shown(minimum=0, maximum=MAX_ENGINE_STREAMS - 1)] | None = None
    """The rank behind `url` that it is, of several: requests go to it by `X-Data-Parallel-Rank`. None: it is all there
    is behind `url`."""

    @property
    def server(self) -> str:
        """Return what tells servers apart that are asked for health and metrics: data-parallel ranks share one."""
        return self.name if self.data_parallel_rank is None else self.url


def peer_between(holder: Instance, reader: Instance) -> str:
    """Return where the node of `reader` reads the blocks of another node's store; empty where there is none."""
    shares = reader.store_topic == holder.store_topic != "" or reader.store_peer == holder.store_peer
    return "" if shares else holder.store_peer


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A prompt that is to be routed: by its `tokens`, or by the `hashes` of its whole blocks and its `length`."""

    model: str
    tokens: Annotated[Sequence[Token], _shown(minItems=1, maxItems=MAX_ROUTE_TOKENS)] | None = None
    hashes: Annotated[list[Hash], _shown(maxItems=MAX_ROUTE_HASHES)] | None = None
    """Prefix hashes in hexadecimal; of prompts whose keys depend on more than tokens (adapters, images, salts)."""
    length: Annotated[int, _shown(minimum=1, maximum=MAX_ROUTE_TOKENS)] | None = None
    """Tokens of the prompt, with `hashes`; without either its blocks are taken as unknown to everybody."""
    waited_s: Seconds = 0.0
    """How long the request has waited before it was asked for."""
    ttft_slo_s: Seconds | None = None
    tbt_slo_s: Seconds | None = None
    """Limits; None: the configuration's."""
    output_tokens: Count | None = None
    """The most tokens of the answer, where the client says so."""
    streamed: bool = True
    """Whether its first token will be reported; of an answer that comes whole nobody sees it."""
    exclude: Annotated[list[str], _shown(maxItems=MAX_EXCLUDED)] = []
    """Instances that must not be chosen, such as those that failed the request already."""
    deferred_id: str = ""
    """The `id` of the answer that deferred the request before."""
    both_legs: bool = False
    """Whether an instance labelled for one side can do nothing alone, as SGLang's engines: short prompts have both legs
    too."""


class Range(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A range of blocks, and how the prefill instance gets it."""

    first_block: int
    blocks: int
    action: Literal["use", "load", "recompute"]
    source: str = ""
    """The topic and medium that it is loaded from."""


class Routed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Instances for a request, with a reservation that ends by `done`, `cancel`, or its deadline."""

    id: str
    decode: str
    """The instance that answers."""
    decode_url: str
    prefill: str | None = None
    """The instance that prefills first; None: `decode` does both."""
    prefill_url: str | None = None
    decode_rank: int | None = None
    """What `X-Data-Parallel-Rank` is to say at `decode_url`; None: nothing."""
    prefill_rank: int | None = None
    prefill_peer: str = ""
    """`HOST:PORT` where the node of `decode` reads what `prefill` stores; empty: they share a store, or no other one is
    known."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefilling instance is predicted not to compute."""
    ranges: tuple[Range, ...] = ()
    last_block: str | None = None
    """The hash of the last whole block before the last token, in hexadecimal, for the hand-over."""
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    deadline_s: float = 0.0
    """Seconds until the reservation ends by itself, unless progress is reported."""
    degraded: str = ""
    """Why the choice was by load alone; empty: it was not."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """No instance now."""

    reason: str
    retry_after_s: float
    id: str = ""
    """Under which the decision can be explained."""
    deferred: bool = False
    """Whether the request may wait for room in a batch: asked for again with this `id` as `deferred_id` it keeps its
    place. Who waits no more is cancelled by that id, or asks no more."""
    give_up_s: float | None = None
    """How long waiting can help: later its first token would be late. None: without a limit."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the engine's answer says of the tokens."""

    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    prefill_leg: bool = False
    """Whether the engine of the prefill leg had the cached tokens; else the one that answered."""


NOTHING_SAID: Final = Usage()


class EngineMetrics(msgspec.Struct, frozen=True):
    """Numbers of one engine; None for what it does not export."""

    started_s: float | None = None
    """When its process began, in seconds of the calendar."""
    requests: int | None = None
    """Running and waiting."""
    is_asleep: bool = False


def unless_awaited(error: NotFound, awaited: Collection[str]) -> NotFound | NotReady:
    """Return the error of a model that nobody has; while engines are awaited, that they may have it."""
    if not awaited:
        return error
    names = ", ".join(sorted(awaited)[:MAX_NAMED_ENGINES])
    more = len(awaited) - MAX_NAMED_ENGINES
    return NotReady(
        f"{error}; engines that have not said yet what they serve: {names}{f' and {more} more' if more > 0 else ''}"
    )


class Router(Protocol):
    """Choose instances and follow requests. Calls answer at once. Unknown ids are ignored by all but `route`."""

    def route(self, request: RouteRequest) -> Routed | Refused:
        """Choose instances and reserve them. Raises InvalidRequest, NotFound for a model without a pool, NotReady
        while an engine that may have it has never answered."""
        ...

    def prefilled(self, id: str) -> None:
        """Note that the prefill leg is done."""
        ...

    def prefill_failed(self, id: str) -> None:
        """Note that the prefill leg failed or is left out: the other instance computes the prompt."""
        ...

    def first_token(self, id: str) -> None:
        """Note the first token of the answer, when it comes."""
        ...

    def done(self, id: str, usage: Usage = NOTHING_SAID) -> None:
        """End the request, with what the engines' usage says of its one answer."""
        ...

    def cancel(self, id: str) -> None:
        """End the request: its client left, or it failed, or it waits no more."""
        ...

    def unreachable(self, instance: str) -> None:
        """Choose an instance no more until it answers again."""
        ...
